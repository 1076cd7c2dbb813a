"""What was measured: small JSON files, one an item and scale, kept in the repository beside the papers.

A file holds a list of runs. A run says where it belongs (row, column, the point of the grid, seed), what exactly ran
(the fields that differ from an experiment's defaults), its numbers, a thinned curve, and who made it: commit, machine,
versions, wall-clock seconds. A run whose experiment is no longer that of its cell does not count.
"""

import fcntl
import importlib
import itertools
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstride.checkpoint import write_whole
from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment
from fedstride.reproduce.items import Cell, Item, Measure, own_scale
from fedstride.statistics import Run
from fedstride.study import override

POINTS = 60  # of a stored curve
UNTOLD = ("seed", "device", "backend", "chunk", "timeline")  # do not change what is computed, or are told elsewhere


def folder() -> Path:
    """Where results are kept."""
    return Path(next(iter(importlib.import_module("papers").__path__))) / "results"


def path(paper: str, name: str, scale: str) -> Path:
    """The file of an item."""
    return folder() / f"{paper}-{name}-{own_scale(paper, name, scale)}.json"


def brief(experiment: Experiment) -> dict[str, Any]:
    """The fields that are not the default, those of the machine and the seed left out."""
    defaults = Experiment().dump()
    return {
        key: value
        for key, value in experiment.dump().items()
        if key not in UNTOLD and (key not in defaults or defaults[key] != value)
    }


def points(cell: Cell) -> list[dict[str, Any]]:
    """The points of a cell's grid; one empty point without a grid."""
    return [dict(zip(cell.grid, values)) for values in itertools.product(*cell.grid.values())]


def at(cell: Cell, point: dict[str, Any], seed: int) -> Experiment:
    """The experiment of a cell at a point of its grid, before it is adapted."""
    description = cell.experiment.dump() | {"seed": seed, "timeline": False}
    for key, value in point.items():
        description = override(description, key, value)
    return Experiment.parse(description)


class Found:
    """The stored runs of an item that still belong to it."""

    def __init__(self, item: Item, path: Path):
        self.item, self.path = item, path
        cells = {(cell.row, cell.column): cell for cell in item.cells}
        self.runs: list[dict[str, Any]] = []
        stored = [(cells.get((run["row"], run["column"])), run) for run in _read(path)]
        for cell, run in sorted(stored, key=lambda pair: bool(pair[0] and pair[0].after)):  # those after others last
            if cell is not None and self._belongs(cell, run):
                self.runs.append(run)

    def _belongs(self, cell: Cell, run: dict[str, Any]) -> bool:
        """Whether a stored run is what its cell asks for now."""
        if run["point"] not in points(cell) or any(one.name not in run["values"] for one in self.item.measures):
            return False
        experiment = at(cell, run["point"], run["seed"])
        if run["experiment"] != brief(experiment):
            return False
        if cell.after:
            return run.get("followed") == self._followed(cell, run["seed"])
        return cell.adapt is None or _alike(run.get("adapted"), changes(experiment, cell.adapt(experiment, 0)))

    def _followed(self, cell: Cell, seed: int) -> int | None:
        """Client steps of the run that this one goes by; None while there is none."""
        other = self.cell(cell.row, cell.after)
        first = [] if other is None else [run for run in self.best(other) if run["seed"] == seed]
        return first[0]["steps"] if first else None

    def planned(self, cell: Cell, point: dict[str, Any], seed: int) -> Experiment | None:
        """The experiment of a cell at a point of its grid; None while a run that it waits for is missing."""
        experiment = at(cell, point, seed)
        if cell.adapt is None:
            return experiment
        steps = self._followed(cell, seed) if cell.after else 0
        return None if steps is None else cell.adapt(experiment, steps)

    def get(self, cell: Cell, point: dict[str, Any], seed: int) -> dict[str, Any] | None:
        """One run, if it is there."""
        return next((run for run in self._of(cell) if run["point"] == point and run["seed"] == seed), None)

    def _of(self, cell: Cell) -> Iterator[dict[str, Any]]:
        return (run for run in self.runs if (run["row"], run["column"]) == (cell.row, cell.column))

    def winner(self, cell: Cell) -> dict[str, Any] | None:
        """The best point of the grid on the first seed; None until all were tried."""
        every = points(cell)
        if len(every) == 1:
            return every[0]
        measure, tried = self.item.measures[0], [self.get(cell, point, 0) for point in every]
        if any(run is None for run in tried):
            return None
        values = [self._number(run, measure) for run in tried if run is not None]
        return every[int(np.argmin(values) if measure.lower else np.argmax(values))]

    def best(self, cell: Cell) -> list[dict[str, Any]]:
        """The runs of a cell that count: those at the winning point, one a seed."""
        point = self.winner(cell)
        return [] if point is None else [run for run in self._of(cell) if run["point"] == point]

    def cell(self, row: str, column: str) -> Cell | None:
        """The cell at a place."""
        return next((cell for cell in self.item.cells if (cell.row, cell.column) == (row, column)), None)

    def values(self, row: str, column: str, measure: Measure | None = None) -> dict[int, float]:
        """Numbers by seed."""
        cell, measure = self.cell(row, column), measure or self.item.measures[0]
        return {} if cell is None else {run["seed"]: self._number(run, measure) for run in self.best(cell)}

    def middle(self, row: str, column: str, measure: Measure | None = None) -> float:
        """The median over seeds; NaN where there is none."""
        values = list(self.values(row, column, measure).values())
        return float(np.median(values)) if values else math.nan

    def curves(self, row: str, column: str, metric: str, against: str = "rounds") -> dict[int, tuple[list, list]]:
        """Places and values by seed."""
        cell, axis = self.cell(row, column), {"rounds": "round"}.get(against, against)
        runs = [] if cell is None else self.best(cell)
        curves = [(run["seed"], run["curve"]) for run in runs if metric in run["curve"]]
        return {seed: (curve[axis], [math.nan if y is None else y for y in curve[metric]]) for seed, curve in curves}

    def diverged(self, row: str, column: str) -> set[int]:
        """The seeds whose runs did."""
        cell = self.cell(row, column)
        return set() if cell is None else {run["seed"] for run in self.best(cell) if run["status"] == "diverged"}

    @staticmethod
    def _number(run: dict[str, Any], measure: Measure) -> float:
        value = run["values"][measure.name]
        return measure.worst if value is None else value

    @property
    def complete(self) -> bool:
        """Whether every cell has a run."""
        return all(self.best(cell) for cell in self.item.cells)

    def left(self, seeds: int) -> float:
        """The share of its runs, tuning included, that is still to be done."""
        needed = [len(points(cell)) + seeds - 1 for cell in self.item.cells]
        there = [min(count, sum(1 for _ in self._of(cell))) for count, cell in zip(needed, self.item.cells)]
        return 1 - sum(there) / sum(needed)

    @property
    def done(self) -> int:
        """Cells that have a run."""
        return sum(bool(self.best(cell)) for cell in self.item.cells)

    def add(self, cell: Cell, point: dict[str, Any], experiment: Experiment, run: Run, wall: float, how: str) -> None:
        """Store one more run, in the place of an older one."""
        names = {self.item.curve[0], *self.item.beside, *self.item.keep}
        plan = at(cell, point, run.seed)
        values = {measure.name: measure.of(run) for measure in self.item.measures}
        entry = {
            "row": cell.row, "column": cell.column, "point": point, "seed": run.seed, "status": run.status,
            "values": {name: value if math.isfinite(value) else None for name, value in values.items()},
            "rounds": run.rows[-1]["round"], "seconds": _short(run.rows[-1]["seconds"]),
            "steps": sum(row["steps"] for row in run.rows), "wall": round(wall, 1),
            "made": {"commit": commit(), "machine": machine(), "torch": torch.__version__, "backend": how},
            "experiment": brief(plan), "curve": _thin(run.rows, self.item.curve[0], names),
        }  # fmt: skip
        if cell.adapt is not None:
            entry["adapted"] = changes(plan, experiment)
        if cell.after:
            entry["followed"] = self._followed(cell, run.seed)
        self.runs = [*_without(self.runs, entry), entry]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # others may be adding to the same item
            stored = [*_without(_read(self.path), entry), entry]
            lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in stored)
            write_whole(self.path, f'{{"runs":[\n{lines}\n]}}\n'.encode())


