"""The compiled backend and its convolutions: whole local steps as programs, equal to `vmap`."""

import re
from functools import partial

import pytest
import torch
from problems import digits
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional

import fedstride as fs
from fedstride.algorithm import Delta
from fedstride.compiled import Program, _stretches
from fedstride.convolution import by_rows
from fedstride.descent import Local, Moving
from fedstride.tracing import identity, pointwise
from fedstride.vector import VectorModel

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: torch sees no CUDA device")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3, stride=2, bias=False),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(5, 10),
    )  # fmt: skip


def run(method, backend, model=None, **options):
    clients, _ = digits()
    count = len(clients)
    given = dict(rounds=3, lr=0.1, steps=[1 + 3 * i % 7 for i in range(count)], batch_size=4, dtype=torch.float64)
    return fs.simulate(method, model or network(), clients, backend=backend, **given | options)


def test_compiled_steps_equal_vmap(recwarn):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with_vmap, compiled = (
        run("fedagrac", backend, model=model, weight_decay=0.01, device="cpu") for backend in ("vmap", "compiled")
    )
    same(with_vmap, compiled, recwarn)


def test_batches_drawn_for_a_few_steps_at_a_time(recwarn, monkeypatch):
    """Neither the end of a client nor that of the steps falls on the end of a draw."""
    clients, _ = digits()
    monkeypatch.setattr("fedstride.compiled.INDICES", 3 * 4 * len(clients))
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10))
    same(*(run("scaffold", backend, model=model, device="cpu") for backend in ("vmap", "compiled")), recwarn)


def test_stretches_are_the_steps_that_the_same_clients_do():
    for active, begun, slab in (([4, 4, 4, 2, 2, 1], 0, 4), ([4, 4, 4, 2, 2, 1], 1, 2), ([3], 0, 9), ([3], 1, 9)):
        found = list(_stretches(active, begun, slab))
        assert [wanted for _, wanted, count in found for _ in range(count)] == active[begun:]
        assert [first for first, _, _ in found] == [begun + sum(n for *_, n in found[:i]) for i in range(len(found))]
        assert all((first - begun) // slab == (first + count - 1 - begun) // slab for first, _, count in found)
    assert list(_stretches([4] * 30 + [2] * 10, 0, 100)) == [(0, 4, 30), (30, 2, 10)]


def test_clients_that_all_end_together(recwarn):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    same(*(run("fedavg", backend, model=model, steps=2, device="cpu") for backend in ("vmap", "compiled")), recwarn)


def operations(method, monkeypatch, **options):
    """A run with the program of a step as it is before it is compiled, and the names of what it calls."""
    traced = []
    monkeypatch.setattr(torch, "compile", lambda graph, **options: traced.append(graph) or graph)
    result = run(method, "compiled", device="cpu", **options)
    return result, [node.target.__name__ for node in traced[0].graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, dict(weight_decay=decay)) for method in ("fedavg", "scaffold", "fedveca") for decay in (0, 0.01)),
        ("fedagrac", {}), ("fedprox", {}), ("fedavg", dict(momentum=0.5)),
    ],
)  # fmt: skip
def test_gradients_are_added_while_they_are_made(method, options, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(network()[:5], nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 10))
    result, called = operations(method, monkeypatch, model=model, **options)
    torch.testing.assert_close(result.x, run(method, "vmap", model=model, **options).x, rtol=1e-10, atol=1e-12)
    own = method in ("fedveca", "fedprox") or "momentum" in options  # something is made of whole gradients
    expected = dict(add_product=0 if own else 2, add_correlation=0 if own else 2, correlate_rows=2 if own else 0)
    assert {name: called.count(f"{name}.default") for name in expected} == expected


def test_gradients_in_bfloat16_are_added_while_they_are_made(monkeypatch):
    result, called = operations("scaffold", monkeypatch, dtype=torch.bfloat16)
    assert called.count("add_product.default") == 1 and called.count("add_correlation.default") == 2
    same = run("scaffold", "vmap", dtype=torch.bfloat16)
    assert (result.x - same.x).norm() <= 0.02 * (same.x - run("scaffold", "vmap", rounds=1, lr=1e-9).x).norm()


class Twice(nn.Module):
    """The gradient of a kernel is a sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.ones(1))

    def before(self, inputs):
        return self.first(inputs)

    def forward(self, inputs):
        return self.last(self.first(self.before(inputs * self.scale).tanh()).flatten(1))


class Detached(Twice):
    """The gradient of a kernel is made before the kernel is needed for that of the scale."""

    def before(self, inputs):
        return functional.conv2d(inputs, self.first.weight.detach(), padding=1)


class Heads(nn.Module):
    """Gradients are products, but several a client."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.heads, self.last = nn.Parameter(torch.randn(4, 16, 3)), nn.Linear(12, 10)

    def forward(self, inputs):
        heads = torch.matmul(inputs.view(-1, 4, 16).transpose(0, 1), self.heads).transpose(0, 1)
        return self.last(heads.flatten(1).tanh())


