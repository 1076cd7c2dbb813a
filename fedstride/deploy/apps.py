"""The two Flower apps. Both read the run's description from the run configuration, as JSON."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedstride.deploy import wire
from fedstride.deploy.node import Node
from fedstride.deploy.server import serve
from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment

client = ClientApp()
server = ServerApp()


def _experiment(context: Context) -> Experiment:
    return Experiment.parse(json.loads(str(context.run_config["experiment"])))


def _node(context: Context) -> Node:
    """This node's own client: its number and folder come from the node's configuration, never from the server."""
    try:
        number = int(context.node_config["client"])
    except (KeyError, ValueError):
        raise FedstrideError("a node needs its number: --node-config 'client=0'") from None
    folder = Path(str(context.node_config.get("folder", "memory")))
    path = context.node_config.get("data")
    return Node(_experiment(context), number, folder, None if path is None else read(str(path)))


def read(path: str) -> tuple[Any, Any]:
    """A client's own data: an .npz file with `inputs` and `targets`, or a .py file whose `load()` returns them."""
    if path.endswith(".py"):
        return _loaded(path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays["inputs"], arrays["targets"]
    except Exception as error:  # a damaged file brings many kinds
        raise FedstrideError(f"{path} is not an .npz file with the arrays inputs and targets: {error!r}") from None


def _loaded(path: str) -> tuple[Any, Any]:
    try:
        load = runpy.run_path(path).get("load")
        if load is None:
            raise FedstrideError(f"{path} has no function load, which returns inputs and targets")
        inputs, targets = load()
    except FedstrideError:
        raise
    except Exception as error:  # whatever somebody's own code may raise
        raise FedstrideError(f"{path}: load() failed: {error!r}") from None
    return inputs, targets


@client.query()
def hello(message: Message, context: Context) -> Message:
    """Who is this?"""
    return Message(wire.pack(_node(context).facts(), ()), reply_to=message)


@client.train()
def train(message: Message, context: Context) -> Message:
    """One job."""
    node = _node(context)
    header, upload = node.answer(*wire.unpack(message.content))
    return Message(wire.pack(header, upload, node.half), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The whole run."""
    config = context.run_config
    folder = Path(str(config["folder"]))
    serve(
        _experiment(context), grid, folder, name=str(config["name"]), clients=int(config["clients"]),
        timeout=float(config.get("timeout", 600.0)),
        progress=lambda row: print(json.dumps(row), flush=True),
    )  # fmt: skip
