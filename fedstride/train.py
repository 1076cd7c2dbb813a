"""Work: a client's toolbox, for a whole cohort at once.

Rows are clients, sorted by their steps, longest first; so the clients still at work are always a prefix, and the
prefix shrinks as they finish: nobody waits and no gradient is wasted.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as trees

from fedstride.descent import AUGMENT, Local, Moving, active, cut, move, shaped
from fedstride.keys import fold
from fedstride.oracle import Batch, Oracle
from fedstride.sampling import Indices, Jobs, Sampler
from fedstride.transfer import there

ELEMENTS = 1 << 24  # numbers of input data one oracle call may hold: 64 MiB in float32
ROW = 1 << 17  # the same for one client, where the cut must not depend on how many clients there are
GATHER = 1 << 18  # numbers of input data gathered ahead for later steps: more would fall out of the cache
DRAW = 1 << 16  # examples drawn ahead, where they are too large to be gathered
FULL_PASS = 1 << 40  # key offset of full-gradient passes, far from any mini-batch step


class Work:
    """What C clients can do in one exchange."""

    def __init__(self, oracle: Oracle, sampler: Sampler, jobs: Jobs, keys: Tensor, local: Local):
        x = oracle.model.x
        self.jobs = jobs
        # [C, 1] each, in one transfer: steps done, steps asked for, learning rate, round counted from 1, and what sums
        # over the steps are divided by.
        numbers = np.stack([jobs.steps, jobs.targets, jobs.lr, jobs.versions + 1, np.maximum(jobs.steps, 1)])
        columns = there(numbers, x.device, x.dtype)[..., None]
        self.steps, self.target, self.lr, self.round, self._count = columns.unbind()
        self.evaluations = np.zeros(len(jobs.clients))  # gradients so far, in mini-batches: what takes time
        self.train_loss: Tensor | None = None  # [C], mean over the steps of the mini-batch loss
        self._oracle, self._sampler, self._keys, self._local = oracle, sampler, keys, local
        self._example = max(1, sampler.clients.inputs[0].numel())

    @property
    def travel(self) -> Tensor:
        """[C, 1]: by how many steps a constant direction moves y; `steps`, or more under local momentum."""
        rho = self._local.momentum
        if not rho:
            return self.steps
        return (self.steps - rho * (1 - rho**self.steps) / (1 - rho)) / (1 - rho)

    def rows(self, x: Tensor) -> Tensor:
        """A fresh [C, d] copy of a vector that may be shared."""
        return x.expand(len(self.steps), -1).clone()

    def zeros(self, x: Tensor) -> Tensor:
        """A [C, d] matrix of zeros."""
        return x.new_zeros(len(self.steps), x.shape[-1])

    def column(self) -> Tensor:
        """A [C, 1] column of zeros, for counters and maxima in a carry."""
        return torch.zeros_like(self.steps)

    def descend(
        self,
        x: Tensor,
        direction: Callable[..., Any] | None = None,
        rows: tuple[Tensor, ...] = (),
        carry: Any = None,
        lr: Tensor | None = None,
        first: bool = False,
    ) -> Any:
        """Every client's local steps from x: y <- y - lr * direction(g, y, *rows).

        Per-client tensors reach `direction` only through `rows` and `carry`, because they are sliced as clients
        finish. With a carry (a tensor or tuple of per-client tensors), `direction(g, y, carry, *rows)` returns (step,
        carry) and `descend` returns (y, carry); with `first` it returns (y, gradients of the first steps).
        """
        count = len(self.steps)
        y, rate = x.new_empty(count, x.shape[-1]), (self.lr if lr is None else lr).expand(count, 1)
        losses = self.steps.new_zeros(count)
        velocity = torch.zeros_like(y) if self._local.momentum else losses
        begun, gradients = (1, torch.empty_like(y)) if first else (0, y)
        carry = trees.tree_map_only(Tensor, torch.clone, carry)  # it is written over, and the caller's own is not

        def train(block: slice) -> None:
            jobs, keys = self.jobs.take(block), self._keys[block]
            given = cut((rows, () if carry is None else carry), block, count)
            own = Moving(y[block], rate[block], losses[block], velocity[block], *given)
            own.y.copy_(cut(x, block, count))
            if first:
                self.walk(jobs, keys, own, direction, 0, 1, gradients[block])
            if not self._oracle.descend(self._sampler, jobs, keys, own, direction, self._local, begun):
                self.walk(jobs, keys, own, direction, begun)

        self._oracle.map(train, self._oracle.blocks(count, self._sampler.bytes))
        self.evaluations += self.jobs.steps
        self.train_loss = losses / self._count[:, 0]
        if first:
            return y, gradients
        return y if carry is None else (y, carry)

    def walk(
        self, jobs: Jobs, keys: Tensor, own: Moving, direction: Callable[..., Any] | None, first: int = 0,
        last: int | None = None, kept: Tensor | None = None, total: int | None = None,
    ) -> None:  # fmt: skip
        """Some local steps of a block, one after the other; `kept` is where the last gradient goes.

        How they are done may depend on how many there are, `total`, where that is not the block's own number.
        """
        full, slab = self._sampler.full, self._slab(len(keys))
        pieces: list[Indices | Batch] = self._pieces(jobs) if full else []
        held = None
        if kept is None and self._sampler.sampling == "replacement" and not full:
            held = self._oracle.hold(own, direction, self._local, total or int(jobs.steps.sum()))
        count = 0
        for k, wanted in enumerate(active(jobs.steps)[first:last], first):
            if wanted != count:  # somebody finished: the prefix shrinks
                count = wanted
                at = cut(own, slice(0, count), len(keys))
            place = (k - first) % slab
            if not full and place == 0:
                batches = self._batches(jobs, keys, k, min(int(jobs.steps[0]), last or k + slab, k + slab))
            if held is not None:
                (loss,) = self._apply(held.step, (at.lr,), batches[place], keys, k)
            else:
                if full:
                    loss, g = self._total(self._oracle, (at.y,), pieces, keys, FULL_PASS + k)
                else:
                    loss, g = self._apply(self._oracle, (at.y,), batches[place], keys, k)
                if kept is not None:
                    kept.copy_(shaped(self._local, at.y, g))
                move(direction, self._local, at, g)
            at.losses.add_(loss)
        if held is not None:
            held.give()

    def gradient(self, x: Tensor, full: bool = True) -> Tensor:
        """Gradients [C, d] at x: over all local data, or over one mini-batch of the run's batch size."""
        y, g = self.rows(x), self.zeros(x)

        def compute(block: slice) -> None:
            jobs, keys = self.jobs.take(block), self._keys[block]
            if full or self._sampler.full:
                _, g[block] = self._total(self._oracle, (y[block],), self._pieces(jobs), keys, FULL_PASS)
            else:
                _, g[block] = self._apply(self._oracle, (y[block],), self._sampler.single(jobs, keys), keys, 0)

        self._oracle.map(compute, self._oracle.blocks(len(y), self._sampler.bytes))
        self.evaluations += self._sampler.steps_per_epoch(self.jobs.clients) if full else 1
        return g + self._local.weight_decay * y if self._local.weight_decay else g

    def loss(self, x: Tensor) -> Tensor:
        """Losses [C, 1] over all local data at x, with the penalty that weight decay stands for."""
        y = self.rows(x)
        found = self._total(self._losses, (y,), self._pieces(self.jobs), self._keys, FULL_PASS)[0][:, None]
        decay = self._local.weight_decay
        return found + decay / 2 * y.square().sum(1, keepdim=True) if decay else found

    def smoothness(self, x: Tensor, iterations: int = 300) -> Tensor:
        """L_i [C, 1]: the largest curvature (absolute eigenvalue of the Hessian) of every client's loss at x.

        Power iteration on Hessian-vector products over all local data, from a keyed start. A client is done when its
        estimate moves by less than 1e-7 relative (1e-5 in float32), whatever the others do.
        """
        y, pieces = self.rows(x), self._pieces(self.jobs)
        tolerance = 1e-7 if y.dtype == torch.float64 else 1e-5
        v = (fold(self._keys[:, None], torch.arange(y.shape[1], device=y.device)) >> 40).to(y.dtype)
        estimate, done = self.column(), self.column().bool()
        for _ in range(iterations):
            v = v / v.norm(dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
            (product,) = self._total(self._curvatures, (y, v), pieces, self._keys, FULL_PASS)
            v = product + self._local.weight_decay * v
            before, estimate = estimate, torch.where(done, estimate, v.norm(dim=1, keepdim=True))
            done |= (estimate - before).abs() <= tolerance * estimate
            if bool(done.all()):
                break
        return estimate

    def _losses(self, y: Tensor, batch: Batch) -> tuple[Tensor]:
        return (self._oracle.losses(y, batch),)

    def _curvatures(self, y: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor]:
        return (self._oracle.curvatures(y, v, batch),)

    def _slab(self, rows: int) -> int:
        """How many steps' batches to draw at a time."""
        examples = rows * (self._sampler.batch_size or 1)
        ahead = GATHER // (examples * self._example)
        return ahead if ahead > 1 else max(1, DRAW // examples)

    def _batches(self, jobs: Jobs, keys: Tensor, first: int, last: int) -> list[Indices | Batch]:
        """The mini-batches of some steps; gathered in one go where none is ragged and all are small."""
        size = len(keys) * (self._sampler.batch_size or 1) * self._example
        if self._sampler.sampling != "replacement" or size * (last - first) > GATHER:
            return list(self._sampler.batches(jobs, keys, first, last))
        rows, data = self._sampler.table(jobs, keys, first, last).transpose(0, 1).contiguous(), self._sampler.clients
        return [Batch(*both) for both in zip(picked(data.inputs, rows), picked(data.targets, rows))]

    def _pieces(self, jobs: Jobs) -> list[Indices | Batch]:
        """All local data of a block in chunks of bounded size; gathered already if one chunk holds everything."""
        clients = self._sampler.clients
        chunk = int(clients.sizes[jobs.clients].max())
        if self._oracle.each is not None:
            # Dropout draws its masks chunk by chunk, so with it the chunks must be the same for any cohort.
            room = ROW if self._oracle.model.dropouts else ELEMENTS // len(jobs.clients)
            chunk = max(1, min(chunk, room // self._example))
        pieces = self._sampler.everything(jobs.clients, chunk)
        batch = self._gather(pieces[0]) if len(pieces) == 1 else None
        return [batch] if batch is not None else list(pieces)

    def _total(
        self, function: Callable, operands: tuple[Tensor, ...], pieces: list, keys: Tensor, counter: int
    ) -> tuple:
        """Sum of a function's results over the chunks of the local data."""
        total = self._apply(function, operands, pieces[0], keys, counter)
        for position, piece in enumerate(pieces[1:], start=1):
            more = self._apply(function, operands, piece, keys, counter + (position << 20))
            total = tuple(a + b for a, b in zip(total, more))
        return total

    def _apply(
        self, function: Callable, operands: tuple[Tensor, ...], piece: Indices | Batch, keys: Tensor, counter: int
    ) -> tuple:
        """function(*operands, batch) for the first clients of a piece of data."""
        count = len(operands[0])
        key = fold(keys[:count], counter) if self._oracle.model.dropouts else None
        batch = self._gather(piece.take(count)) if isinstance(piece, Indices) else piece
        if batch is not None:
            if count < len(batch.inputs):
                batch = Batch(*(None if part is None else part[:count] for part in batch))  # type: ignore[arg-type]
            batch = self._augmented(batch, keys, counter)
            return function(*operands, batch if key is None else batch._replace(key=key))
        # The loss must see whole, unpadded batches: clients with equal counts go together.
        assert isinstance(piece, Indices) and piece.counts is not None
        counts, results = piece.counts[:count], []
        for size in np.unique(counts):
            mine = torch.as_tensor(np.flatnonzero(counts == size), device=keys.device)
            batch = self._gather(Indices(piece.rows[mine, :size]))
            assert batch is not None
            batch = self._augmented(batch, keys[mine], counter)
            own_key = None if key is None else key[mine]
            results.append((mine, function(*(a[mine] for a in operands), batch._replace(key=own_key))))
        order = torch.cat([mine for mine, _ in results]).argsort()
        return tuple(torch.cat(parts)[order] for parts in zip(*(values for _, values in results)))

    def _augmented(self, batch: Batch, keys: Tensor, counter: int) -> Batch:
        """A mini-batch with its inputs augmented, if the run asks for it; passes over all data stay as they are."""
        augment = self._local.augment
        if augment is None or counter >= FULL_PASS:
            return batch
        return batch._replace(inputs=augment(batch.inputs, fold(keys[: len(batch.inputs)], AUGMENT + counter)))

    def _gather(self, indices: Indices) -> Batch | None:
        """The examples themselves; padding gets weight zero; None if they are ragged and must not be padded."""
        rows, counts, whole = indices
        data, weight = self._sampler.clients, None
        if counts is not None:
            width = int(counts.max())
            rows = rows[:, :width]
            if (counts != width).any() or (whole is not None and (whole != counts).any()):
                if self._oracle.each is None:
                    return None
                share = 1 / (counts if whole is None else whole) if self._oracle.reduction == "mean" else 1.0
                used = (np.arange(width) < counts[:, None]) * np.reshape(share, (-1, 1))
                weight = torch.as_tensor(used, dtype=self.steps.dtype, device=rows.device)
        return Batch(picked(data.inputs, rows), picked(data.targets, rows), weight)


def picked(data: Tensor, rows: Tensor) -> Tensor:
    """data[rows], at half its cost on a CPU."""
    return data.index_select(0, rows.flatten()).unflatten(0, rows.shape)
