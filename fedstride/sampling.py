"""Which examples a client sees at which step: a function of keys, or somebody else's list."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstride.clients import Clients
from fedstride.errors import FedstrideError
from fedstride.keys import below, fold
from fedstride.transfer import there

Replay = Callable[[int, int, int], Sequence[int]]  # (client, round, step) -> indices, all counted from 0


class Jobs(NamedTuple):
    """Who trains, from which version of the model, how long: one entry a row of the cohort."""

    clients: np.ndarray  # [C]
    versions: np.ndarray  # [C]: server updates before the model each starts from
    repeats: np.ndarray  # [C]: how often the client started from that version before
    targets: np.ndarray  # [C]: steps asked for
    steps: np.ndarray  # [C]: steps done
    lr: np.ndarray  # [C]
    times: np.ndarray  # [C]: how often the client was drawn; it trains once and counts so often

    def take(self, rows: np.ndarray | slice) -> "Jobs":
        """Some of the rows."""
        if isinstance(rows, np.ndarray) and rows.dtype == bool and rows.all():
            return self
        return Jobs(*(field[rows] for field in self))


class Indices(NamedTuple):
    """Rows of the data table for each of C clients; only the first `counts[c]` of a row are meant."""

    rows: Tensor  # [C, B]
    counts: np.ndarray | None = None  # None: all B
    whole: np.ndarray | None = None  # [C]: size of the batch these are a part of; None: they are the batch

    def take(self, count: int) -> "Indices":
        """The first clients."""
        return Indices(*(None if field is None else field[:count] for field in self))  # type: ignore[arg-type]


class Sampler:
    """Draws mini-batches. `batch_size` None means all local data, which `everything` lists in chunks."""

    def __init__(self, clients: Clients, batch_size: int | None, sampling: str | Replay):
        if not callable(sampling) and sampling not in ("replacement", "shuffle"):
            raise FedstrideError(
                f"sampling must be 'replacement', 'shuffle' or a function (client, round, step), not {sampling!r}"
            )
        self.clients = clients
        self.batch_size = batch_size
        self.sampling = sampling
        self._device = clients.order.device

    @property
    def full(self) -> bool:
        """Whether a step uses all local data."""
        return self.batch_size is None and not callable(self.sampling)

    @property
    def bytes(self) -> int:
        """Bytes of the inputs of one client's mini-batch; 0: it is not of one size."""
        inputs = self.clients.inputs
        return 0 if callable(self.sampling) else (self.batch_size or 0) * inputs[0].numel() * inputs.element_size()

    def steps_per_epoch(self, clients: np.ndarray) -> np.ndarray:
        """Steps in one pass over the local data."""
        if self.batch_size is None:
            return np.ones(len(clients), dtype=np.int64)
        return -(-self.clients.sizes[clients] // self.batch_size)

    def batches(self, jobs: Jobs, keys: Tensor, first: int, last: int) -> list[Indices]:
        """The mini-batches of steps first..last-1 for a block of jobs."""
        if callable(self.sampling):
            return [self._replayed(jobs, np.full(len(jobs.clients), step)) for step in range(first, last)]
        if self.sampling == "shuffle":
            return self._shuffled(jobs, keys, first, last)
        return [Indices(step) for step in self.table(jobs, keys, first, last).transpose(0, 1).contiguous()]

    def table(self, jobs: Jobs, keys: Tensor, first: int, last: int) -> Tensor:
        """[C, steps, B]: the mini-batches of steps first..last-1, drawn with replacement."""
        return table([(self, jobs)], keys, first, last)

    def single(self, jobs: Jobs, keys: Tensor) -> Indices:
        """One mini-batch apart from those of the local steps; in a replay, the one after the last step."""
        if callable(self.sampling):
            return self._replayed(jobs._replace(steps=jobs.steps + 1), jobs.steps)
        return self.batches(jobs, keys, 0, 1)[0]

    def _shuffled(self, jobs: Jobs, keys: Tensor, first: int, last: int) -> list[Indices]:
        """Every pass visits all local data once in a keyed order; a pass ends with a short batch, as loaders do."""
        size, device = self.batch_size or 0, keys.device
        rows = torch.zeros(len(jobs.clients), last - first, size, dtype=torch.int64, device=device)
        counts = np.zeros((len(jobs.clients), last - first), dtype=np.int64)
        for row, client in enumerate(jobs.clients):
            n, offset = int(self.clients.sizes[client]), int(self.clients.offsets[client])
            passes = -(-n // size)
            for epoch in range(first // passes, (last - 1) // passes + 1):
                order = fold(fold(keys[row], epoch), torch.arange(n, device=device)).argsort() + offset
                for step in range(max(first, epoch * passes), min(last, (epoch + 1) * passes)):
                    part = order[(step - epoch * passes) * size :][:size]
                    rows[row, step - first, : len(part)] = self.clients.order[part]
                    counts[row, step - first] = len(part)
        return [Indices(rows[:, step], counts[:, step]) for step in range(last - first)]

    def _replayed(self, jobs: Jobs, steps: np.ndarray) -> Indices:
        assert callable(self.sampling)
        lists = []
        for client, version, step, limit in zip(jobs.clients, jobs.versions, steps, jobs.steps):
            if step >= limit:  # this client has finished; its row is not used
                lists.append(np.zeros(1, dtype=np.int64))
                continue
            chosen = np.asarray(self.sampling(int(client), int(version), int(step))).reshape(-1)
            n = int(self.clients.sizes[client])
            if len(chosen) == 0 or chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= n:
                whole = chosen.dtype.kind in "iu"
                wrong = [one for one in chosen.tolist() if not whole or not 0 <= one < n]
                raise FedstrideError(
                    f"sampling({client}, {version}, {step}) gave {wrong[:5]}; "
                    f"client {client} needs at least one index from 0 to {n - 1}"
                )
            lists.append(chosen + self.clients.offsets[client])
        counts = np.array([len(chosen) for chosen in lists])
        table = np.zeros((len(lists), counts.max()), dtype=np.int64)
        for row, chosen in enumerate(lists):
            table[row, : len(chosen)] = chosen
        return Indices(self.clients.order[torch.as_tensor(table, device=self._device)], counts)

    def everything(self, clients: np.ndarray, chunk: int) -> list[Indices]:
        """All local data of some clients, `chunk` examples of each at a time."""
        sizes, device = self.clients.sizes[clients], self._device
        offsets = torch.as_tensor(self.clients.offsets[clients], device=device)[:, None]
        pieces = []
        for start in range(0, int(sizes.max()), chunk):
            counts = np.clip(sizes - start, 0, chunk)
            positions = torch.arange(start, start + int(counts.max()), device=device)
            last = torch.as_tensor(sizes - 1, device=device)[:, None]
            pieces.append(Indices(self.clients.order[offsets + torch.minimum(positions, last)], counts, sizes))
        return pieces


def table(parts: Sequence[tuple[Sampler, Jobs]], keys: Tensor, first: int, last: int) -> Tensor:
    """The table of several cohorts, one below the other, that draw batches of the same size; in one go."""
    size = parts[0][0].batch_size or 0
    own = [(sampler.clients.sizes[jobs.clients], sampler.clients.offsets[jobs.clients]) for sampler, jobs in parts]
    sizes, offsets = there(np.concatenate(own, axis=1), keys.device)[:, :, None]
    counters = torch.arange(first * size, last * size, device=keys.device)
    draws = below(fold(keys[:, None], counters), sizes) + offsets
    orders = [sampler.clients.order for sampler, _ in parts]
    if any(order is not orders[0] for order in orders):  # other partitions of the same data
        pieces = draws.split([len(jobs.clients) for _, jobs in parts])
        drawn = torch.cat([order[piece] for order, piece in zip(orders, pieces)])
    else:
        drawn = orders[0][draws]
    return drawn.unflatten(1, (last - first, size))
