"""The `graph` backend: `vmap` recorded as CUDA graphs and replayed, so that a step costs its arithmetic, no launches.

A recording holds for one size of cohort and one shape of batch. Cohorts are padded to a few sizes, at most a quarter
larger than needed, and a shape is recorded when it comes the third time: passes over all data come once and are
computed as `vmap` does. Where a model cannot be recorded, a warning says so and `vmap` goes on.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedstride.convolution import by_rows
from fedstride.descent import Local, Moving
from fedstride.oracle import Batch, Vmap
from fedstride.parts import Held
from fedstride.vector import VectorModel

SIZES = (9, 10, 12, 14, 16, 20, 25, 30, 35, 40, 50, 60, 70, 80)
TRIES = 3  # how often a shape is computed before it is recorded


class Recording(NamedTuple):
    """A graph with the tensors it reads and writes."""

    replay: Callable[[], None]
    y: Tensor
    batch: Batch
    loss: Tensor
    g: Tensor


def padded(rows: int) -> int:
    """The size of cohort that is recorded for so many rows: 1 to 10, 12, 14, 16, 20, ..., 80, 90, 100, 120, ..."""
    unit = 1
    while rows > 80 * unit:
        unit *= 10
    return rows if rows <= 8 else next(size * unit for size in SIZES if size * unit >= rows)


class Replays:
    """A cohort that steps along its recorded gradients, which are not copied first."""

    def __init__(self, oracle: "Graph", y: Tensor):
        self._oracle, self._y = oracle, y

    def step(self, lr: Tensor, batch: Batch) -> tuple[Tensor]:
        y = self._y[: len(lr)]
        recording = self._oracle.replayed(y, batch)
        loss, g = self._oracle.unrecorded(y, batch) if recording is None else (recording.loss.clone(), recording.g)
        y.addcmul_(g[: len(y)], lr, value=-1)
        return (loss[: len(y)],)

    def give(self) -> None:
        """They were moved where they are."""


class Graph(Vmap):
    """The whole cohort in one replay."""

    name = "graph"

    def __init__(self, model: VectorModel, *arguments):
        super().__init__(by_rows(model) if model.x.dtype == torch.float32 else model, *arguments)
        self._recordings: dict[tuple, Recording] = {}
        self._pool: Any = None  # memory that all recordings share, since only one is replayed at a time
        self._able = model.x.is_cuda

    def __call__(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        recording = self.replayed(y, batch)
        if recording is None:
            return self.unrecorded(y, batch)
        # Copies, because the next replay overwrites them.
        return recording.loss[: len(y)].clone(), recording.g[: len(y)].clone()

    def hold(self, at: Moving, direction: Any, local: Local, steps: int) -> Held | None:
        return Replays(self, at.y) if direction is None and local == Local() else None

    def unrecorded(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses and gradients as `vmap` has them."""
        return self.compute(y, batch) if self._able else super().__call__(y, batch)

    def replayed(self, y: Tensor, batch: Batch) -> Recording | None:
        """The recording for such a batch, freshly replayed on this one; None if there is none."""
        size = padded(len(y))
        shape = (size, *(None if part is None else (part.shape[1:], part.dtype) for part in batch))
        recording = self._recordings.get(shape)
        if recording is None:
            self._seen[shape] += 1
            if self._seen[shape] < TRIES or not self._able:
                return None
            try:
                recording = self._recordings[shape] = self._record(size, y, batch)
            except RuntimeError as error:
                self._able = False
                warnings.warn(
                    f"the model cannot be recorded as a CUDA graph, vmap goes on: {str(error).splitlines()[0]}",
                    stacklevel=2,
                )
                return None
        rows = len(y)
        recording.y[:rows].copy_(y)
        for own, given in zip(recording.batch, batch):
            if own is not None and given is not None:
                own[:rows].copy_(given)
        recording.replay()
        return recording

    def _record(self, size: int, y: Tensor, batch: Batch) -> Recording:
        """Run it on a side stream until all memory is found, as capture asks for, then capture it."""
        own_y = y[:1].repeat(
            size, 1
        )  # a copy, also of a single row: what is replayed must not write into the caller's y
        own = Batch(*(None if part is None else part[:1].repeat(size, *[1] * (part.dim() - 1)) for part in batch))  # type: ignore[arg-type]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.compute(own_y, own)
        torch.cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            loss, g = self.compute(own_y, own)
        return Recording(graph.replay, own_y, own, loss, g)