class Merged(nn.Module):
    """The factors of the gradients of two parameters are each other, and one of them has moved first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Parameter(torch.randn(12, 3)), nn.Parameter(torch.randn(3, 64))
        self.last = nn.Linear(12, 10)

    def forward(self, inputs):
        return self.last(functional.linear(inputs.flatten(1), self.up @ self.down).tanh())


class Squared(nn.Module):
    """A factor of a gradient is the parameter itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.weight, self.last = nn.Parameter(torch.randn(64, 64) / 8), nn.Linear(64, 10)

    def forward(self, inputs):
        return self.last(inputs.flatten(1) @ (self.weight.detach() @ self.weight))


@pytest.mark.parametrize("kind", [Twice, Detached, Heads, Merged, Squared])
def test_gradients_that_are_not_one_product_a_client_are_made_first(kind, monkeypatch):
    result, called = operations("fedavg", monkeypatch, model=kind())
    assert called.count("add_correlation.default") == 0 and called.count("add_product.default") == 1
    torch.testing.assert_close(result.x, run("fedavg", "vmap", model=kind()).x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "direction", [lambda g, y, carry: (g + carry, 0.5 * carry), lambda g, y, c: (g + c, c.mul_(0.5))]
)
def test_a_carry_is_added_before_it_changes(direction, monkeypatch):
    def client(self, work, message, memory):
        y, _ = work.descend(message.x, direction, carry=0.3 * work.rows(message.x))
        return Delta(y - message.x), memory

    monkeypatch.setattr(fs.algorithms.FedAvg, "client", client)
    result, called = operations("fedavg", monkeypatch)
    assert not [name for name in called if name.startswith("add_product")]
    torch.testing.assert_close(result.x, run("fedavg", "vmap").x, rtol=1e-10, atol=1e-12)


def test_what_is_moved_is_not_copied():
    """A compiler that changed the order of a program would copy kernels before it moves them."""
    model = nn.Sequential(network()[:5], nn.Linear(5, 10))
    _, code = run_and_get_code(run, "fedavg", "compiled", model=model, rounds=1, device="cpu")
    moved = re.findall(r"fedstride\.add_(?:product|correlation)\.default\((\w+)", code[0])
    assert len(moved) == 3 and all(name.startswith("arg") for name in moved)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedagrac", "fedveca"])
def test_compiled_steps_equal_vmap_with_everything(method, recwarn):
    options = dict(augment=fs.data.crop_flip(1), weight_decay=0.01)
    same(*(run(method, backend, **options) for backend in ("vmap", "compiled")), recwarn)


