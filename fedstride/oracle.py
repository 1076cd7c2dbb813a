"""The gradient oracle: `oracle(y[C, d], batch) -> loss[C], g[C, d]`. Everything fast is inside it.

Backends compute the same numbers to rounding:

* `sequential` trains clients one after the other on views into one flat buffer, a thread per core with one intra-op
  thread each, so large models keep the cores busy without waiting for each other at every step.
* `vmap` computes a whole cohort in one call. Convolutions stay convolutions: as patch products they were slower or at
  best equal wherever they were measured without compilation (docs/performance.md). A shape of batch that keeps coming
  is traced for any number of clients: the same operations in the same order without the work of finding them, so model
  and loss must be functions of their arguments alone. Steps along gradients, or gradients and a term that the method
  adds, are traced at once where a job moves many numbers, and write no gradients (fedstride/tracing.py).
* `graph` (fedstride/graph.py) is `vmap` on a CUDA device, recorded and replayed.
* `compiled` (fedstride/compiled.py) makes a program of a whole local step; half a minute to make, then the fastest.

`auto` is a stated rule, not a race, so that the same run takes the same backend everywhere: `graph` on a CUDA device;
on a CPU `vmap` for models without convolutions in cohorts of more than one, `sequential` otherwise, and wherever `vmap`
cannot take the model or the loss (data-dependent control flow). A result says which one it was.
"""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from fedstride import heap
from fedstride.descent import Local, Moving
from fedstride.errors import FedstrideError
from fedstride.losses import LossFunction
from fedstride.parts import Alone, Held, Parts
from fedstride.tracing import identity, pointwise, trace
from fedstride.vector import KeyedDropout, VectorModel, rewind

BACKENDS = ("sequential", "vmap", "graph", "compiled")
TRIES, TRACES = 100, 100  # a shape is traced when it has come so often that it pays; so many shapes at most
PLAIN = 1_500_000  # parameters times steps in a job from which tracing its steps pays within some jobs
# About this much memory for the vectors of the clients that train together; on a CPU what the process keeps when it is
# free, so that the next chunk needs no fresh pages.
CHUNK_BYTES = heap.KEPT
CHUNK_SHARE = 4  # on a GPU a fourth of its memory
VECTORS = 8  # [C, d] matrices alive at once in the hungriest client code


class Batch(NamedTuple):
    """One mini-batch for each of C clients."""

    inputs: Tensor  # [C, B, ...]
    targets: Tensor  # [C, B, ...]
    weight: Tensor | None = None  # [C, B]: the loss is sum(weight * loss per example); None: the loss as it is
    key: Tensor | None = None  # [C]: for dropout


