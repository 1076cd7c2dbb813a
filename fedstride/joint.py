"""Cohorts of several runs as one: what each wants done, who of the whole does it, and the way back.

A run's cohort that has come to its local steps is a `Request`. Those of the same kind (the same code, data and batch
size) are rows of one batch, a `Joint`, longest jobs first. Rows do not know of each other, so each run gets what it
would have got alone, to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as trees

from fedstride import heap
from fedstride.clients import Clients
from fedstride.descent import Local, Moving
from fedstride.oracle import PLAIN, Vmap
from fedstride.sampling import Jobs, Sampler
from fedstride.tracing import identity
from fedstride.train import Work
from fedstride.transfer import there

FLEETS = 8  # joint fleets that are kept


@dataclass(frozen=True, eq=False)
class Request:
    """A cohort that wants to do its local steps."""

    sampler: Sampler
    jobs: Jobs  # longest first
    keys: Tensor
    at: Moving
    direction: Callable | None
    local: Local
    begun: int  # steps that are done already

    @cached_property
    def parts(self) -> tuple[list[Tensor], Any]:
        """The tensors of `at`, and how they make it up."""
        return trees.tree_flatten(self.at)

    @cached_property
    def kind(self) -> tuple | None:
        """Cohorts of the same kind can be one; None: this one must do its steps alone."""
        code, sampler, own = identity(self.direction), self.sampler, (1, len(self.keys))
        if code is None or callable(sampler.sampling) or not all(p.dim() and len(p) in own for p in self.parts[0]):
            return None
        tables = (sampler.clients.inputs, sampler.clients.targets)
        data = tuple((table.data_ptr(), table.shape, table.stride(), table.dtype) for table in tables)
        drawn = (sampler.batch_size, sampler.sampling)
        return self.begun, code, self.local, named(self.local.augment), self.parts[1], drawn, data

    @property
    def total(self) -> int:
        """Steps of all its clients."""
        return int(self.jobs.steps.sum())


def named(value: Any) -> Any:
    """What a value is told by: itself, or who it is where it cannot be hashed."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


class Joint:
    """Requests of the same kind as one cohort, longest jobs first."""

    def __init__(self, requests: Sequence[Request]):
        self._requests, first = requests, requests[0]
        self._counts = [len(request.keys) for request in requests]
        steps = np.concatenate([request.jobs.steps for request in requests])
        self._order = np.argsort(-steps, kind="stable")
        self.steps = steps[self._order]
        unsorted = (np.diff(self._order) < 0).any()
        self._sort = there(self._order, first.at.y.device) if unsorted else None
        several = len(requests) > 1
        self.drawing = torch.cat([request.keys for request in requests]) if several else first.keys  # one after another
        self.keys = self.sorted(self.drawing)
        self.leaves = [self._joined(same) for same in zip(*(request.parts[0] for request in requests))]

    @property
    def at(self) -> Moving:
        """The tensors of all, as those of one request."""
        return trees.tree_unflatten(self.leaves, self._requests[0].parts[1])

    @property
    def draws(self) -> list[tuple[Sampler, Jobs]]:
        """Whose batches are to be drawn, one cohort after the other."""
        return [(request.sampler, request.jobs) for request in self._requests]

    def sorted(self, rows: Tensor) -> Tensor:
        """What belongs to the clients, one cohort after the other, in the order of the whole."""
        return rows if self._sort is None else rows[self._sort]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all cohorts; what a cohort's clients share is repeated for each."""
        if len(parts) == 1:
            return parts[0]
        rows = [part if len(part) == n else part.expand(n, *part.shape[1:]) for part, n in zip(parts, self._counts)]
        return self.sorted(torch.cat(rows))

    def jobs(self) -> Jobs:
        """All jobs, the clients numbered through all fleets."""
        fleets = np.cumsum([0, *(len(request.sampler.clients) for request in self._requests)])
        own = [one.jobs._replace(clients=one.jobs.clients + start) for one, start in zip(self._requests, fleets)]
        return Jobs(*(np.concatenate(columns) for columns in zip(*own))).take(self._order)

    def give(self, moved: Sequence[Tensor]) -> None:
        """Write the tensors of all back to where they were taken from."""
        if self._sort is not None:
            back = self._sort.argsort()
            moved = [leaf[back] for leaf in moved]
        kept: list[Tensor] = []
        new: list[Tensor] = []
        several = len(self._requests) > 1
        for start, request in zip(np.cumsum([0, *self._counts]), self._requests):
            ours = [leaf[start : start + len(request.keys)] if several else leaf for leaf in moved]
            mine = trees.tree_unflatten(ours, request.parts[1])
            for values, one in ((kept, request.at), (new, mine)):
                values.extend((one.y, one.losses, *trees.tree_leaves(one.carry)))
        torch._foreach_copy_(kept, new)  # of all runs in a few launches


def most(x: Tensor, size: int) -> int:
    """Clients of several runs in one batch on a CPU: so many that their models, twice, and their mini-batches of `size`
    bytes stay with the process. With more it took longer than without the others."""
    return heap.BLOCK // max(2 * x.nbytes, size)


class Several(Vmap):
    """`vmap`, by which cohorts of several runs train as one."""

    def __init__(self, alone: Vmap):
        super().__init__(alone.model, alone.loss, (alone.each, alone.reduction) if alone.each else None)
        self._samplers: dict[tuple, tuple[Sequence[Sampler], Sampler]] = {}

    def kind(self, request: Request) -> tuple | None:
        """Cohorts of the same kind can be one: those, too, that alone would go the same way (`hold`)."""
        return request.kind and (*request.kind, request.total * request.at.y.shape[1] >= PLAIN)

    def most(self, request: Request) -> int:
        """So many clients go into one batch."""
        return most(request.at.y[0], request.sampler.bytes)

    @torch.no_grad()
    def descend_all(self, requests: list[Request]) -> bool:
        """All local steps of cohorts of the same kind."""
        if len(requests) == 1:
            return False
        joint, first = Joint(requests), requests[0]
        jobs, at = joint.jobs(), joint.at
        work = Work(self, self._sampler([request.sampler for request in requests]), jobs, joint.keys, first.local)
        work.walk(jobs, joint.keys, at, first.direction, first.begun, total=first.total)
        joint.give(trees.tree_leaves(at))
        return True

    def _sampler(self, samplers: Sequence[Sampler]) -> Sampler:
        """One that draws for all fleets, which hold the same data, each in its own way."""
        name = tuple(id(sampler) for sampler in samplers)
        if name not in self._samplers:
            if len(self._samplers) >= FLEETS:
                self._samplers.clear()
            fleets, first = [sampler.clients for sampler in samplers], samplers[0]
            order = torch.cat([fleet.order[: fleet.offsets[-1]] for fleet in fleets])
            sizes = np.concatenate([fleet.sizes for fleet in fleets])
            whole = Clients(first.clients.inputs, first.clients.targets, order, sizes)
            # With the samplers themselves, so that no other can come to have the same id.
            self._samplers[name] = samplers, Sampler(whole, first.batch_size, first.sampling)
        return self._samplers[name][1]