def changes(before: Experiment, after: Experiment) -> dict[str, Any]:
    """The fields that differ."""
    old = brief(before)
    return json.loads(json.dumps({key: value for key, value in brief(after).items() if old.get(key) != value}))


def _alike(one: Any, two: Any) -> bool:
    """Whether two descriptions are the same but for the last digits of numbers, which machines round differently."""
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-9)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_alike(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_alike, one, two))
    return one == two


def _without(runs: list[dict[str, Any]], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """All but the one that stood where this one stands."""
    return [old for old in runs if any(old[key] != entry[key] for key in ("row", "column", "point", "seed"))]


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(path.read_text())["runs"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        raise FedstrideError(f"{path} is damaged; delete it to measure again") from None


def _thin(rows: list[dict[str, Any]], metric: str, names: set[str]) -> dict[str, list[float | None]]:
    """Up to POINTS rows that have the metric, at the same rounds in every run of equal length, and the last one."""
    kept = [row for row in rows if metric in row]
    if not kept:
        return {}
    every = kept[1]["round"] - kept[0]["round"] if len(kept) > 1 else 1  # a run is measured every so many rounds
    stride = every * max(1, math.ceil(kept[-1]["round"] / every / POINTS))
    kept = [row for row in kept if row["round"] % stride == 0 or row is kept[-1]]
    found = [name for name in sorted(names) if all(name in row for row in kept)]
    return {name: [_short(row[name]) for row in kept] for name in ("round", "seconds", *found)}


def _short(value: float) -> float | None:
    """Five digits are enough for a picture; what is no number stays out."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e9 else float(f"{value:.5g}")


@cache
def commit() -> str:
    """The commit that is checked out; with a plus, if files differ from it. A tree without its history is told."""
    if "FEDSTRIDE_COMMIT" in os.environ:
        return os.environ["FEDSTRIDE_COMMIT"]
    here = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "../../fedstride", "../../papers/*.py"],
            cwd=here, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "")


@cache
def machine() -> str:
    """The GPU, or the processor and its cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = names[0].partition(":")[2].strip() if names else platform.machine()
    except OSError:
        name = platform.machine()
    return f"{torch.get_num_threads()} threads, {name}"
