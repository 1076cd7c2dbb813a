"""Functions of a cohort written down as graphs, for any number of clients; and steps made of gradients.

A step `y <- y - lr g` needs no gradient as a whole: where a parameter's is a product of matrices, as that of a linear
layer's weight is, the product is added to the parameter while it is made. That saves writing the gradient and reading
it again, which takes as long as all arithmetic of a small network. On a CPU, where a step is run operation by operation
(`moving_step`), what a method adds to the gradient, such as SCAFFOLD's drift, is added to the parameter apart; a
compiled step adds both in one go (`add_products`).
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as trees

from fedstride.convolution import add_correlation, correlate_rows
from fedstride.descent import Local, Moving
from fedstride.products import add_product

# Numbers of clients while a function is traced: told from all lengths, and from all that a model may compute with.
PRIMES = (761838283, 761838313, 761838331, 761838359)

aten = torch.ops.aten
SUMS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
RESHAPES = (aten.view.default, aten._unsafe_view.default)


def trace(function: Callable, tensors: Sequence[Tensor], rows: Sequence[bool], single: bool = False) -> fx.GraphModule:
    """The operations of a function; `rows` says which tensors have one row a client.

    The graph holds for any number of clients; a single one may be told, whose length compilers take for a constant.
    """
    others = [length for value, own in zip(tensors, rows) for length in value.shape[own:]]
    size = 1 if single else next(prime for prime in PRIMES if all(length % prime for length in others))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [
            torch.empty_strided((size, *value.shape[1:]), value.stride(), dtype=value.dtype, device=value.device)
            if own
            else mode.from_tensor(value)
            for value, own in zip(tensors, rows)
        ]
        with _rules_only():
            traced = make_fx(function)(*fakes)
    if not single:
        _free(traced, size, list(rows).index(True))
    return traced


@contextmanager
def _rules_only() -> Iterator[None]:
    """Without what `vmap` does for an operation it has no rule for: one call a client, of which there are many here."""
    setting: Any = torch._C._functorch
    before = setting._is_vmap_fallback_enabled()
    setting._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        setting._set_vmap_fallback_enabled(before)


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


def moving_step(traced: fx.GraphModule, parameters: int) -> Callable[..., tuple[Tensor]] | None:
    """A step from a graph f(*parameters, lr [C, 1], *rest) -> (loss, *directions); moves parameters, returns (loss,).

    None where what is added shares memory with a parameter: that would have moved before it is used.
    """
    graph = traced.graph
    _tidy(graph)
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    own, lr = arguments[:parameters], arguments[parameters]
    end: Any = next(iter(reversed(graph.nodes)))
    loss, *directions = end.args[0]
    split = [_split(direction) for direction in directions]
    operands = [node for product, rest in split for node in (*product, *(term for _, term in rest))]
    held = {_memory(node) for node in own}
    if any(_memory(node) in held for node in (loss, *operands)):
        return None
    with graph.inserting_before(end):
        back = graph.call_function(aten.neg.default, (lr,))
        for parameter, (product, rest) in zip(own, split):
            rates = {-1: _spread(graph, lr, len(_shape(parameter))), 1: _spread(graph, back, len(_shape(parameter)))}
            for sign, term in rest:
                graph.call_function(aten.addcmul_.default, (parameter, term, rates[sign]))
            if product:
                scaled = graph.call_function(aten.mul.Tensor, (product[0], rates[1]))
                graph.call_function(aten.baddbmm_.default, (parameter, scaled, product[1]))
    end.args = ((loss,),)
    graph.eliminate_dead_code()
    traced.recompile()
    return traced.forward


def add_products(traced: fx.GraphModule) -> None:
    """Rewrite the updates `y <- y - lr (gradient + decay y + shift)` of a graph, where gradients are products."""
    graph = traced.graph
    _tidy(graph)
    written = {_memory(node.args[0]) for node in graph.nodes if _writes(node)}
    for update in list(graph.nodes):
        if update.target is not aten.addcmul_.default or update.kwargs != {"value": -1}:
            continue
        y, direction, lr = update.args
        gradient, shift, decay = _along(direction, y)
        product, correlation, rest = _product(gradient), _correlation(gradient), (shift, decay)
        if any(_memory(node) in written for node in (*(product or ()), shift) if node is not None):
            continue  # a parameter or a carry, which may have changed by then
        if product is not None and _shape(gradient)[0] == _shape(y)[0]:
            with graph.inserting_before(update):
                graph.call_function(add_product._opoverload, (y, lr, *product, *rest))
            graph.erase_node(update)
        elif correlation is not None and _unread(graph, y, correlation, (update, *_way(direction, gradient))):
            with graph.inserting_before(correlation):
                bias = graph.call_function(add_correlation._opoverload, (y, lr, *correlation.args, *rest))
            graph.erase_node(update)
            for part in correlation.users:
                if part is not gradient:
                    part.replace_all_uses_with(bias, propagate_meta=True)
    graph.eliminate_dead_code()
    traced.recompile()


def _along(direction: Any, y: fx.Node) -> tuple[Any, Any, float]:
    """Gradient, shift and decay of a direction `gradient + decay y + shift` that nobody else needs."""
    node, shift, decay = direction, None, 0.0
    while node.target is aten.add.Tensor and len(node.users) == 1:
        term, scale = node.args[1], node.kwargs.get("alpha", 1)
        if term is y and not decay:
            decay = float(scale)
        elif shift is None and scale == 1 and getattr(term, "op", None) == "placeholder" and _shape(term) == _shape(y):
            shift = term
        else:
            break
        node = node.args[0]
    while node.target in (*RESHAPES, aten._to_copy.default) and len(node.users) == 1:
        node = node.args[0]
    return node, shift, decay


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _correlation(gradient: Any) -> Any:
    """The node that makes the gradient of a convolution's kernel and of its bias, if a gradient is of the former."""
    if gradient.target is not operator.getitem or gradient.args[1] != 0 or len(gradient.users) > 1:
        return None
    made = gradient.args[0]
    return made if made.target is correlate_rows._opoverload else None


