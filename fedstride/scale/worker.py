"""What runs in the process of a worker: jobs of a cohort, sums of what they gave, or a whole run."""

import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstride.algorithm import Algorithm
from fedstride.clients import Clients
from fedstride.descent import Local
from fedstride.losses import LossFunction
from fedstride.memory import as_rows
from fedstride.oracle import Oracle, room
from fedstride.replies import Reduced, Replies, finite, joined
from fedstride.sampling import Jobs, Replay, Sampler
from fedstride.simulator import stacked, train
from fedstride.vector import VectorModel
from fedstride.wire import Wire

NEWS = 0.2  # seconds between messages about a whole run

Columns = dict[str, np.ndarray]  # tables with a row a client


class Brief(NamedTuple):
    """All that a worker must know of a run."""

    name: str  # no other run has it
    method: Algorithm
    model: torch.nn.Module
    dtype: torch.dtype
    device: str
    backend: str
    loss: LossFunction
    each: tuple[LossFunction, str] | None  # the loss per example, where the driver found that there is one
    mixes_examples: bool
    pixels: int
    data: Any  # reference to inputs, targets and their order
    sizes: np.ndarray
    batch_size: int | None
    sampling: str | Replay
    local: Local
    weights: np.ndarray  # [N]: fleet weights
    seed: int
    chunk: int | None


class Pick(NamedTuple):
    """Rows of several objects: which object, which of its rows."""

    which: np.ndarray  # [C]
    rows: np.ndarray  # [C]


class Request(NamedTuple):
    """Some jobs of an exchange; the objects that come with it are messages, then memories."""

    exchange: int
    insist: bool  # it is one of the prologue
    jobs: Jobs
    messages: np.ndarray  # [C]: which of the objects everybody starts from
    memories: Pick | None
    by_weight: bool
    keep: bool  # uploads stay in the store, to be summed later


class Part(NamedTuple):
    """What comes back of a request: no vector of any single client, unless the method needs them."""

    reduced: Reduced  # with numpy arrays; without sums where uploads are kept
    fields: tuple[str, ...]  # of an upload
    losses: np.ndarray | None  # [C]
    evaluations: np.ndarray  # [C]
    seconds: float


def pick(objects: Any, wanted: Pick) -> Columns:
    """Rows of several objects as tables."""
    found: Columns = {}
    for place, tables in enumerate(objects):
        mine = np.flatnonzero(wanted.which == place)
        for name, table in tables.items():
            if name not in found:
                found[name] = np.empty((len(wanted.which), *table.shape[1:]), dtype=table.dtype)
            found[name][mine] = table[wanted.rows[mine]]
    return found


