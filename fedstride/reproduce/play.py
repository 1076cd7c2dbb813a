"""Running what is missing of an item."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fedstride.experiment import Experiment
from fedstride.reproduce import store
from fedstride.reproduce.items import Cell, Item
from fedstride.reproduce.store import Found, points
from fedstride.statistics import Run

Watch = Callable[[str, Experiment, dict[str, Any]], None]


def play(item: Item, path: Path, folder: Path, seeds: int, watch: Watch = lambda *row: None) -> Found:
    """Tune on the first seed where there is a grid, then run every seed; stored runs stay, half-done ones go on."""
    found = Found(item, path)
    for cell, point, seed in missing(found, seeds):
        experiment = found.planned(cell, point, seed)
        assert experiment is not None  # a cell that another one waits for comes before it
        name = " ".join([cell.row, cell.column, *(f"{key}={value}" for key, value in point.items())]).strip()
        start = time.perf_counter()
        show = partial(watch, f"{name}, seed {seed}", experiment)
        result = experiment.run(folder / _folder(experiment), resume=True, progress=show)
        more = item.derive or (lambda row, experiment: {})
        run = Run(seed, [row | more(row, experiment) for row in result.rows], result.status)
        found.add(cell, point, experiment, run, time.perf_counter() - start, result.backend)
    return found


def missing(found: Found, seeds: int) -> Iterator[tuple[Cell, dict[str, Any], int]]:
    """What is still to be run: all points of a grid on seed 0, then the best one on the others, cell by cell."""
    for seed in range(seeds):
        for cell in sorted(found.item.cells, key=lambda cell: bool(cell.after)):
            wanted = points(cell) if seed == 0 else [found.winner(cell)]
            for point in wanted:
                if point is not None and found.get(cell, point, seed) is None:
                    yield cell, point, seed


def left(found: Found, seeds: int) -> int:
    """How many runs are still to be done."""
    have = sum(run["seed"] < seeds for run in found.runs)
    return sum(len(points(cell)) + seeds - 1 for cell in found.item.cells) - have


def _folder(experiment: Experiment) -> str:
    """A name that no other experiment has."""
    text = json.dumps(store.brief(experiment), sort_keys=True)
    return f"{experiment.method.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}/seed-{experiment.seed}"
