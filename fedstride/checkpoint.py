"""Runs on disk: `run.json` describes the run and names the tensor file that belongs to it, with its checksum.

Files appear whole or not at all (temporary file, fsync, rename). `run.json` is written last, so a crash at any moment
leaves either the old run or the new one. Vectors are safetensors; nothing is ever pickled. Rows are appended to
`rows.jsonl` as they come, a recorded timeline to `timeline.jsonl`; `run.json` says how many of them belong to the
checkpoint.
"""

import hashlib
import itertools
import json
import os
import time
from collections import namedtuple
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedstride.engine import Run
from fedstride.errors import FedstrideError
from fedstride.simulator import Simulator

FORMAT = 3
BUDGET = 20  # a checkpoint is due when this many times its duration has passed: at most 5 % of the time


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it appears complete or not at all."""
    temporary = path.with_name(path.name + ".part")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """A folder with those above it, if it is not there yet."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedstrideError(f"cannot write to the folder {path}: {error.strerror}") from None


def flatten(prefix: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Move the tensors out of nested NamedTuples and leave a JSON skeleton."""
    if isinstance(value, Tensor):
        tensors[prefix] = value.detach().cpu().contiguous()
        return {"tensor": prefix}
    if isinstance(value, tuple):
        parts = [flatten(f"{prefix}.{i}", part, tensors) for i, part in enumerate(value)]
        return {"tuple": parts, "fields": list(getattr(value, "_fields", ()))}
    return {"value": value}


def restore(skeleton: dict, tensors: dict[str, Tensor], device: torch.device, like: Any = None) -> Any:
    """Undo `flatten`, with the types of a freshly made state; without one, tuples have their field names."""
    if "tensor" in skeleton:
        return tensors[skeleton["tensor"]].to(device)
    if "tuple" in skeleton:
        pairs = zip(skeleton["tuple"], like or [None] * len(skeleton["tuple"]))
        parts = [restore(part, tensors, device, old) for part, old in pairs]
        if not skeleton["fields"]:
            return tuple(parts)
        return type(like)(*parts) if like else namedtuple("Restored", skeleton["fields"])(*parts)
    return skeleton["value"]


class Lines:
    """A table on disk, one JSON object a line, to which rows are added as they come."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows."""
        with open(self.path, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def keep(self, count: int) -> list[dict[str, Any]]:
        """The first rows; what comes after them, from a run that was killed later, is removed."""
        try:
            lines = self.path.read_text().splitlines(keepends=True)[:count]
            rows = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            rows = []
        if len(rows) != count:
            raise FedstrideError(f"{self.path} is damaged: {count} rows belong to the checkpoint")
        write_whole(self.path, "".join(lines).encode() if count else b"")
        return rows

    def sync(self) -> None:
        """Make sure that all rows are on disk."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())


class Folder:
    """The folder of one run."""

    _open: ClassVar[WeakSet["Folder"]] = WeakSet()  # of all runs of this process, which wait while one of them writes

    def __init__(self, path: str | os.PathLike, identity: dict[str, Any], resume: bool):
        self.path = Path(path)
        self._rows, self._timeline = Lines(self.path / "rows.jsonl"), Lines(self.path / "timeline.jsonl")
        self.identity = identity
        self._saved_at = 0.0
        self._cost = 0.0
        self._stored: dict | None = None
        if (self.path / "run.json").exists():
            self._stored = self._read()
            if not resume:
                raise FedstrideError(
                    f"{self.path} already holds a run ({self._stored['identity'].get('method')}, round "
                    f"{self._stored['round']}); pass resume=True to go on with it, or choose another folder"
                )
            self._check_identity()
        self._open.add(self)

    def _read(self) -> dict:
        path = self.path / "run.json"
        try:
            stored = json.loads(path.read_text())
            body, checksum = stored["run"], stored["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            raise FedstrideError(
                f"{path} is damaged; delete the folder to start again, or restore it from a copy"
            ) from None
        if hashlib.sha256(json.dumps(body).encode()).hexdigest() != checksum:
            raise FedstrideError(f"{path} does not match its checksum; the checkpoint is damaged")
        if body["format"] != FORMAT:
            raise FedstrideError(f"{path} has format {body['format']}; this version of fedstride reads format {FORMAT}")
        return body

    def _check_identity(self) -> None:
        assert self._stored is not None
        played = self._stored["round"]
        for key, mine in json.loads(json.dumps(self.identity)).items():
            theirs = self._stored["identity"].get(key)
            if key in ("steps", "participation") and isinstance(mine, list) and isinstance(theirs, list):
                mine, theirs = mine[:played], theirs[:played]
            if theirs != mine:
                if isinstance(mine, list) and isinstance(theirs, list):
                    theirs, mine = next(pair for pair in itertools.zip_longest(theirs, mine) if pair[0] != pair[1])
                raise FedstrideError(
                    f"the checkpoint in {self.path} is of another run: its {key} is {_short(theirs)}, "
                    f"this run's is {_short(mine)}"
                )

    @property
    def setup(self) -> dict[str, Any]:
        """What a stored run remembers of its set-up; empty if nothing is stored."""
        return self._stored["setup"] if self._stored else {}

    def load(self, run: Run, transport: Simulator) -> None:
        """Put the stored run into a fresh one; without a stored run, make the folder ready for this one."""
        stored = self._stored
        if stored is None:
            make_folder(self.path)
            try:
                for table in (self._rows, self._timeline):  # rows without a checkpoint belong to nothing
                    table.path.unlink(missing_ok=True)
                write_whole(self._rows.path, b"")
            except OSError as error:
                raise FedstrideError(f"cannot write to the folder {self.path}: {error.strerror}") from None
            return
        path, device = self.path / stored["tensors"], run.state.x.device
        try:
            data = path.read_bytes()
        except OSError:
            raise FedstrideError(f"the checkpoint in {self.path} is incomplete: {path.name} is missing") from None
        if hashlib.sha256(data).hexdigest() != stored["tensors_sha256"]:
            raise FedstrideError(f"{path} does not match its checksum; the checkpoint is damaged")
        tensors = safetensors.torch.load(data)
        run.state = restore(stored["state"], tensors, device, run.state)
        run.round, run.seconds, run.status = stored["round"], stored["seconds"], stored["status"]
        run.rows = self._rows.keep(stored["rows"])
        if run.timeline is not None:
            run.timeline.load(self._timeline.keep(stored["timeline"]))
        transport.memories.load(
            stored["clients"],
            {name[7:]: value for name, value in tensors.items() if name.startswith("memory.")},
        )
        parts = {name: restore(part, tensors, device) for name, part in stored["transport"].items()}
        transport.load(parts, run.seconds)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk or a folder that went away ends the run with a sentence; what is on disk stays."""
        try:
            yield
        except OSError as error:
            raise FedstrideError(
                f"cannot write to the folder {self.path}: {error.strerror}; the rows up to the last checkpoint are kept"
            ) from None

    def append(self, run: Run) -> None:
        """Add what the last round brought to the tables on disk."""
        with self._writing():
            self._rows.append(run.rows[-1:])
            if run.timeline is not None:
                self._timeline.append(run.timeline.news())

    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._saved_at > BUDGET * sum(folder._cost for folder in self._open)

    def save(self, run: Run, transport: Simulator, setup: dict[str, Any]) -> None:
        """Write a checkpoint and remove the one before."""
        start = time.monotonic()
        tensors: dict[str, Tensor] = {}
        state = flatten("state", run.state, tensors)
        parts = {name: flatten(f"transport.{name}", part, tensors) for name, part in transport.dump().items()}
        clients, tables = transport.memories.dump()
        tensors |= {f"memory.{name}": table.cpu().contiguous() for name, table in tables.items()}
        data = safetensors.torch.save({name: value.clone() for name, value in tensors.items()})
        name = f"tensors-{run.round:06d}-{run.status}.safetensors"
        body = {
            "format": FORMAT, "identity": self.identity, "setup": setup,
            "round": run.round, "seconds": run.seconds, "status": run.status, "rows": len(run.rows),
            "timeline": run.timeline.written if run.timeline else 0, "state": state, "transport": parts,
            "clients": clients, "tensors": name, "tensors_sha256": hashlib.sha256(data).hexdigest(),
        }  # fmt: skip
        body = json.loads(json.dumps(body))
        with self._writing():
            self._rows.sync()  # the rows this checkpoint counts on
            if run.timeline is not None:
                self._timeline.sync()
            write_whole(self.path / name, data)
            checksum = hashlib.sha256(json.dumps(body).encode()).hexdigest()
            write_whole(self.path / "run.json", json.dumps({"run": body, "sha256": checksum}).encode())
            for old in self.path.glob("tensors-*.safetensors"):
                if old.name != name:
                    old.unlink()
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - start


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
