"""The whole stack on this machine by one command: a link, its executor, nodes, and the run; nothing is left behind.

Flower's own programs do the work, each a process of its own, over loopback without encryption.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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
PATIENCE = 90.0  # seconds for a process to be ready


def port() -> int:
    """A free one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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
            raise FedstrideError(f"{arguments[0]} is not installed: pip install 'fedstride[deploy]'") from None
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
    """A link and nodes on loopback."""

    def __init__(self, folder: Path, clients: int):
        self.folder, self.clients, self.port = folder.resolve(), clients, port()
        self._stack = ExitStack()
        self.nodes: dict[int, subprocess.Popen] = {}

    def __enter__(self) -> "Stack":
        home = self.folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        address = f"127.0.0.1:{self.port}"
        (home / "config.toml").write_text(f'[superlink.here]\naddress = "{address}"\ninsecure = true\n')
        try:
            self._open(
                "link", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port),
                "--disable-runtime-dependency-installation", "--database", str(home / "state.db"),
                "--isolation", "process",
            )  # fmt: skip
            self._wait()
            self._open("executor", "flower-superexec", "--insecure", "--runtime-api-address", address)
            for client in range(self.clients):
                self.start(client)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _open(self, name: str, *arguments: str) -> subprocess.Popen:
        return self._stack.enter_context(process(name, list(arguments), self.folder))

    def start(self, client: int) -> None:
        """One node."""
        memory = json.dumps(str(self.folder / "memory" / str(client)))
        self.nodes[client] = self._open(
            f"node-{client}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
            "--host", "127.0.0.1", "--port", str(port()), "--node-config", f"client={client} folder={memory}",
        )  # fmt: skip

    def _wait(self) -> None:
        start = time.monotonic()
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if time.monotonic() - start > PATIENCE:
                raise FedstrideError(f"Flower's link did not come up; see {self.folder / 'link.log'}")
            time.sleep(0.2)

    def run(
        self, experiment: Experiment, name: str, folder: Path, half: bool = False, timeout: float = 600.0,
        watch: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        """Hand the run to the link and follow it to its end; results go to the folder, `watch` sees what is said."""
        app = self.folder / "app"
        app.mkdir(exist_ok=True)
        config = {
            "experiment": json.dumps(experiment.dump()), "name": name, "clients": self.clients, "half": half,
            "timeout": timeout, "folder": str(folder.resolve()),
        }  # fmt: skip
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
        (app / "pyproject.toml").write_text(APP.format(config=lines))
        (app / "app.py").write_text("from fedstride.deploy import apps\n\nclient = apps.client\nserver = apps.server\n")
        command = ["flwr", "run", str(app), "here", "--stream"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, env=environment(self.folder / "flower"), **pipes) as running:
            assert running.stdout is not None
            for line in running.stdout:
                watch(line.rstrip())
        if running.returncode:
            raise FedstrideError(f"flwr run ended with {running.returncode}; see the logs in {self.folder}")
