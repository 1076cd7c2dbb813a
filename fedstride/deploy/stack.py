"""Flower's programs as processes of ours: the link with its executor, nodes, and a run; nothing is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from fedstride.checkpoint import make_folder
from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment

APP = """[project]
name = "fedstride-run"
version = "1.0.0"
dependencies = []
license = "Apache-2.0"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedstride"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
{config}
"""
MISSING = "Flower is not installed: pip install 'fedstride[deploy]'"
PATIENCE = 90.0  # seconds for a process to be ready


GIVEN: set[int] = set()  # ports that programs of ours are about to take


def port() -> int:
    """A free one, which nobody was given before."""
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            found = listener.getsockname()[1]
        if found not in GIVEN:
            GIVEN.add(found)
            return found


def environment(home: Path) -> dict[str, str]:
    """Flower's settings: its home in our folder, no telemetry, no look for updates."""
    return os.environ | {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip


@contextmanager
def process(name: str, arguments: list[str], folder: Path) -> Iterator[subprocess.Popen]:
    """One of Flower's programs, in a group of its own so that its children end with it; its words go to a file."""
    with open(folder / f"{name}.log", "w") as log:
        try:
            started = subprocess.Popen(
                arguments,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(folder / "flower"),
                start_new_session=True,
            )
        except FileNotFoundError:
            raise FedstrideError(MISSING) from None
    try:
        yield started
    finally:
        for word in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(started.pid, word)
                started.wait(5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


class Stack:
    """A link, and on request nodes; with the folder that `fedstride deploy keys` has made, encrypted and by key."""

    def __init__(self, folder: Path, clients: int, host: str = "127.0.0.1", at: int = 0, keys: Path | None = None):
        self.folder, self.clients, self.host, self.port = folder.resolve(), clients, host, at or port()
        self.keys = None if keys is None else keys.resolve()
        self._stack = ExitStack()
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Stack":
        home = self.folder / "flower"
        make_folder(home)
        self._check()
        here = f"{self._here}:{self.port}"
        trust = (
            "insecure = true" if self.keys is None else f"root-certificates = {json.dumps(str(self.keys / 'ca.crt'))}"
        )
        (home / "config.toml").write_text(f'[superlink.here]\naddress = "{here}"\n{trust}\n')
        secure = ["--insecure"]
        if self.keys is not None:
            secure = ["--ssl-ca-certfile", str(self.keys / "ca.crt"), "--ssl-certfile", str(self.keys / "server.crt")]
            secure += ["--ssl-keyfile", str(self.keys / "server.key"), "--enable-supernode-auth"]
        try:
            self._open(
                "link", "flower-superlink", *secure, "--host", self.host, "--port", str(self.port),
                "--disable-runtime-dependency-installation", "--database", str(home / "state.db"),
                "--isolation", "process",
            )  # fmt: skip
            self._wait()
            self._open("executor", "flower-superexec", *trusting(self.keys), "--runtime-api-address", here)
            for key in [] if self.keys is None else sorted(self.keys.glob("node-*.pub")):
                self._register(key)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        for started in self.processes.values():  # all at once; each is then waited for
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGTERM)
        self._stack.close()

    def _open(self, name: str, *arguments: str) -> None:
        self.processes[name] = self._stack.enter_context(process(name, list(arguments), self.folder))

    def _flwr(self, *arguments: str, watch: Callable[[str], None] = lambda line: None) -> None:
        """One of Flower's commands, to its end."""
        said: list[str] = []
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(["flwr", *arguments], env=environment(self.folder / "flower"), **pipes) as running:
            assert running.stdout is not None
            for line in running.stdout:
                said = [*said[-20:], line.rstrip()]
                watch(line.rstrip())
        if running.returncode:
            words = " ".join(said)
            raise FedstrideError(
                f"flwr {arguments[0]} ended with {running.returncode}: {words}; logs are in {self.folder}"
            )

    def _register(self, key: Path) -> None:
        """Let a key in; the link knows it already if the server was here before."""
        try:
            self._flwr("supernode", "register", str(key), "here")
        except FedstrideError as error:
            if "already in use" not in str(error):
                raise

    def start(self, number: int, data: Path | None = None) -> None:
        """A node on this machine."""
        arguments = node(f"{self._here}:{self.port}", number, self.folder / "memory" / str(number), data, self.keys)
        self._open(f"node-{number}", *arguments)

    @property
    def _here(self) -> str:
        """By what name this machine reaches the link."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host

    def _check(self) -> None:
        """Refuse what the link would end for."""
        for name in () if self.keys is None else ("ca.crt", "server.crt", "server.key"):
            if not (self.keys / name).exists():  # type: ignore[operator]
                raise FedstrideError(f"{self.keys} has no {name}; `fedstride deploy keys` makes it")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._here, self.port))
            except OSError as error:
                raise FedstrideError(
                    f"the server cannot listen on {self.host}:{self.port}: {error.strerror or error}; choose another "
                    "with --host and --port"
                ) from None

    def _wait(self) -> None:
        start = time.monotonic()
        while True:
            with suppress(OSError), socket.create_connection((self._here, self.port), 1):
                return
            if self.processes["link"].poll() is not None or time.monotonic() - start > PATIENCE:
                raise FedstrideError(f"Flower's link did not come up; see {self.folder / 'link.log'}")
            time.sleep(0.2)

    def run(
        self, experiment: Experiment, name: str, folder: Path, timeout: float = 600.0,
        watch: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        """Hand the run to the link and follow it to its end; results go to the folder, `watch` sees what is said."""
        app = self.folder / "app"
        app.mkdir(exist_ok=True)
        config = {
            "experiment": json.dumps(experiment.dump()), "name": name, "clients": self.clients,
            "timeout": timeout, "folder": str(folder.resolve()),
        }  # fmt: skip
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
        (app / "pyproject.toml").write_text(APP.format(config=lines))
        (app / "app.py").write_text("from fedstride.deploy import apps\n\nclient = apps.client\nserver = apps.server\n")
        try:
            self._flwr("run", str(app), "here", "--stream", watch=watch)
        except FedstrideError:
            if self.processes["link"].poll() is not None:
                raise FedstrideError(
                    f"Flower's link has died; its last words are in {self.folder / 'link.log'}"
                ) from None
            raise


def trusting(keys: Path | None) -> list[str]:
    """Flags of a program that speaks to the link."""
    return ["--insecure"] if keys is None else ["--root-certificates", str(keys / "ca.crt")]


def node(server: str, number: int, memory: Path, data: Path | None, keys: Path | None) -> list[str]:
    """The command that runs a node."""
    config = f"client={number} folder={json.dumps(str(memory))}"
    config += "" if data is None else f" data={json.dumps(str(data.resolve()))}"
    own = [] if keys is None else ["--auth-supernode-private-key", str(keys / f"node-{number}")]
    return [
        "flower-supernode", *trusting(keys), *own, "--superlink", server, "--host", "127.0.0.1", "--port", str(port()),
        "--node-config", config,
    ]  # fmt: skip