def same(with_vmap, compiled, recwarn):
    assert compiled.backend == "compiled"
    assert not [warning for warning in recwarn if "compiled" in str(warning.message)]
    torch.testing.assert_close(compiled.x, with_vmap.x, rtol=1e-10, atol=1e-12)
    assert compiled.rows[-1]["local_loss"] == pytest.approx(with_vmap.rows[-1]["local_loss"], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("method", fs.algorithms.names())
def test_every_method_compiled(method):
    if method == "centralised":
        pytest.skip("one client alone is one row")
    results = [run(method, backend, rounds=4) for backend in ("vmap", "compiled")]
    torch.testing.assert_close(results[1].x, results[0].x, rtol=1e-9, atol=1e-11)


def test_what_cannot_be_compiled_goes_on_with_a_warning(monkeypatch):
    def fails(self, tensors):
        raise RuntimeError("no compiler here\nat all")

    monkeypatch.setattr(Program, "_compile", fails)
    with pytest.warns(UserWarning, match="cannot be compiled, `graph` goes on: no compiler here$") as told:
        compiled = run("scaffold", "compiled", device="cpu")
    assert len([one for one in told if "compiled" in str(one.message)]) == 1
    torch.testing.assert_close(compiled.x, run("scaffold", "vmap", device="cpu").x, rtol=1e-12, atol=1e-14)


def test_whole_data_sets_go_step_by_step():
    results = [run("scaffold", backend, batch_size=None) for backend in ("vmap", "compiled")]
    torch.testing.assert_close(results[1].x, results[0].x, rtol=1e-12, atol=1e-14)


def test_directions_are_told_apart_by_code_and_constants():
    def make(mu):
        return lambda g, y, x: g + mu * (y - x)

    assert identity(make(0.1)) == identity(make(0.1)) != identity(make(0.2))
    assert identity(None) == ()
    assert identity(make(torch.ones(1))) is None  # a tensor may change, and a program would not see it
    assert identity(make([0.1])) is None
    assert identity(lambda g, y, x: g) != identity(lambda g, y, x: g + x)


def test_pointwise_directions_are_recognised():
    y, column = torch.ones(3, 5), torch.ones(3, 1)
    at = Moving(y, column, torch.ones(3), torch.ones(3), (y,))
    assert pointwise(None, Local(momentum=0.9), at)
    assert not pointwise(None, Local(clip=1.0), at)
    assert pointwise(lambda g, y, x: g + 0.1 * (y - x), Local(), at)
    assert not pointwise(lambda g, y, x: g / g.norm(dim=1, keepdim=True), Local(), at)
    assert not pointwise(lambda g, y, x: g + (y * x).sum(1, keepdim=True), Local(), at)
    carried = at._replace(carry=(column, y))
    assert pointwise(lambda g, y, carry, x: (g + x, (carry[0] + 1, carry[1].add_(g))), Local(), carried)
    assert not pointwise(lambda g, y, carry, x: (g, (carry[0] + g.amax(1, keepdim=True), carry[1])), Local(), carried)


def losses(module):
    def loss(parameters, inputs, targets):
        return functional.cross_entropy(functional_call(module, parameters, (inputs,)), targets)

    return loss


def test_convolutions_by_rows_have_the_derivatives_of_ordinary_ones():
    torch.manual_seed(0)
    net = nn.Sequential(network()[:5], nn.Linear(5, 10))
    model = VectorModel(net, torch.float64)
    own = by_rows(model).module
    assert [type(layer).__name__ for layer in own.modules()].count("Convolution") == 2
    rows = {
        name: value + 0.1 * torch.randn(4, *value.shape).double() for name, value in model.module.named_parameters()
    }
    batch = (torch.randn(4, 3, 1, 8, 8).double(), torch.randint(10, (4, 3)))

    def curvature(loss):
        def slope(parameters, *batch):
            return sum((g * parameters[name].sin()).sum() for name, g in grad(loss)(parameters, *batch).items())

        return grad(slope)

    for derivative in (lambda loss: grad_and_value(loss), curvature):
        ordinary, ours = (vmap(derivative(losses(module)))(rows, *batch) for module in (model.module, own))
        torch.testing.assert_close(ours, ordinary, rtol=1e-10, atol=1e-12)


SHAPES = [  # B, I, H, O, K, stride, padding: few channels, many, odd numbers, strides
    (3, 1, 28, 32, 5, 1, 0), (10, 32, 12, 64, 5, 1, 0), (4, 3, 32, 64, 11, 4, 5), (25, 192, 2, 384, 3, 1, 1),
    (2, 10, 9, 20, 3, 1, 1), (3, 96, 7, 33, 3, 2, 1), (5, 64, 4, 17, 1, 1, 0),
]  # fmt: skip


@NO_GPU
@pytest.mark.parametrize(
    ("dtype", "exact", "tolerance"),
    [(torch.float32, True, 2e-5), (torch.float32, False, 2e-2), (torch.bfloat16, False, 5e-2)],
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clients", [1, 7])
def test_kernels_equal_float64(shape, clients, dtype, exact, tolerance, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not exact)
    torch.manual_seed(0)
    batch, before, size, after, kernel, stride, padding = shape
    layer = nn.Conv2d(before, after, kernel, stride, padding)
    own = by_rows(VectorModel(layer, dtype, "cuda")).module
    shapes = ((after, before, kernel, kernel), (after,), (batch, before, size, size))
    weight, bias, inputs = (torch.randn(clients, *shape, device="cuda").to(dtype) for shape in shapes)
    weight /= before**0.5

    def value(module):
        def function(weight, bias, inputs):
            outputs = functional_call(module, {"weight": weight, "bias": bias}, (inputs,))
            return outputs.sin().sum(), outputs

        return vmap(grad(function, argnums=(0, 1, 2), has_aux=True))

    ours = value(own)(weight, bias, inputs)
    double = layer.double().cuda()
    right = [value(double)(*(part[c : c + 1].double() for part in (weight, bias, inputs))) for c in range(clients)]
    for c in range(clients):
        for mine, theirs in zip((*ours[0], ours[1]), (*right[c][0], right[c][1])):
            assert (mine[c] - theirs[0]).norm() <= tolerance * theirs.norm()


@NO_GPU
@pytest.mark.parametrize(
    ("dtype", "exact", "tolerance"),
    [(torch.float32, True, 2e-5), (torch.float32, False, 2e-2), (torch.bfloat16, False, 5e-2)],
)
@pytest.mark.parametrize("shape", [(1, 10, 5, 784), (7, 40, 10, 33), (3, 10, 50, 300), (80, 65, 130, 200)])
@pytest.mark.parametrize(("shifted", "decay"), [(False, 0.0), (True, 0.0), (True, 0.3)])
def test_kernels_that_add_products_equal_float64(shape, shifted, decay, dtype, exact, tolerance, request):
    request.addfinalizer(partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.manual_seed(0)
    clients, after, batch, before = shape
    g, x = (torch.randn(clients, batch, size, device="cuda").to(dtype) for size in (after, before))
    y, shift = torch.randn(2, clients, after * before, device="cuda")
    lr, moved = torch.rand(clients, 1, device="cuda"), y.clone()
    torch.ops.fedstride.add_product(moved, lr, g.transpose(1, 2), x, shift if shifted else None, decay)
    gradient = (g.double().transpose(1, 2) @ x.double()).flatten(1)
    way = lr.double() * (gradient + decay * y.double() + shifted * shift.double())
    assert (moved - (y.double() - way)).norm() <= tolerance * way.norm()


@NO_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clients", [1, 7, 100])
def test_kernels_that_add_gradients_equal_those_that_write_them(shape, clients, dtype):
    torch.manual_seed(0)
    batch, before, size, after, kernel, stride, padding = shape
    x = torch.randn(clients, batch, before, size, size, device="cuda").to(dtype)
    out = (size + 2 * padding - kernel) // stride + 1
    g = torch.randn(clients, batch, after, out, out, device="cuda").to(dtype)
    y, shift = torch.randn(2, clients, after * before * kernel**2, device="cuda")
    lr, numbers = torch.rand(clients, 1, device="cuda"), (stride, padding, kernel, kernel)
    gradient, bias = torch.ops.fedstride.correlate_rows(x, g, *numbers)
    way = lr * (gradient.flatten(1).float() + 0.3 * y + shift)
    moved = y.clone()
    torch.testing.assert_close(torch.ops.fedstride.add_correlation(moved, lr, x, g, *numbers, shift, 0.3), bias)
    assert (moved - (y - way)).norm() <= (1e-6 if dtype == torch.float32 else 5e-3) * way.norm()


@NO_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(25, 384, 2, 256, 3, 1), (25, 192, 2, 384, 3, 1), (10, 32, 12, 64, 5, 0)])
def test_kernels_always_give_the_same(shape, dtype):
    """Loads that overtook products spoiled the gradient of AlexNet's fourth layer in a few clients of many."""
    torch.manual_seed(0)
    batch, before, size, after, kernel, padding = shape
    x = torch.randn(80, batch, before, size, size, device="cuda", dtype=dtype)
    w = torch.randn(80, after, before, kernel, kernel, device="cuda", dtype=dtype)
    g = torch.ops.fedstride.convolve_rows(x, w, None, 1, padding)
    first, *others = (
        (
            torch.ops.fedstride.convolve_rows(x, w, None, 1, padding),
            torch.ops.fedstride.convolve_back_rows(g, w, 1, padding, size, size),
            *torch.ops.fedstride.correlate_rows(x, g, 1, padding, kernel, kernel),
        )
        for _ in range(12)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other))


