"""Clients on their way, held so that steps write no gradients (fedstride/tracing.py), or always in the same place."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedstride.descent import Local, Moving, move
from fedstride.tracing import moving_step, trace

if TYPE_CHECKING:
    from fedstride.oracle import Batch, Sequential, Vmap


class Held(Protocol):
    """Clients that an oracle has taken over for their local steps."""

    def step(self, lr: Tensor, batch: "Batch") -> tuple[Tensor]:
        """A step of the first clients, as many as lr has rows; returns their losses."""

    def give(self) -> None:
        """Write the clients back to where they were taken from."""


class Parts:
    """A cohort parameter by parameter: a product is added only to what is in one piece."""

    def __init__(self, oracle: "Vmap", at: Moving, direction: Any, steps: dict[tuple, Callable | None]):
        self._oracle, self._direction, self._steps = oracle, direction, steps
        self._y = at.y
        self._parts = [part.clone(memory_format=torch.contiguous_format) for part in self._cut(at.y)]
        self._rows = [part for row in at.rows for part in self._cut(row)]
        self._each = [len(part) == len(at.y) for part in self._rows]  # which have a row for every client
        self._form = tuple(part.shape[each:] for part, each in zip(self._rows, self._each))
        self._own, self._taken = self._parts, self._rows  # of those who are still at work

    def step(self, lr: Tensor, batch: "Batch") -> tuple[Tensor]:
        if len(lr) != len(self._own[0]):
            self._own = [part[: len(lr)] for part in self._parts]
            self._taken = [part[: len(lr)] if each else part for part, each in zip(self._rows, self._each)]
        shape = (self._form, *(None if part is None else (part.shape[1:], part.dtype) for part in batch))
        if shape not in self._steps:
            self._steps[shape] = self._traced(self._own, lr, self._taken, batch)
        step = self._steps[shape]
        if step is not None:
            return step(*self._own, lr, *self._taken, *(part for part in batch if part is not None))
        loss, *directions = self._directions(self._own, self._taken, batch)
        for part, direction in zip(self._own, directions):
            part.addcmul_(direction, lr.view(-1, *[1] * (part.dim() - 1)), value=-1)
        return (loss,)

    def give(self) -> None:
        for part, moved in zip(self._y.split(self._oracle.model.sizes, 1), self._parts):
            part.copy_(moved.reshape(len(moved), -1))

    def _cut(self, vectors: Tensor) -> list[Tensor]:
        """[C, d] by parameters; a column goes with each of them."""
        shapes = self._oracle.model.shapes
        if vectors.shape[1] == 1 and self._y.shape[1] > 1:
            return [vectors.reshape(-1, *[1] * len(shape)) for shape in shapes]
        return [
            part.reshape(len(part), *shape) for part, shape in zip(vectors.split(self._oracle.model.sizes, 1), shapes)
        ]

    def _directions(self, own: list[Tensor], rows: list[Tensor], batch: Sequence[Tensor | None]) -> list[Tensor]:
        """The losses, and for every parameter where its step goes."""
        g, loss = self._oracle.rowwise(grad_and_value(self._oracle.row_loss), own, *batch)
        if self._direction is None:
            return [loss, *g]
        count = len(own)
        return [loss, *(self._direction(g[p], own[p], *rows[p::count]) for p in range(count))]

    def _traced(self, own: list[Tensor], lr: Tensor, rows: list[Tensor], batch: "Batch") -> Callable | None:
        """A step that writes no gradients; None where it depends on the values."""
        first, last = len(own) + 1, len(own) + 1 + len(rows)

        def directions(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors[last:])
            parts = [None if part is None else next(rest) for part in batch]
            return self._directions(list(tensors[: len(own)]), list(tensors[first:last]), parts)

        tensors = [*own, lr, *rows, *(part for part in batch if part is not None)]
        each = [True] * first + self._each + [True] * (len(tensors) - last)
        try:
            return moving_step(trace(directions, tensors, each), len(own))
        except Exception:  # whatever it is: tracing is for speed alone
            return None


class Alone:
    """One client, moved where it lies.

    A plain step takes its gradients parameter by parameter; another one gets them as a vector, for which the memory is
    kept: fresh pages at every step took a fourth of the time of a small network with convolutions.
    """

    def __init__(self, oracle: "Sequential", at: Moving, direction: Any, local: Local):
        self._oracle, self._at, self._direction, self._local = oracle, at, direction, local
        self._views, self._lr = oracle.model.views(at.y[0]), float(at.lr)
        self._g = None if direction is None and local == Local() else torch.empty_like(at.y)

    def step(self, lr: Tensor, batch: "Batch") -> tuple[Tensor]:
        loss, parts = self._oracle.parts(self._at.y[0], batch, 0)
        if self._g is None:
            torch._foreach_add_(self._views, parts, alpha=-self._lr)
        else:
            torch.cat([part.flatten() for part in parts], out=self._g[0])
            move(self._direction, self._local, self._at, self._g)
        return (loss[None],)

    def give(self) -> None:
        """It was moved where it is."""