def as_tensor(array: np.ndarray, device: torch.device | None = None) -> Tensor:
    """A tensor on the array's own memory where the device can use it; it must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the store's memory is read-only
        return torch.from_numpy(array).to(device)


def packed(message: Any) -> Any:
    """A message for the store; tensors as arrays."""
    return type(message)(*(value.cpu().numpy() if isinstance(value, Tensor) else value for value in message))


def unpacked(message: Any, device: torch.device) -> Any:
    """Undo `packed`."""
    values = (as_tensor(value, device) if isinstance(value, np.ndarray) else value for value in message)
    return type(message)(*values)


class Held(Clients):
    """The examples of the clients that were asked for, on a device that may not hold everybody's.

    They stay as long as all of them are at most `limit` bytes; then it begins anew with those who are needed.
    """

    def __init__(self, host: Clients, device: torch.device, limit: float):
        self._host, self._device, self._limit = host, device, limit
        self._example = sum(part[0].numel() * part.element_size() for part in (host.inputs, host.targets))
        self.sizes, self.offsets = host.sizes, np.zeros(len(host.sizes) + 1, dtype=np.int64)
        self._forget()

    def _forget(self) -> None:
        self._here = np.zeros(len(self.sizes), dtype=bool)
        self.inputs, self.targets = (part[:0].to(self._device) for part in (self._host.inputs, self._host.targets))
        self.order = torch.arange(0, device=self._device)

    def fetch(self, clients: np.ndarray) -> bool:
        """Bring in who is missing; returns whether there was anybody."""
        missing = np.unique(clients[~self._here[clients]])
        if not len(missing):
            return False
        if (len(self.order) + self.sizes[missing].sum()) * self._example > self._limit:
            self._forget()
            missing = np.unique(clients)
        rows = torch.cat([self._host.order[self._host.offsets[i] : self._host.offsets[i + 1]] for i in missing])
        self.offsets[missing] = len(self.order) + np.cumsum(self.sizes[missing]) - self.sizes[missing]
        self.inputs = torch.cat([self.inputs, self._host.inputs[rows].to(self._device)])
        self.targets = torch.cat([self.targets, self._host.targets[rows].to(self._device)])
        self.order = torch.arange(len(self.inputs), device=self._device)
        self._here[missing] = True
        return True


class Worker:
    """An actor: owns a device, and what it needs of the run at hand."""

    def __init__(self) -> None:
        self._brief: Brief | None = None
        self._oracle: Oracle
        self._chunk: int

    def where(self) -> tuple[str, int]:
        """Machine and process."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def sees(self, path: str) -> bool:
        """Whether this machine has the file."""
        return os.path.exists(path)

    def share_cores(self, neighbours: int) -> None:
        """A torch thread a core, the cores of the machine shared out among its workers."""
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))

    def load(self, brief: Brief, neighbours: int, sharing: int) -> tuple[str, int]:
        """Make ready for a run on a device that so many workers share; returns backend and clients trained together."""
        import ray

        from fedstride.inputs import device as find
        from fedstride.simulate import build_oracle

        if self._brief is not None and self._brief.name == brief.name:
            return self._oracle.name, self._chunk
        self.share_cores(neighbours)
        device = find(brief.device)
        arrays = ray.get(brief.data)
        inputs, targets, order = (as_tensor(array) for array in arrays)
        host = Clients(inputs, targets, order, brief.sizes)
        vector = VectorModel(brief.model, brief.dtype, device)
        vector.mixes_examples, vector.pixels = brief.mixes_examples, brief.pixels
        self._clients = host
        if device.type == "cuda":
            self._clients = Held(host, device, torch.cuda.get_device_properties(device).total_memory / 4 / sharing)
        examples = tuple(part[:4].to(device) for part in host.data(0))
        self._oracle = build_oracle(brief.backend, vector, len(host), brief.loss, brief.each, *examples)
        self._chunk = brief.chunk or max(1, room(vector.x) // sharing)
        self._memory = as_rows(brief.method.init_client(vector.x))
        self._sampler = Sampler(self._clients, brief.batch_size, brief.sampling)
        self._brief = brief
        return self._oracle.name, self._chunk

    @torch.no_grad()
    def train(self, request: Request, *objects: Any) -> Any:
        """Train jobs, longest first; returns a part, then uploads if they are to be kept, then memories if any."""
        brief, device, start = self._brief, self._oracle.model.x.device, time.perf_counter()
        assert brief is not None
        jobs, method = request.jobs, brief.method
        exchange = (method.prologue if request.insist else method.exchanges)[request.exchange]
        if isinstance(self._clients, Held) and self._clients.fetch(jobs.clients):
            self._sampler = Sampler(self._clients, brief.batch_size, brief.sampling)
        models = int(request.messages.max()) + 1
        messages = [unpacked(message, device) for message in objects[:models]]
        version = 0 if request.keep else int(jobs.versions[0])
        replies = Replies(
            brief.weights, len(self._oracle.model.x), request.by_weight, method.needs_rows, version, method.factor,
            device,
        )  # fmt: skip
        parts, uploads, memories, losses, evaluations, places = [], [], [], [], [], []
        for first in range(0, len(jobs.clients), self._chunk):
            rows = slice(first, first + self._chunk)
            message = stacked([messages[which] for which in request.messages[rows]], self._oracle.model.x)
            own = (self._oracle, self._sampler, brief.local, brief.seed)
            done = train(*own, exchange, message, jobs.take(rows), self._memories(request, rows, objects[models:]))
            fields = getattr(done.upload, "_fields", ())
            if request.keep:
                part, vectors = self._kept(done.upload, fields, len(done.evaluations))
                uploads.append(vectors)
            else:
                chosen = jobs.take(rows)
                used = finite(done.upload, len(chosen.clients))
                part = replies.reduce(chosen, done.upload, used, Wire().bytes(done.upload))
            parts.append(part)
            places.append(np.arange(len(jobs.clients))[rows])
            own_types = zip(getattr(self._memory, "_fields", ()), self._memory, done.memory)
            memories.append({name: value.to(like.dtype).cpu().numpy() for name, like, value in own_types})
            losses += [] if done.train_loss is None else [done.train_loss.cpu().numpy()]
            evaluations.append(done.evaluations)
        numbers = (np.concatenate(losses) if losses else None, np.concatenate(evaluations))
        told = Part(_arrays(joined(parts, places)), fields, *numbers, time.perf_counter() - start)
        kept = ([uploads] if request.keep else []) + ([memories] if memories[0] else [])
        return (told, *(_tables(tables) for tables in kept)) if kept else told

    def _kept(self, upload: Any, fields: tuple[str, ...], count: int) -> tuple[Reduced, Columns]:
        """An upload whose vectors will be summed later: what goes to the driver, and what stays."""
        scalars = {name: value[:, 0] for name, value in zip(fields, upload) if value.shape[1] == 1}
        whole = len(self._oracle.model.x) == 1  # then vectors look like scalars: they are both
        vectors = {name: value.cpu().numpy() for name, value in zip(fields, upload) if value.shape[1] > 1 or whole}
        return Reduced(finite(upload, count), Wire().bytes(upload), scalars, {}, {}), vectors

    def _memories(self, request: Request, rows: slice, objects: tuple) -> Any:
        if request.memories is None:
            return ()
        wanted = Pick(*(column[rows] for column in request.memories))
        found = pick(objects, wanted)
        return type(self._memory)(
            *(torch.from_numpy(found[name]).to(self._oracle.model.x.device) for name in self._memory._fields)
        )

    def total(self, factors: np.ndarray, wanted: Pick, *objects: Any) -> Columns:
        """Kept uploads, summed by factors [k, C]."""
        found: Columns = {}
        for place, tables in enumerate(objects):
            mine = np.flatnonzero(wanted.which == place)
            for name, table in tables.items():
                rows = wanted.rows[mine]
                every = len(rows) == len(table) and np.array_equal(np.sort(rows), np.arange(len(table)))
                order, block = (rows.argsort(), table) if every else (slice(None), table[rows])  # no copy of all
                more = factors[:, mine[order]].astype(table.dtype) @ block
                found[name] = found[name] + more if name in found else more
        return found

    def gather(self, wanted: Pick, *objects: Any) -> tuple[None, Columns]:
        """Rows of several objects as one, so that the others can go."""
        return None, pick(objects, wanted)

    def play(self, function: Callable[..., Any], neighbours: int, *arguments: Any) -> Iterator[tuple[list, bool, Any]]:
        """A whole run, `function(*arguments, progress)`; yields rows as they come, whether it is over, what it gave."""
        news: queue.Queue = queue.Queue()

        def work() -> None:
            self.share_cores(neighbours)
            try:
                news.put(("end", function(*arguments, lambda row: news.put(("row", row)))))
            except BaseException as error:
                news.put(("error", error))

        threading.Thread(target=work, daemon=True).start()
        rows: list[dict[str, Any]] = []
        kind, told = "", time.monotonic()
        while kind != "end":
            kind, value = news.get()
            if kind == "error":
                raise value
            if kind == "row":
                rows.append(value)
            if kind == "end" or time.monotonic() - told > NEWS:
                yield rows, kind == "end", value if kind == "end" else None
                rows, told = [], time.monotonic()


def _tables(parts: list[Columns]) -> Columns:
    """Chunk after chunk as one table."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]


def _arrays(reduced: Reduced) -> Reduced:
    """With numpy arrays, which travel without being copied once more."""
    tables: Any = ({name: value.cpu().numpy() for name, value in part.items()} for part in reduced[2:])
    return Reduced(reduced.used, reduced.bytes, *tables)
