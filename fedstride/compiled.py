"""The `compiled` backend: a whole local step of a cohort as one program.

Drawing the batch from the table of indices, augmentation, gradient, the method's direction and the update become one
program, compiled once for all sizes of cohort; on a CUDA device it is recorded for every size and replayed. Compiling
takes half a minute, so `auto` does not choose it: it is for runs of minutes. A program belongs to the code of a
direction and the constants it closes over, so rounds share it, and so do runs on the same oracle.

Steps without indices drawn with replacement (whole data sets, shuffled passes, replays), augmented ones on a CPU, and
passes over all data go as in `graph`; so does what cannot be compiled, with a warning.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.utils import _pytree as trees

from fedstride.convolution import by_rows
from fedstride.descent import AUGMENT, Local, Moving, active, move
from fedstride.graph import Graph, padded
from fedstride.joint import Joint, Request
from fedstride.keys import fold
from fedstride.oracle import Batch, room
from fedstride.sampling import Jobs, Sampler, table
from fedstride.tracing import add_products, pointwise, trace
from fedstride.vector import VectorModel

INDICES = 1 << 20  # of examples that are drawn at a time
BLOCK = 10  # steps that are recorded as one, so that a GPU does not wait for the next


class Program:
    """One step's code, the tensors it works on, and its recordings."""

    def __init__(
        self, step: Callable[..., None], capacity: int, size: int, leaves: list[Tensor], per_client: tuple[bool, ...],
        data: tuple[Tensor, Tensor], keys: Tensor, layout: "Layout",
    ):  # fmt: skip
        self._step, self._layout = step, layout
        self.capacity = capacity
        self.slab = max(1, INDICES // (capacity * size))  # steps whose batches are drawn at a time
        self._at = keys.new_zeros(2)  # the number of the step in the slab, and in all
        self._table, self._keys = keys.new_zeros(capacity, self.slab, size), keys.new_zeros(capacity)
        self._blocks = layout.cut(
            [
                leaf.new_zeros(capacity, *leaf.shape[1:]) if own else torch.zeros_like(leaf)
                for leaf, own in zip(leaves, per_client)
            ]
        )
        self._blocks = [block.contiguous() for block in self._blocks]
        # Which tensors have one row a client; the others are shared.
        self._rows = (False, False, False, True, True, *(len(block) == capacity for block in self._blocks))
        self._tensors = [self._at, *data, self._table, self._keys, *self._blocks]
        self._compiled: dict[bool, Callable] = {}
        self._seen: set[int] = set()  # sizes that have run once, so all memory and code is found
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}  # by size and steps
        self._pool: Any = None

    def fill(self, leaves: list[Tensor], keys: Tensor) -> None:
        """Take a cohort's tensors in."""
        for held, value in zip((self._keys, *self._blocks), (keys, *self._layout.cut(leaves))):
            held[: len(value)].copy_(value)
        self._ended: list[Tensor] = []

    def draw(self, rows: Tensor, first: int) -> None:
        """The batches [C, steps, B] from some step on."""
        self._table[: len(rows), : rows.shape[1]].copy_(rows)
        self._at[0].zero_()
        self._at[1].fill_(first)

    def end(self, first: int, last: int) -> None:
        """Some clients have done their steps; from now on their rows may be used as padding."""
        self._ended = self._ended or [torch.empty_like(held[:last]) for held in self._blocks]
        for held, kept in zip(self._blocks, self._ended):
            kept[first:last].copy_(held[first:last])

    def moved(self, at_work: int) -> Moving:
        """The cohort as the steps have left it, of which so many were at work to the end."""
        if not self._ended:
            return self._layout.joined([held[:at_work] for held in self._blocks])
        self.end(0, at_work)
        return self._layout.joined(self._ended)

    def advance(self, active: int, count: int) -> None:
        """Steps of the first clients, and on a GPU of some more, so that fewer sizes are recorded."""
        if not self._at.is_cuda:
            for _ in range(count):
                self._steps(active, 1)
            return
        active = padded(active)
        if active not in self._seen:
            self._steps(active, 1)
            self._seen.add(active)
            count -= 1
        for steps, times in ((BLOCK, count // BLOCK), (1, count % BLOCK)):
            for _ in range(times):
                replay = self._replays.get((active, steps)) or self._record(active, steps)
                replay()

    def _record(self, active: int, steps: int) -> Callable[[], None]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._steps(active, steps)
        self._replays[active, steps] = graph.replay
        return graph.replay

    def _steps(self, active: int, count: int) -> None:
        tensors = [held[:active] if own else held for held, own in zip(self._tensors, self._rows)]
        several = active > 1  # a single row is compiled apart: its size is taken for a constant
        if several not in self._compiled:
            self._compiled[several] = self._compile(tensors)
        for _ in range(count):
            self._compiled[several](*tensors)

    def _compile(self, tensors: list[Tensor]) -> Callable:
        single = len(tensors[3]) == 1
        traced = trace(self._step, tensors, self._rows, single)
        add_products(traced)
        if not single:
            for value, own in zip(tensors, self._rows):
                if own:
                    torch._dynamo.mark_dynamic(value, 0, min=2, max=self.capacity)  # so 32 bits suffice for indices
        # In the order as it stands: a kernel's last use before the kernel is moved, or it would be copied.
        return torch.compile(traced, options={"reorder_for_locality": False})


class Layout:
    """How a cohort's tensors lie in a program: those with a number for every parameter in blocks, one a parameter.

    So gradients need not be laid end to end before they are used. A step that looks at whole vectors (clipping, norms
    in a direction) gets them as one block.
    """

    def __init__(self, at: Moving, sizes: Sequence[int]):
        d = at.y.shape[1]
        self.sizes = list(sizes)
        self._form = trees.tree_structure(at)
        self._wide = [leaf.dim() == 2 and leaf.shape[1] == d for leaf in trees.tree_leaves(at)]

    def cut(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """All tensors, block by block."""
        parts = [leaf.split(self.sizes, 1) if wide else (leaf,) for leaf, wide in zip(leaves, self._wide)]
        return [block for part in parts for block in part]

    def joined(self, blocks: Sequence[Tensor]) -> Moving:
        """Undo `cut`."""
        return trees.tree_unflatten(
            [torch.cat(own, 1) if len(own) > 1 else own[0] for own in self._own(blocks)], self._form
        )

    def piece(self, blocks: Sequence[Tensor], number: int) -> Moving:
        """What belongs to one block; columns are copies but for the last, so that they change once a step."""
        last = number == len(self.sizes) - 1
        leaves = [
            own[number] if wide else own[0] if last else own[0].clone()
            for own, wide in zip(self._own(blocks), self._wide)
        ]
        return trees.tree_unflatten(leaves, self._form)

    def _own(self, blocks: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        rest = iter(blocks)
        return (list(islice(rest, len(self.sizes) if wide else 1)) for wide in self._wide)


class Compiled(Graph):
    """Whole local steps of a cohort in one program."""

    name = "compiled"

    def __init__(self, model: VectorModel, *arguments):
        super().__init__(by_rows(model), *arguments)  # of any type: a grouped convolution is for one size of cohort
        self._programs: dict[tuple, Program] = {}
        self._compiles = True

    def descend(
        self, sampler: Sampler, jobs: Jobs, keys: Tensor, at: Moving, direction: Callable | None, local: Local,
        first: int,
    ) -> bool:  # fmt: skip
        request = Request(sampler, jobs, keys, at, direction, local, first)
        return self.kind(request) is not None and self.descend_all([request])

    def kind(self, request: Request) -> tuple | None:
        """Cohorts of the same kind can be one; None: a cohort's steps cannot be a program."""
        sampler = request.sampler
        if sampler.full or sampler.sampling != "replacement":
            return None
        if request.local.augment is not None and not request.keys.is_cuda:
            return None  # torch 2.13 compiles the 64-bit arithmetic of crops wrongly for CPUs
        return request.kind

    def most(self, request: Request) -> int:
        """So many clients go into one batch."""
        return room(self.model.x)

    @torch.no_grad()
    def descend_all(self, requests: list[Request]) -> bool:
        """All local steps of cohorts of the same kind, as one cohort; False: nothing was done."""
        if not self._compiles:
            return False
        first, joint = requests[0], Joint(requests)
        sampler, at, direction, local = first.sampler, first.at, first.direction, first.local
        size, data = sampler.batch_size or 0, (sampler.clients.inputs, sampler.clients.targets)
        leaves, steps = joint.leaves, joint.steps
        per_client = tuple(leaf.dim() > 0 and len(leaf) == len(steps) for leaf in leaves)
        name = (*(first.kind or ())[1:], per_client)  # wherever they begin
        program = self._programs.get(name)
        if program is None or program.capacity < len(steps):
            whole = not pointwise(direction, local, at)
            layout = Layout(at, [at.y.shape[1]] if whole else self.model.sizes)
            step = self._step(layout, direction, local, whole)
            program = Program(step, padded(len(steps)), size, leaves, per_client, data, joint.keys, layout)
            self._programs[name] = program
        program.fill(leaves, joint.keys)
        slab, last, at_work = program.slab, int(steps.max()), len(steps)
        for k, wanted, count in _stretches(active(steps), first.begun, slab):
            if wanted < at_work:
                program.end(wanted, at_work)
                at_work = wanted
            if (k - first.begun) % slab == 0:
                drawn = table(joint.draws, joint.drawing, k, min(last, k + slab))
                program.draw(joint.sorted(drawn), k)
            try:
                program.advance(wanted, count)
            except Exception as error:  # whatever it is: compiling is for speed alone
                self._compiles = False
                reason = str(error).splitlines()[0]
                warnings.warn(f"the model cannot be compiled, `graph` goes on: {reason}", stacklevel=2)
                return False
        joint.give(trees.tree_leaves(program.moved(at_work)))
        return True

    def _step(self, layout: Layout, direction: Callable | None, local: Local, whole: bool) -> Callable[..., None]:
        """One local step of a cohort, all in place."""

        def step(at: Tensor, inputs: Tensor, targets: Tensor, table: Tensor, keys: Tensor, *blocks: Tensor) -> None:
            place, counter = at[:1], at[1:]
            pieces = [layout.piece(blocks, number) for number in range(len(layout.sizes))]
            rows = table.index_select(1, place)[:, 0]
            batch = Batch(inputs[rows], targets[rows], None, fold(keys, counter) if self.model.dropouts else None)
            if local.augment is not None:
                batch = batch._replace(inputs=local.augment(batch.inputs, fold(keys, counter + AUGMENT)))
            y: Any = pieces[0].y
            if not whole:
                y = [piece.y.view(len(piece.y), *shape) for piece, shape in zip(pieces, self.model.shapes)]
            g, loss = self.rowwise(grad_and_value(self.row_loss), y, *batch)
            for piece, part in zip(pieces, [g] if whole else g):
                move(direction, local, piece, part.flatten(1))
            pieces[-1].losses.add_(loss)
            at.add_(1)

        return step


def _stretches(active: list[int], begun: int, slab: int) -> Iterator[tuple[int, int, int]]:
    """(first step, clients at work, steps) of steps that the same clients do and that lie in one slab."""
    start = begun
    for k in range(begun + 1, len(active) + 1):
        if k == len(active) or active[k] != active[start] or (k - begun) % slab == 0:
            yield start, active[start], k - start
            start = k
