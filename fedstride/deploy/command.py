"""`fedstride deploy`: the same experiment over a network."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment


def local(experiment: Experiment, out: Path, half: bool, timeout: float, err: Console) -> Path:
    """The whole stack on this machine; returns the folder of the run."""
    from fedstride.deploy.local import Stack

    clients = None if experiment.partition is None else experiment.partition.options.get("clients")
    if not clients:
        raise FedstrideError("deploy local needs a partition with a number of clients, such as partition.clients=3")
    experiment.prepare(real=True)  # mistakes come out before anything starts
    folder = out / str(experiment.method) / f"seed-{experiment.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    experiment.save(folder / "experiment.toml")
    err.print(f"starting Flower's link and {clients} nodes; what they say is in {out / 'flower-stack'}")
    with Stack(out / "flower-stack", int(clients)) as stack:
        name = f"{out.name}-{experiment.seed}"
        stack.run(experiment, name, folder, half, timeout, lambda line: _tell(line, experiment, err))
    if not (folder / "run.json").exists():
        raise FedstrideError(f"the run did not start; see {out / 'flower-stack' / 'executor.log'}")
    return folder


def _tell(line: str, experiment: Experiment, err: Console) -> None:
    """Rows become a line of progress; the rest is said as it is, but for Flower's own words."""
    try:
        row: Any = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict) and "round" in row:
        accuracy = f", accuracy {row['accuracy']:.3f}" if "accuracy" in row else ""
        where = f"round {row['round']}/{experiment.rounds}"
        err.print(f"{where}: {row['clients']} clients, {row['seconds']:.1f} s{accuracy}")
    elif line.startswith(("client", "the reply", "error", "clients")):
        err.print(line)
