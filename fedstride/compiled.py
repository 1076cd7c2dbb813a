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
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
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
PARAMETERS = 64  # up to so many tensors in a model, the gradient is used without being laid end to end before
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
        return torch.compile(traced, options={"max_pointwise_cat_inputs": PARAMETERS})


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
        code = identity(direction)
        if not self._compiles or code is None or sampler.full or sampler.sampling != "replacement":
            return False
        leaves, form = trees.tree_flatten(at)
        count, size = len(at.y), sampler.batch_size or 0
        per_client = tuple(leaf.dim() > 0 and len(leaf) == count for leaf in leaves)
        data = (sampler.clients.inputs, sampler.clients.targets)
        name = (code, local, local.augment, form, per_client, size, *(part.data_ptr() for part in data))
        program = self._programs.get(name)
        if program is None or program.capacity < count:
            step = self._step(form, direction, local)
            program = self._programs[name] = Program(step, padded(count), size, leaves, per_client, data, keys)
        program.fill(leaves, keys)
        slab = program.slab
        for k, wanted in enumerate(active(jobs.steps)):
            if k % slab == 0:
                steps = sampler.batches(jobs, keys, k, min(int(jobs.steps[0]), k + slab))
                program.draw(torch.stack([step.rows for step in steps], dim=1), k)
            try:
                program.advance(wanted)
            except Exception as error:  # whatever it is: compiling is for speed alone
                if k:
                    raise
                self._compiles = False
                warnings.warn(
                    f"the model cannot be compiled, `graph` goes on: {str(error).splitlines()[0]}", stacklevel=2
                )
                return False
        moved = trees.tree_unflatten(program.leaves(count), form)
        at.y.copy_(moved.y)
        at.losses.copy_(moved.losses)
        for kept, value in zip(trees.tree_leaves(at.carry), trees.tree_leaves(moved.carry)):
            kept.copy_(value)
        return True

    def _step(self, form: Any, direction: Callable | None, local: Local) -> Callable[..., None]:
        """One local step of a cohort, all in place."""

        def step(place: Tensor, counter: Tensor, inputs: Tensor, targets: Tensor, *own: Tensor) -> None:
            table, keys, *leaves = own
            at = trees.tree_unflatten(leaves, form)
            rows = table.index_select(1, place)[:, 0]
            batch = Batch(inputs[rows], targets[rows], None, fold(keys, counter) if self.model.dropouts else None)
            if local.augment is not None:
                batch = batch._replace(inputs=local.augment(batch.inputs, fold(keys, counter + AUGMENT)))
            loss, g = self.compute(at.y, batch)
            at.losses.add_(loss)
            move(direction, local, at, g)
            place.add_(1)
            counter.add_(1)

        return step