def _way(direction: Any, gradient: Any) -> Iterator[Any]:
    """What lies between a gradient and the direction made of it."""
    while direction is not gradient:
        yield direction
        direction = direction.args[0]


def _unread(graph: fx.Graph, y: fx.Node, since: fx.Node, but: Sequence[fx.Node]) -> bool:
    """Whether y may change at some node already: from there on nobody looks at it but those that are named."""
    nodes = list(graph.nodes)
    later = {used for node in nodes[nodes.index(since) :] if node not in but for used in node.all_input_nodes}
    return all(_memory(used) != _memory(y) for used in later if isinstance(used.meta.get("val"), Tensor))


def _tidy(graph: fx.Graph) -> None:
    """Batching leaves views that change nothing."""
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target in (*RESHAPES, aten.expand.default) and _shape(node) == _shape(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _split(direction: Any) -> tuple[tuple[Any, ...], list[tuple[int, Any]]]:
    """The factors of the product that a direction begins with, and what is added to it, with signs.

    Where it does not begin with one, no factors, and the direction as it is.
    """
    node, rest = direction, []
    while node.target in SUMS and len(node.args) == 2 and not node.kwargs and isinstance(node.args[1], fx.Node):
        rest.append((SUMS[node.target], node.args[1]))
        node = node.args[0]
    product = _product(node)
    return ((), [(1, direction)]) if product is None else (product, rest)


def _product(gradient: Any) -> tuple[Any, Any] | None:
    """The factors, if a gradient is a product, perhaps transposed and back, and nobody else needs it."""
    node, flipped = gradient, False
    while node.target is aten.transpose.int and sorted(node.args[1:]) == [1, 2]:
        node, flipped = node.args[0], not flipped
    return node.args if node.target is aten.bmm.default and len(node.users) == 1 and not flipped else None


def _spread(graph: fx.Graph, column: fx.Node, dims: int) -> fx.Node:
    """A column with one number a client, with as many axes as a parameter has."""
    for _ in range(dims - 2):
        column = graph.call_function(aten.unsqueeze.default, (column, -1))
    return graph.call_function(aten.squeeze.dim, (column, -1)) if dims < 2 else column


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _memory(node: Any) -> int:
    return node.meta["val"].untyped_storage()._cdata


def identity(direction: Callable | None) -> tuple | None:
    """What tells the code of a direction from another's; None where it closes over what may change."""
    if direction is None:
        return ()
    function = getattr(direction, "__func__", direction)  # what a method of an object is made of
    if not isinstance(function, FunctionType):
        return None
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    named = sorted((function.__kwdefaults__ or {}).items())
    world = tuple(function.__globals__.get(name) for name in _names(function.__code__))
    constants = (getattr(direction, "__self__", None), *cells, *(function.__defaults__ or ()), *named, world)
    try:
        hash(constants)
    except TypeError:
        return None
    changing = any(isinstance(one, Tensor) for one in trees.tree_leaves(constants))
    return None if changing else (function.__code__, constants)


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function may look up in its module, or a function within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def pointwise(direction: Callable | None, local: Local, at: Moving) -> bool:
    """Whether a step treats every number of the vectors alike, whatever the others are and however many."""
    if local.clip is not None:
        return False
    if direction is None:
        return True
    try:
        traced = [_direction(direction, at, more) for more in (0, 1)]
    except Exception:  # it looks at values, or at tensors that it was not given
        return False
    called = [node.target for node in traced[0].graph.nodes if node.op == "call_function"]
    return traced[0].code == traced[1].code and all(torch.Tag.pointwise in getattr(op, "tags", ()) for op in called)


def _direction(direction: Callable, at: Moving, more: int) -> fx.GraphModule:
    """The operations of a direction, with so many more clients and parameters."""

    def fake(leaf: Tensor) -> Tensor:
        shape = [n + more if n == whole > 1 else n for n, whole in zip(leaf.shape, at.y.shape)]
        return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)

    with FakeTensorMode():
        fakes = trees.tree_map(fake, at)
        carry = (fakes.carry,) if at.carries else ()
        return make_fx(direction)(torch.empty_like(fakes.y), fakes.y, *carry, *fakes.rows)
