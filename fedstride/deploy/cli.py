"""`fedstride deploy local | server | client | keys`."""

import ipaddress
import json
import math
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstride import report, runs
from fedstride.arguments import Items, description
from fedstride.checkpoint import make_folder
from fedstride.choices import FLEETS
from fedstride.deploy import stack
from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment
from fedstride.study import Planned, Study
from fedstride.terminal import end, err, live, show

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Home = Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which a silent client is given up.")]
Keys = Annotated[Path | None, typer.Option(help="Folder with certificates and keys, from `fedstride deploy keys`.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Send in the clear, also to other machines.")]


@app.command()
def local(items: Items = None, out: Home = Path("runs/deploy"), timeout: Timeout = 600.0) -> None:
    """Server and clients on this machine, one process each, as many as the partition has clients."""
    experiment = _experiment(items)
    clients = experiment.count
    if not clients:
        slot = "data" if experiment.data.name in FLEETS else "partition"
        raise FedstrideError(f"deploy local needs a number of clients, such as {slot}.clients=3")

    def started(running: stack.Stack) -> None:
        err.print(f"Flower's link is up, {clients} nodes start; what they say is in {out / 'flower-stack'}")
        for number in range(int(clients)):
            running.start(number)

    _serve(experiment, stack.Stack(out / "flower-stack", int(clients)), out, timeout, started)


@app.command()
def server(
    clients: Annotated[int, typer.Option(min=1, help="How many clients to wait for.")],
    items: Items = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 9092,
    keys: Keys = None, insecure: Insecure = False, out: Home = Path("runs/deploy"),
    timeout: Timeout = 600.0,
) -> None:  # fmt: skip
    """The server of a federation; started again in the same folder, it goes on."""
    experiment = _experiment(items)
    guard(host, keys, insecure)
    words = f"waiting for {clients} clients; each runs: fedstride deploy client --server HOST:{port} --number K ..."
    link = stack.Stack(out / "flower-stack", clients, host, port, keys)
    _serve(experiment, link, out, timeout, lambda running: err.print(words, soft_wrap=True))


@app.command()
def client(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    number: Annotated[int, typer.Option(min=0, help="This client's number, from 0.")],
    data: Annotated[
        Path | None, typer.Option(help="An .npz file with inputs and targets, or a .py file whose load() returns them.")
    ] = None,
    memory: Annotated[Path, typer.Option(help="Folder for what this client remembers.")] = Path("memory"),
    keys: Keys = None, insecure: Insecure = False,
) -> None:  # fmt: skip
    """A client of a federation, until it is stopped. Without --data it takes its part of the experiment's data set."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise FedstrideError(f"--server must be HOST:PORT, such as 192.168.1.10:9092, not {server!r}")
    guard(host.strip("[]"), keys, insecure)
    if keys is not None and not (keys / f"node-{number}").exists():
        raise FedstrideError(f"{keys} has no node-{number}; `fedstride deploy keys` makes it where the server is")
    if data is not None and not data.exists():
        raise FedstrideError(f"there is no file {data}")
    if data is not None and data.suffix not in (".npz", ".py"):
        raise FedstrideError(f"--data must be an .npz file or a .py file, not {data}")
    make_folder(memory)
    arguments = stack.node(server, number, memory.resolve(), data, keys)
    home = stack.environment(memory.resolve() / "flower")
    try:
        os.execvpe(arguments[0], arguments, home)  # this process becomes the node: nothing of it stays in memory
    except FileNotFoundError:
        raise FedstrideError(stack.MISSING) from None


@app.command("keys")
def make_keys(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    clients: Annotated[int, typer.Option(min=1, help="How many clients get a key.")],
    host: Annotated[list[str], typer.Option(help="Names and addresses by which clients reach the server.")],
) -> None:
    """Certificates for the server and a key for every client."""
    try:
        from fedstride.deploy.keys import write
    except ImportError:
        raise FedstrideError(stack.MISSING) from None
    write(folder, clients, [*host, "127.0.0.1", "localhost"])
    typer.echo(f"{folder}: a client gets ca.crt and its node-K; everything else stays with the server")


def guard(host: str, keys: Path | None, insecure: bool) -> None:
    """Nothing leaves the machine in the clear unless it is asked for by name."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if keys is None and not insecure and not loopback:
        raise FedstrideError(f"{host} is not this machine: give --keys FOLDER, or say --insecure to send in the clear")


def _serve(
    experiment: Experiment, link: stack.Stack, out: Path, timeout: float,
    started: Callable[[stack.Stack], None],
) -> None:  # fmt: skip
    """Run it, and show what came of it."""
    from fedstride.deploy.server import deployable  # needs Flower

    if not 0 < timeout < math.inf:
        raise FedstrideError(f"--timeout must be a number of seconds above 0, not {timeout:g}")
    prepared = deployable(experiment)  # mistakes come out before anything starts
    study = Study(experiment)
    (plan,) = study.plans
    folder = out / plan.folder
    name = _name(folder, experiment)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    with live(study, False) as (watch, done), link:
        started(link)
        settled = experiment.settled(len(prepared.classes))
        try:
            link.run(settled, name, folder, timeout, lambda line: _tell(line, plan, watch))
        except FedstrideError as error:
            raise FedstrideError(f"{error}; the rounds that are done are kept, and the same command goes on") from None
        record = runs.read(plan.label, experiment.seed, folder)
        if not record.ended:
            raise FedstrideError(
                f"the run ended early, after round {record.round}; the same command goes on; see the logs in "
                f"{link.folder}"
            )
        done(plan, record.run)
    results = {record.label: [record.run]}
    show(results, None, folder, record.clock)
    typer.echo(f"report: {report.write(out)}")
    end(results)


def _experiment(items: list[str] | None) -> Experiment:
    """The one run that is to be deployed."""
    found = description(items, None)
    if more := [name for name in ("methods", "seeds", "grid") if name in found]:
        raise FedstrideError(
            f"a deployment is one run, and the description is of several: leave {' and '.join(more)} out; its method "
            "and seed can be given as method=fedavg seed=0"
        )
    return Experiment.parse(found)


def _name(folder: Path, experiment: Experiment) -> str:
    """What tells this run from every other, also from an earlier one in the same place: drawn once, kept on disk."""
    path = folder / "name"
    if (folder / "run.json").exists() and path.exists():
        if Experiment.load(folder / "experiment.toml").dump() != experiment.dump():
            raise FedstrideError(f"{folder} holds another experiment; choose another folder with --out")
        return path.read_text()
    make_folder(folder)
    experiment.save(folder / "experiment.toml")
    path.write_text(secrets.token_hex(8))
    return path.read_text()


def _tell(line: str, plan: Planned, watch: Callable[[Planned, dict[str, Any]], None]) -> None:
    """Rows become progress; what our side says is said, Flower's own words are not."""
    try:
        row: Any = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict) and "round" in row:
        watch(plan, row)
        if not err.is_terminal:  # there is no bar
            accuracy = f", accuracy {row['accuracy']:.3f}" if "accuracy" in row else ""
            where = f"round {row['round']}/{plan.experiment.rounds}"
            err.print(f"{where}: {row['clients']} clients, {row['seconds']:.1f} s{accuracy}")
    elif line.startswith(("client", "the reply")) or "FedstrideError: " in line:
        err.print(line.rpartition("FedstrideError: ")[2])