@NO_GPU
@pytest.mark.parametrize("method", ["fedavg", "fedagrac", "scaffold"])
def test_gpu_compiled_agrees_with_cpu(method, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        on = [run(method, name, device=device, dtype=dtype) for device, name in (("cpu", "vmap"), ("cuda", "compiled"))]
        torch.testing.assert_close(on[1].x.cpu(), on[0].x, rtol=tolerance, atol=tolerance)


@NO_GPU
def test_gpu_steps_recorded_in_blocks_agree_with_cpu(monkeypatch):
    """Long jobs that end anywhere in a block of recorded steps, and draws that end there."""
    clients, _ = digits()
    monkeypatch.setattr("fedstride.compiled.INDICES", 33 * 4 * len(clients))
    options = dict(steps=[1 + 17 * i % 60 for i in range(len(clients))], lr=0.02, rounds=4)
    on = [run("fedagrac", name, device=device, **options) for device, name in (("cpu", "vmap"), ("cuda", "compiled"))]
    torch.testing.assert_close(on[1].x.cpu(), on[0].x, rtol=1e-9, atol=1e-9)


@NO_GPU
def test_gpu_runs_in_halves_equal_runs_alone(monkeypatch):
    """One half works on a stream of its own while the other steps."""
    monkeypatch.setattr(fs.together.Begun, "share", lambda self: 0.0)
    (clients, _), side = digits(), fs.Together()
    options = dict(rounds=20, lr=0.1, steps=7, batch_size=4, dtype=torch.float64, device="cuda")

    def work(backend, seed):
        return partial(fs.simulate, "scaffold", network(), clients, backend=backend, seed=seed, **options)

    both = side.play([work(side, seed) for seed in range(7)]), [work("vmap", seed)() for seed in range(7)]
    for one, other in zip(*both):
        torch.testing.assert_close(one.x, other.x, rtol=1e-9, atol=1e-9)
