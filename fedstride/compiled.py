"""The `compiled` backend: a whole local step of a cohort as one program.

Drawing the batch from the table of indices, augmentation, gradient, the method's direction and the update become one
program, compiled once for all sizes of cohort; on a CUDA device it is recorded for every size and replayed. Compiling
takes half a minute, so `auto` does not choose it: it is for runs of minutes. A program belongs to the code of a
direction and the constants it closes over, so rounds share it, and so do runs on the same oracle.

Steps without indices drawn with replacement (whole data sets, shuffled passes, replays) and passes over all data go as
in `graph`; so does what cannot be compiled, with a warning.
"""

import operator
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.func import grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as trees

from fedstride.convolution import by_rows
from fedstride.descent import AUGMENT, Local, Moving, active, move
from fedstride.graph import Graph, padded
from fedstride.keys import fold
from fedstride.oracle import Batch
from fedstride.sampling import Jobs, Sampler
from fedstride.vector import VectorModel

PRIMES = (8191, 8209, 8219, 8221, 8231, 8233, 8237, 8243)  # a number of clients that is told from all other lengths
INDICES = 1 << 20  # of examples that are drawn at a time


class Program:
    """One step's code, the tensors it works on, and its recordings."""

    def __init__(
        self, step: Callable[..., None], capacity: int, size: int, leaves: list[Tensor], per_client: tuple[bool, ...],
        data: tuple[Tensor, Tensor], keys: Tensor,
    ):  # fmt: skip
        self._step = step
        self.capacity = capacity
        self.slab = max(1, INDICES // (capacity * size))  # steps whose batches are drawn at a time
        self._place, self._counter = keys.new_zeros(1), keys.new_zeros(1)  # of a step: in the slab, and in all
        self._table, self._keys = keys.new_zeros(capacity, self.slab, size), keys.new_zeros(capacity)
        self._leaves = [
            value.new_zeros(capacity, *value.shape[1:]) if own else value.clone()
            for value, own in zip(leaves, per_client)
        ]
        # Which tensors have one row a client; the others are shared.
        self._rows = (False, False, False, False, True, True, *per_client)
        self._tensors = [self._place, self._counter, *data, self._table, self._keys, *self._leaves]
        self._compiled: dict[bool, Callable] = {}
        self._replays: dict[int, Callable[[], None] | None] = {}
        self._pool: Any = None

    def fill(self, leaves: list[Tensor], keys: Tensor) -> None:
        """Take a cohort's tensors in."""
        for held, value in zip((self._keys, *self._leaves), (keys, *leaves)):
            held[: len(value)].copy_(value)

    def draw(self, rows: Tensor, first: int) -> None:
        """The batches [C, steps, B] from some step on."""
        self._table[: len(rows), : rows.shape[1]].copy_(rows)
        self._place.zero_()
        self._counter.fill_(first)

    def leaves(self, count: int) -> list[Tensor]:
        """The tensors of a cohort as the steps have left them."""
        return [held[:count] if len(held) == self.capacity else held for held in self._leaves]

    def advance(self, active: int) -> None:
        """One step of the first clients."""
        replay = self._replays.get(active)
        if replay is not None:
            replay()
            return
        tensors = [held[:active] if own else held for held, own in zip(self._tensors, self._rows)]
        several = active > 1  # a single row is compiled apart: its size is taken for a constant
        if several not in self._compiled:
            self._compiled[several] = self._compile(tensors)
        if tensors[0].is_cuda and active in self._replays:  # it has run once, so all memory and code is found
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._compiled[several](*tensors)
            self._replays[active] = graph.replay
            graph.replay()
            return
        self._compiled[several](*tensors)
        self._replays[active] = None

    def _compile(self, tensors: list[Tensor]) -> Callable:
        count = len(tensors[4])
        others = [length for value, own in zip(tensors, self._rows) for length in value.shape[own:]]
        size = next(prime for prime in PRIMES if all(length % prime for length in others)) if count > 1 else 1
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [
                torch.empty(size, *value.shape[1:], dtype=value.dtype, device=value.device)
                if own
                else mode.from_tensor(value)
                for value, own in zip(tensors, self._rows)
            ]
            traced = make_fx(self._step)(*fakes)
        if count > 1:
            _free(traced, size, self._rows.index(True))
            for value, own in zip(tensors, self._rows):
                if own:
                    torch._dynamo.mark_dynamic(value, 0, min=2, max=self.capacity)  # so 32 bits suffice for indices
        return torch.compile(traced)


def _free(traced: fx.GraphModule, size: int, row: int) -> None:
    """Turn the number of clients, traced as an unlikely prime, into the length of the argument `row`."""
    arguments = [node for node in traced.graph.nodes if node.op == "placeholder"]
    with traced.graph.inserting_after(arguments[-1]):
        length = traced.graph.call_function(torch.ops.aten.sym_size.int, (arguments[row], 0))
    for node in list(traced.graph.nodes):
        if node.op != "call_function" or node is length:
            continue

        def freed(value: Any, node: fx.Node = node) -> Any:
            if not isinstance(value, int) or value == 0 or value % size:
                return value
            with traced.graph.inserting_before(node):
                return length if value == size else traced.graph.call_function(operator.mul, (length, value // size))

        node.args, node.kwargs = fx.node.map_aggregate(node.args, freed), fx.node.map_aggregate(node.kwargs, freed)
    traced.graph.eliminate_dead_code()
    traced.recompile()


def identity(direction: Callable | None) -> tuple | None:
    """What tells the code of a direction from another's; None where it closes over what may change."""
    if direction is None:
        return ()
    cells = tuple(cell.cell_contents for cell in direction.__closure__ or ())
    constants = (*cells, *(direction.__defaults__ or ()))
    try:
        hash(constants)
    except TypeError:
        return None
    return None if any(isinstance(one, Tensor) for one in constants) else (direction.__code__, constants)


class Request(NamedTuple):
    """A cohort that wants to do its local steps."""

    sampler: Sampler
    jobs: Jobs  # longest first
    keys: Tensor
    at: Moving
    direction: Callable | None
    local: Local

    @property
    def kind(self) -> tuple | None:
        """Cohorts of the same kind can be one; None: it cannot be compiled."""
        code = identity(self.direction)
        if code is None or self.sampler.full or self.sampler.sampling != "replacement":
            return None
        clients, form = self.sampler.clients, trees.tree_structure(self.at)
        data = (clients.inputs.data_ptr(), clients.targets.data_ptr())
        return code, self.local, self.local.augment, form, self.sampler.batch_size, data


class Compiled(Graph):
    """Whole local steps of a cohort in one program."""

    name = "compiled"

    def __init__(self, model: VectorModel, *arguments):
        super().__init__(by_rows(model), *arguments)  # of any type: a grouped convolution is for one size of cohort
        self._programs: dict[tuple, Program] = {}
        self._compiles = True

    def descend(
        self, sampler: Sampler, jobs: Jobs, keys: Tensor, at: Moving, direction: Callable | None, local: Local
    ) -> bool:
        request = Request(sampler, jobs, keys, at, direction, local)
        return self._compiles and request.kind is not None and self.descend_all([request])

    def descend_all(self, requests: list[Request]) -> bool:
        """All local steps of cohorts of the same kind, as one cohort."""
        sampler, _, _, at, direction, local = requests[0]
        several = len(requests) > 1
        form = trees.tree_structure(at)
        size, data = sampler.batch_size or 0, (sampler.clients.inputs, sampler.clients.targets)
        counts = [len(request.jobs.steps) for request in requests]
        steps = np.concatenate([request.jobs.steps for request in requests])
        order = np.argsort(-steps, kind="stable")
        sort = torch.as_tensor(order, device=at.y.device)

        def joined(parts: list[Tensor]) -> Tensor:
            """The rows of all cohorts, longest first; what a cohort's clients share is repeated for each."""
            rows = [p if len(p) == n else p.expand(n, *p.shape[1:]) for p, n in zip(parts, counts)]
            return torch.cat(rows)[sort]

        if several:
            leaves = [joined(list(parts)) for parts in zip(*(trees.tree_leaves(request.at) for request in requests))]
            keys = joined([request.keys for request in requests])
        else:
            leaves, keys = trees.tree_leaves(at), requests[0].keys
        per_client = tuple(leaf.dim() > 0 and len(leaf) == len(steps) for leaf in leaves)
        name = (*(requests[0].kind or ()), per_client)
        program = self._programs.get(name)
        if program is None or program.capacity < len(steps):
            step = self._step(form, direction, local, pointwise(direction, local, at))
            program = self._programs[name] = Program(step, padded(len(steps)), size, leaves, per_client, data, keys)
        program.fill(leaves, keys)
        slab, last = program.slab, int(steps.max())
        for k, wanted in enumerate(active(steps[order])):
            if k % slab == 0:
                drawn = [
                    torch.stack([step.rows for step in own.batches(jobs, key, k, min(last, k + slab))], dim=1)
                    for own, jobs, key, *_ in requests
                ]
                program.draw(joined(drawn) if several else drawn[0], k)
            try:
                program.advance(wanted)
            except Exception as error:  # whatever it is: compiling is for speed alone
                if k:
                    raise
                self._compiles = False
                reason = str(error).splitlines()[0]
                warnings.warn(f"the model cannot be compiled, `graph` goes on: {reason}", stacklevel=2)
                return False
        moved = program.leaves(len(steps))
        if several:
            moved = [leaf[sort.argsort()] for leaf in moved]
        for first, request in zip(np.cumsum([0, *counts]), requests):
            ours = [leaf[first : first + len(request.keys)] if several else leaf for leaf in moved]
            mine = trees.tree_unflatten(ours, form)
            kept, new = ((one.y, one.losses, *trees.tree_leaves(one.carry)) for one in (request.at, mine))
            for old, value in zip(kept, new):
                old.copy_(value)
        return True

    def _step(self, form: Any, direction: Callable | None, local: Local, piecewise: bool) -> Callable[..., None]:
        """One local step of a cohort, all in place.

        piecewise: parameter by parameter, so that gradients need not be laid end to end before they are used.
        """

        def step(place: Tensor, counter: Tensor, inputs: Tensor, targets: Tensor, *own: Tensor) -> None:
            table, keys, *leaves = own
            at = trees.tree_unflatten(leaves, form)
            rows = table.index_select(1, place)[:, 0]
            batch = Batch(inputs[rows], targets[rows], None, fold(keys, counter) if self.model.dropouts else None)
            if local.augment is not None:
                batch = batch._replace(inputs=local.augment(batch.inputs, fold(keys, counter + AUGMENT)))
            if piecewise:
                cut = [
                    part.unflatten(1, size) for part, size in zip(at.y.split(self.model.sizes, 1), self.model.shapes)
                ]
                g, loss = self.rowwise(grad_and_value(self.row_loss), cut, *batch)
                for number, part in enumerate(g):
                    move(direction, local, self._piece(at, number), part.flatten(1))
            else:
                loss, g = self.compute(at.y, batch)
                move(direction, local, at, g)
            at.losses.add_(loss)
            place.add_(1)
            counter.add_(1)

        return step

    def _piece(self, at: Moving, number: int) -> Moving:
        """What belongs to one parameter; columns are copies but for the last, so that they change once a step."""
        first, d, last = sum(self.model.sizes[:number]), at.y.shape[1], number == len(self.model.sizes) - 1

        def own(leaf: Tensor) -> Tensor:
            if leaf.dim() == 2 and leaf.shape[1] == d:
                return leaf[:, first : first + self.model.sizes[number]]
            return leaf if last else leaf.clone()

        return trees.tree_map(own, at)


def pointwise(direction: Callable | None, local: Local, at: Moving) -> bool:
    """Whether a step treats every number of the vectors alike, whatever the others are."""
    if local.clip is not None:
        return False
    if direction is None:
        return True
    with FakeTensorMode():
        fakes = trees.tree_map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device), at)
        carry = (fakes.carry,) if isinstance(at.carry, Tensor) or at.carry else ()
        traced = make_fx(direction)(torch.empty_like(fakes.y), fakes.y, *carry, *fakes.rows)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    return all(torch.Tag.pointwise in getattr(target, "tags", ()) for target in called)
