"""An item shrunk to seconds: it shows that every part of it runs, and says nothing about the methods."""

import dataclasses
from typing import Any

from fedstride.choices import FLEETS
from fedstride.experiment import Experiment
from fedstride.reproduce.items import Cell, Item

CLIENTS, ROUNDS, CELLS = 10, 2, 6


def shrink(item: Item) -> Item:
    """A few cells with the digits, a linear model, ten clients and two rounds."""
    step = max(1, len(item.cells) // CELLS)
    cells = [
        dataclasses.replace(cell, experiment=_small(cell.experiment), grid=_few(cell)) for cell in item.cells[::step]
    ]
    reduced = (
        "Smoke: digits, a linear model, ten clients, two rounds, some of the cells. It says nothing about methods."
    )
    return dataclasses.replace(item, cells=tuple(cells), seeds=1, reduced=reduced)


def _few(cell: Cell) -> dict[str, Any]:
    """Two values of one field of the grid."""
    return {key: list(values)[:2] for key, values in list(cell.grid.items())[:1]}


def _small(experiment: Experiment) -> Experiment:
    found = experiment.dump()
    found |= {"rounds": ROUNDS, "every": 1, "dtype": "float64"}
    found.pop("seconds", None)
    found.pop("stop", None)
    found.pop("augment", None)
    if found["data"]["name"] in FLEETS:
        found["data"] |= {"rows": 20, "features": 5} if found["data"]["name"] == "least-squares" else {}
    else:
        found["data"] = {"name": "digits"}
        if found["model"]["name"] != "svm-fedveca":
            found["model"] = {"name": "logistic"}
        found["partition"] |= {"clients": min(CLIENTS, found["partition"]["clients"])}
        if "minimum" in found["partition"]:
            found["partition"]["minimum"] = 1
    if isinstance(found["steps"], int):
        found["steps"] = min(3, found["steps"])
    elif isinstance(found["steps"], list):
        found["steps"] = [min(3, steps) for steps in found["steps"][:CLIENTS]]
    elif found["steps"]["name"] == "gaussian":
        found["steps"] |= {"mean": 3, "variance": min(2, found["steps"]["variance"])}
    for part in (found["method"], found.get("participation", {}), found.get("schedule", {})):
        for key in ("n", "concurrency", "size"):
            if isinstance(part.get(key), int):
                part[key] = min(part[key], 5)
    return Experiment.parse(found)
