"""`fedstride deploy local | server | client | keys`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedstride import runs
from fedstride.arguments import Items, description
from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment
from fedstride.terminal import end, err, show

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


Home = Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")]
Half = Annotated[bool, typer.Option("--half", help="Send vectors as float16.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which a silent client is given up.")]
Keys = Annotated[Path | None, typer.Option(help="Folder with certificates and keys, from `fedstride deploy keys`.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Send in the clear, also to other machines.")]


@app.command()
def local(items: Items = None, out: Home = Path("runs/deploy"), half: Half = False, timeout: Timeout = 600.0) -> None:
    """Server and clients on this machine, one process each, as many as the partition has clients."""
    command = _deployment()
    _deployed(command.local(Experiment.parse(description(items, None)), out, half, timeout, err))


@app.command()
def server(
    clients: Annotated[int, typer.Option(min=1, help="How many clients to wait for.")],
    items: Items = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9092,
    keys: Keys = None, insecure: Insecure = False, out: Home = Path("runs/deploy"), half: Half = False,
    timeout: Timeout = 600.0,
) -> None:  # fmt: skip
    """The server of a federation; started again in the same folder, it goes on."""
    command, experiment = _deployment(), Experiment.parse(description(items, None))
    _deployed(command.server(experiment, out, clients, host, port, keys, insecure, half, timeout, err))


@app.command()
def client(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    number: Annotated[int, typer.Option(min=0, help="This client's number, from 0.")],
    data: Annotated[Path | None, typer.Option(help="An .npz file with the arrays inputs and targets.")] = None,
    memory: Annotated[Path, typer.Option(help="Folder for what this client remembers.")] = Path("memory"),
    keys: Keys = None, insecure: Insecure = False,
) -> None:  # fmt: skip
    """A client of a federation, until it is stopped. Without --data it takes its part of the experiment's data set."""
    raise typer.Exit(_deployment().client(server, number, data, memory, keys, insecure))


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    clients: Annotated[int, typer.Option(min=1, help="How many clients get a key.")],
    host: Annotated[list[str], typer.Option(help="Names and addresses by which clients reach the server.")],
) -> None:
    """Certificates for the server and a key for every client."""
    _deployment()
    from fedstride.deploy.keys import write

    write(folder, clients, [*host, "127.0.0.1", "localhost"])
    typer.echo(f"{folder}: a client gets ca.crt and its node-K; everything else stays with the server")


def _deployment() -> Any:
    try:
        from fedstride.deploy import command
    except ImportError:
        raise FedstrideError("deployment needs Flower: pip install 'fedstride[deploy]'") from None
    return command


def _deployed(folder: Path) -> None:
    results = {folder.parent.name: [runs.read(folder.parent.name, 0, folder).run]}
    show(results, None, folder)
    end(results)
