"""`fedstride deploy`: the same experiment over a network."""

import ipaddress
import json
import secrets
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fedstride import runs
from fedstride.deploy import stack
from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment


def local(experiment: Experiment, out: Path, half: bool, timeout: float, err: Console) -> Path:
    """Link, nodes and run on this machine, as many nodes as the partition has clients; returns the run's folder."""
    clients = None if experiment.partition is None else experiment.partition.options.get("clients")
    if not clients:
        raise FedstrideError("deploy local needs a partition with a number of clients, such as partition.clients=3")

    def started(running: stack.Stack) -> None:
        for number in range(int(clients)):
            running.start(number)

    err.print(f"starting Flower's link and {clients} nodes; what they say is in {out / 'flower-stack'}")
    return _serve(experiment, stack.Stack(out / "flower-stack", int(clients)), out, half, timeout, started, err)


def server(
    experiment: Experiment, out: Path, clients: int, host: str, port: int, keys: Path | None, insecure: bool,
    half: bool, timeout: float, err: Console,
) -> Path:  # fmt: skip
    """Link and run; nodes come from elsewhere."""
    guard(host, keys, insecure)

    def started(running: stack.Stack) -> None:
        err.print(
            f"waiting for {clients} clients; each runs: fedstride deploy client --server HOST:{port} --number K ..."
        )

    running = stack.Stack(out / "flower-stack", clients, host, port, keys)
    return _serve(experiment, running, out, half, timeout, started, err)


def client(server: str, number: int, data: Path | None, memory: Path, keys: Path | None, insecure: bool) -> int:
    """A node, until it is stopped; returns its exit status."""
    guard(server.rpartition(":")[0], keys, insecure)
    if keys is not None and not (keys / f"node-{number}").exists():
        raise FedstrideError(f"{keys} has no node-{number}; `fedstride deploy keys` makes it where the server is")
    memory.mkdir(parents=True, exist_ok=True)
    arguments = stack.node(server, number, memory.resolve(), data, keys)
    return subprocess.run(arguments, env=stack.environment(memory.resolve() / "flower")).returncode


def guard(host: str, keys: Path | None, insecure: bool) -> None:
    """Nothing leaves the machine in the clear unless it is asked for by name."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if keys is None and not insecure and not loopback:
        raise FedstrideError(f"{host} is not this machine: give --keys FOLDER, or say --insecure to send in the clear")


def _serve(
    experiment: Experiment, link: stack.Stack, out: Path, half: bool, timeout: float,
    started: Callable[[stack.Stack], None], err: Console,
) -> Path:  # fmt: skip
    prepared = experiment.prepare(real=True)  # mistakes come out before anything starts
    folder = out / str(experiment.method) / f"seed-{experiment.seed}"
    name = _name(folder, experiment)
    with link:
        started(link)
        settled = experiment.settled(len(prepared.classes))
        link.run(settled, name, folder, half, timeout, lambda line: _tell(line, experiment, err))
    record = runs.read(folder.parent.name, experiment.seed, folder)
    if not record.ended:
        raise FedstrideError(
            f"the run ended early, after round {record.round}; the same command goes on; see the logs in {link.folder}"
        )
    return folder


def _name(folder: Path, experiment: Experiment) -> str:
    """What tells this run from every other, also from an earlier one in the same place: drawn once, kept on disk."""
    path = folder / "name"
    if (folder / "run.json").exists() and path.exists():
        if Experiment.load(folder / "experiment.toml").dump() != experiment.dump():
            raise FedstrideError(f"{folder} holds another experiment; choose another folder with --out")
        return path.read_text()
    folder.mkdir(parents=True, exist_ok=True)
    experiment.save(folder / "experiment.toml")
    path.write_text(secrets.token_hex(8))
    return path.read_text()


def _tell(line: str, experiment: Experiment, err: Console) -> None:
    """Rows become a line of progress; what our side says is said, Flower's own words are not."""
    try:
        row: Any = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict) and "round" in row:
        accuracy = f", accuracy {row['accuracy']:.3f}" if "accuracy" in row else ""
        where = f"round {row['round']}/{experiment.rounds}"
        err.print(f"{where}: {row['clients']} clients, {row['seconds']:.1f} s{accuracy}")
    elif line.startswith(("client", "the reply")) or "FedstrideError: " in line:
        err.print(line.rpartition("FedstrideError: ")[2])
