"""Runs on disk, to be read: LABEL/seed-K/ for every run of a study."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstride import statistics
from fedstride.errors import FedstrideError

ENDED = ("finished", "stopped", "diverged")
ROW = ("round", "seconds", "steps", "bytes_up", "bytes_down")  # numbers that no row is without
JOB = ("client", "version", "steps", "start", "end")


@dataclass(frozen=True)
class Record:
    """One run on disk."""

    label: str  # the method's
    seed: int
    rows: list[dict[str, Any]]
    status: str  # finished, stopped, diverged, unfinished
    jobs: list[dict[str, Any]]  # of the timeline; empty if none was recorded
    updates: list[dict[str, Any]]
    clients: dict[str, Any]  # classes, counts, accuracy, sizes; empty if not written
    experiment: str  # the resolved description, as text
    clock: str = "virtual"  # what kind of seconds; "wall-clock" over a network

    @property
    def ended(self) -> bool:
        """Whether there is an end to speak about."""
        return self.status in ENDED and bool(self.rows)

    @property
    def round(self) -> int:
        """The last round."""
        return self.rows[-1]["round"] if self.rows else 0

    @property
    def run(self) -> statistics.Run:
        """For `fedstride.statistics`; an unfinished run is taken as it stands."""
        return statistics.Run(self.seed, self.rows, self.status if self.status in ENDED else "stopped")


def load(folder: str | Path) -> list[Record]:
    """All runs of a comparison, by label and seed."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FedstrideError(f"there is no folder {folder}")
    found = [(path.parent.name, seed, path) for path in folder.glob("*/seed-*") if (seed := _seed(path)) is not None]
    if not found:
        raise FedstrideError(
            f"no runs in {folder}; they are expected in LABEL/seed-K, as `fedstride compare` writes them"
        )
    labels = _labels(folder / "study.toml")
    return [read(labels.get(name, name), seed, path) for name, seed, path in sorted(found)]


def _labels(path: Path) -> dict[str, str]:
    """What the methods of a study are called, by their folders, whose names may lack some characters."""
    from fedstride.study import Study  # which needs this module

    try:
        return {plan.folder.parent.name: plan.label for plan in Study.load(path).plans}
    except FedstrideError:  # there is none, or it is of another version
        return {}


def text(path: Path) -> str:
    """A text file; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError):
        raise _damaged(path, "it cannot be read as text") from None


def read(label: str, seed: int, path: Path) -> Record:
    """One run."""
    rows, timeline = _lines(path / "rows.jsonl"), _lines(path / "timeline.jsonl")
    end: dict[str, Any] = {}
    _need(path / "rows.jsonl", rows, ROW)
    _need(path / "timeline.jsonl", [row for row in timeline if "fate" in row], JOB)
    _need(path / "timeline.jsonl", [row for row in timeline if "fate" not in row], ("update", "seconds"))
    if (path / "run.json").exists():
        end = _json(path / "run.json").get("run") or {}
        if not isinstance(end, dict) or end.get("status") not in (*ENDED, "running"):
            raise _damaged(path / "run.json", "it does not say how the run stands")
    status = end["status"] if end.get("status") in ENDED else "unfinished"
    if status != "unfinished":  # rows after the end belong to a continuation that was killed
        for name, table in (("rows", rows), ("timeline", timeline)):
            count = end.get(name, len(table))
            if count > len(table):
                raise _damaged(path / f"{name}.jsonl", f"it has {len(table)} rows, the run wrote {count}")
            del table[count:]
    jobs = [{"exchange": "train", "update": None} | row for row in timeline if "fate" in row]
    updates = [row for row in timeline if "fate" not in row]
    experiment = text(path / "experiment.toml")
    clock = (end.get("setup") or {}).get("clock", "virtual")
    return Record(label, seed, rows, status, jobs, updates, _clients(path / "clients.json"), experiment, clock)


def _need(path: Path, rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    for number, row in enumerate(rows, 1):
        for name in names:
            if not isinstance(row.get(name), int | float):
                raise _damaged(path, f"row {number} has no {name}")


def _clients(path: Path) -> dict[str, Any]:
    found = _json(path)
    counts, accuracy = found.get("counts") or [], found.get("accuracy") or []
    try:
        classes = len(found.get("classes") or counts[0]) if counts else 0
        good = all(len(row) == classes and all(number >= 0 for number in row) for row in counts)
        good &= all(value is None or isinstance(value, int | float) for value in accuracy)
    except (TypeError, IndexError):
        good = False
    if not good:
        raise _damaged(path, "counts must be clients x classes, accuracy one number a client")
    return found


def _seed(path: Path) -> int | None:
    digits = path.name.removeprefix("seed-")
    return int(digits) if digits.isdecimal() and path.is_dir() else None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a table; a crash may have left half of the last one."""
    rows, lines = [], text(path).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            row = None
        if not isinstance(row, dict):
            raise _damaged(path, f"line {number} is not a JSON object")
        rows.append(row)
    return rows


def _json(path: Path) -> dict[str, Any]:
    words = text(path)
    try:
        value = json.loads(words) if words or path.exists() else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _damaged(path, "it is not a JSON object")
    return value


def _damaged(path: Path, why: str) -> FedstrideError:
    return FedstrideError(f"{path} is damaged: {why}; delete {path.parent} to run it again")