class Oracle:
    """What all backends share: the loss of one row of parameters on one client's batch."""

    name = ""

    def __init__(self, model: VectorModel, loss: LossFunction, each: tuple[LossFunction, str] | None):
        self.model = model
        self.loss = loss
        # The loss per example and its reduction; None where the loss must see whole batches.
        self.each: LossFunction | None
        self.each, self.reduction = each if each and not model.mixes_examples else (None, "")

    def row_loss(
        self,
        row: Tensor | list[Tensor],
        inputs: Tensor,
        targets: Tensor,
        weight: Tensor | None,
        step_key: Tensor | None,
    ) -> Tensor:
        """The loss of one client; its row may be cut into parameters already."""
        return self.reduce(self.model.outputs(row, inputs, step_key), targets, weight)

    def reduce(self, outputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        """The loss as it is, or its weighted sum over examples."""
        if weight is None:
            return self.loss(outputs, targets)
        assert self.each is not None
        return (weight * self.each(outputs, targets)).sum()

    def __call__(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses [C] and gradients [C, d]."""
        raise NotImplementedError

    def hold(self, at: Moving, direction: Any, local: Local, steps: int) -> Held | None:
        """A block in a form in which it takes steps more quickly; so many are to come, of all its clients."""
        return None

    def descend(self, sampler: Any, jobs: Any, keys: Tensor, at: Any, direction: Any, local: Any, first: int) -> bool:
        """All local steps of a block from one on, where the backend can; False: one after the other by the caller."""
        return False

    def row_curvature(self, row: Tensor, v: Tensor, *batch: Any) -> Tensor:
        """Hessian times vector, reverse over reverse, because every layer has a backward."""
        return grad(lambda at: (grad(self.row_loss)(at, *batch) * v).sum())(row)

    def losses(self, y: Tensor, batch: Batch) -> Tensor:
        """Losses [C] alone."""
        return self.rowwise(self.row_loss, y, *batch)

    def curvatures(self, y: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Hessian-vector products [C, d]."""
        return self.rowwise(self.row_curvature, y, v, *batch)

    def rowwise(self, function: Callable, *arguments: Tensor | list[Tensor] | None):
        """Apply a function of one client to every row of the arguments."""
        raise NotImplementedError

    def blocks(self, rows: int, size: int) -> list[slice]:
        """How a cohort is cut into pieces that train independently of each other; size: bytes of one's mini-batch."""
        raise NotImplementedError

    def map(self, work: Callable[[slice], None], blocks: Sequence[slice]) -> None:
        """Run the pieces."""
        for block in blocks:
            work(block)


class Vmap(Oracle):
    """The whole cohort in one call."""

    name = "vmap"

    def __init__(self, model: VectorModel, loss: LossFunction, each: tuple[LossFunction, str] | None):
        super().__init__(model, loss, each)
        self._seen: Counter[tuple] = Counter()
        self._traces: dict[tuple, Callable | None] = {}
        self._steps: dict[tuple, dict[tuple, Callable | None]] = {}  # by direction and by shape
        self._pointwise: dict[tuple, bool] = {}

    def __call__(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        shape = tuple(None if part is None else (part.shape[1:], part.dtype) for part in batch)
        traced = self._traces.get(shape)
        if traced is not None:
            return traced(y, *(part for part in batch if part is not None))
        found = self.compute(y, batch)
        self._seen[shape] += 1
        if self._seen[shape] == TRIES and len(self._traces) < TRACES:
            self._traces[shape] = self._trace(y, batch, found)
        return found

    def hold(self, at: Moving, direction: Any, local: Local, steps: int) -> Held | None:
        if local != Local() or at.carries or steps * at.y.shape[1] < PLAIN or any(row.dim() != 2 for row in at.rows):
            return None
        code = identity(direction)
        if code is None:
            return None
        if code not in self._pointwise:
            if len(self._pointwise) >= TRACES:  # a method that changes a number every round
                return None
            self._pointwise[code] = pointwise(direction, Local(), at)
        return Parts(self, at, direction, self._steps.setdefault(code, {})) if self._pointwise[code] else None

    def compute(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses and gradients by function transforms."""
        g, loss = self.rowwise(grad_and_value(self.row_loss), y, *batch)
        return loss, g

    def _trace(self, y: Tensor, batch: Batch, found: tuple[Tensor, Tensor]) -> Callable | None:
        """The operations of `compute`; None where they depend on the values, or give other bits than were found."""
        given = [part is not None for part in batch]

        def flat(y: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
            rest = iter(parts)
            return self.compute(y, Batch(*(next(rest) if there else None for there in given)))  # type: ignore[arg-type]

        tensors = [y, *(part for part in batch if part is not None)]
        try:
            traced = trace(flat, tensors, [True] * len(tensors)).forward
            same = all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(traced(*tensors), found))
        except Exception:  # whatever it is: tracing is for speed alone
            return None
        return traced if same else None

    def rowwise(self, function: Callable, *arguments: Tensor | list[Tensor] | None):
        return vmap(function, in_dims=tuple(None if a is None else 0 for a in arguments))(*arguments)

    def blocks(self, rows: int, size: int) -> list[slice]:
        """As many as have mini-batches that stay with the process; all on a GPU."""
        most = rows if self.model.x.is_cuda or not size else max(1, heap.BLOCK // size)
        each = -(-rows // max(1, -(-rows // most)))
        return [slice(start, min(rows, start + each)) for start in range(0, rows, each)]


class Sequential(Oracle):
    """One client after the other, on CPU over a pool of threads."""

    name = "sequential"

    def __init__(self, model: VectorModel, loss: LossFunction, each: tuple[LossFunction, str] | None):
        super().__init__(model, loss, each)
        self._local = threading.local()
        self._threads = torch.get_num_threads() if model.x.device.type == "cpu" else 1
        self._pool: ThreadPoolExecutor | None = None

    def _own(self) -> threading.local:
        """This thread's own copy of the module: its parameters are pointed at one client's row after the other."""
        own = self._local
        if not hasattr(own, "module"):
            own.module = copy.deepcopy(self.model.module)
            parameters = dict(own.module.named_parameters())
            own.parameters = [parameters[name] for name in self.model.names]
            own.dropouts = [child for child in own.module.modules() if isinstance(child, KeyedDropout)]
            own.pointer, own.views = None, []
        return own

    def parts(self, row: Tensor, batch: Batch, i: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and gradients, parameter by parameter, of one client."""
        own = self._own()
        rounded = self.model.dtype != row.dtype
        if own.pointer != row.data_ptr() or rounded:  # the views hold their storage: an equal address is the same row
            own.views, own.pointer = self.model.views(row), row.data_ptr()
            for parameter, view in zip(own.parameters, own.views):
                parameter.data = view.to(self.model.dtype)
        if batch.key is not None:
            for layer, (_, value) in zip(own.dropouts, self.model.dropout_keys(batch.key[i])):
                layer.key = value
        if own.dropouts:
            rewind(own.module)
        with torch.enable_grad():
            outputs = self.model.apply(own.module, self.model.arranged(batch.inputs[i]))
            value = self.reduce(outputs, batch.targets[i], None if batch.weight is None else batch.weight[i])
            parts = torch.autograd.grad(value, own.parameters, materialize_grads=True)
            return value.detach(), tuple(part.to(row.dtype) for part in parts) if rounded else parts

    def __call__(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        losses, g = [], torch.empty_like(y)
        for i, row in enumerate(y):
            value, parts = self.parts(row, batch, i)
            torch.cat([part.flatten() for part in parts], out=g[i])
            losses.append(value)
        return torch.stack(losses), g

    def hold(self, at: Moving, direction: Any, local: Local, steps: int) -> Held | None:
        return Alone(self, at, direction, local)

    def rowwise(self, function: Callable, *arguments: Tensor | list[Tensor] | None):
        rows = range(len(arguments[0]))  # type: ignore[arg-type]
        return torch.stack([function(*(None if a is None else a[i] for a in arguments)) for i in rows])

    def blocks(self, rows: int, size: int) -> list[slice]:
        return [slice(i, i + 1) for i in range(rows)]

    def map(self, work: Callable[[slice], None], blocks: Sequence[slice]) -> None:
        if self._threads == 1 or len(blocks) == 1:
            super().map(work, blocks)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,))
        for _ in self._pool.map(work, blocks):
            pass


def check(backend: str, device: torch.device) -> None:
    """Refuse a backend that does not exist, or not there."""
    if backend not in (*BACKENDS, "auto"):
        raise FedstrideError(f"unknown backend {backend!r}; choose from auto, {', '.join(BACKENDS)}")
    if backend == "graph" and device.type != "cuda":
        raise FedstrideError("the graph backend needs a CUDA device; use backend='auto'")


def choose(backend: str, model: VectorModel, device: torch.device, cohort: int) -> str:
    """Resolve `auto` by the rule at the top of this file."""
    check(backend, device)
    if backend != "auto":
        return backend
    if device.type == "cuda":
        return "graph"
    return "vmap" if cohort > 1 and not model.convolves else "sequential"


def make(backend: str, model: VectorModel, loss: LossFunction, each: tuple[LossFunction, str] | None) -> Oracle:
    """Build a backend by name."""
    from fedstride.compiled import Compiled
    from fedstride.graph import Graph

    if model.x.device.type == "cpu":
        heap.keep()
    kinds = {"sequential": Sequential, "vmap": Vmap, "graph": Graph, "compiled": Compiled}
    return kinds[backend](model, loss, each)


def room(x: Tensor) -> int:
    """How many clients with such a model train together at most."""
    memory = torch.cuda.mem_get_info(x.device)[1] // CHUNK_SHARE if x.is_cuda else CHUNK_BYTES
    return max(1, memory // (VECTORS * x.element_size() * len(x)))
