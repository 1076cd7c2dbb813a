"""Steps that write no gradients, equal to steps along gradients."""

import pytest
import torch
from problems import digits
from torch import nn

import fedstride as fs
from fedstride.descent import Local, Moving
from fedstride.oracle import Batch, make
from fedstride.tracing import moving_step
from fedstride.vector import VectorModel


class Products(nn.Module):
    """Matrices used as they are, transposed, and as factors of each other; and a number."""

    def __init__(self, chained: bool = False):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.chained = chained

    def forward(self, inputs):
        inputs = inputs.flatten(1)[:, :6]
        if self.chained:
            return self.scale * (inputs @ (self.first @ self.second.t()))
        return self.scale * (inputs @ self.first).relu() @ self.second.t()


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def deep():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7, bias=False), nn.Tanh(), nn.Dropout(0.4), nn.Linear(7, 3))


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


CASES = [(linear, 1), (deep, 2), (convolutional, 1), (Products, 2), (lambda: Products(chained=True), None)]


def drift(g, y, own, one, column):
    """What methods add to a gradient: a vector of each client, one that all share, a number of each, and y itself."""
    return g + own - 0.5 * (y - one) + column * y


DIRECTIONS = [(None, 0), (drift, 3), (lambda g, y, *rows: -g, 0), (lambda g, y, own, *rows: g * own, 0)]


def on_its_way(model, clients):
    """Clients anywhere near the model, and what a direction may read of them."""
    size = len(model.x)
    y = model.x + 0.1 * torch.randn(clients, size, dtype=torch.float64)
    own, one, column = (torch.randn(shape, dtype=torch.float64) for shape in ((size, clients), (1, size), (clients, 1)))
    return Moving(y, y.new_zeros(clients, 1), y.new_zeros(clients), y.new_zeros(clients), (own.t(), one, column))


@pytest.mark.parametrize(("direction", "added"), DIRECTIONS)
@pytest.mark.parametrize(("network", "products"), CASES)
def test_a_step_equals_one_along_the_gradient(network, products, direction, added):
    """One trace for every number of clients; `products` of its gradients are never written down."""
    torch.manual_seed(0)
    model = VectorModel(network(), torch.float64)
    oracle = make("vmap", model, fs.losses.cross_entropy, (fs.losses.cross_entropy.each, "mean"))
    at = on_its_way(model, 5)
    if direction is None:
        at = at._replace(rows=())
    expected, held = at.y.clone(), oracle.hold(at, direction, Local(), 10**9)
    for count in (5, 4, 1, 1):
        batch = Batch(
            torch.randn(count, 8, 1, 8, 8, dtype=torch.float64),
            torch.randint(3, (count, 8)),
            torch.rand(count, 8, dtype=torch.float64) if direction is drift else None,
            torch.arange(count) if model.dropouts else None,
        )
        lr = 0.1 * torch.rand(count, 1, dtype=torch.float64)
        (loss,) = held.step(lr, batch)
        right, g = oracle(expected[:count], batch)
        rows = [row[:count] if len(row) == 5 else row for row in at.rows]
        expected[:count] -= lr * (g if direction is None else direction(g, expected[:count], *rows))
        torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-12)
    held.give()
    torch.testing.assert_close(at.y, expected, rtol=1e-12, atol=1e-12)
    ((step,),) = (found.values() for found in oracle._steps.values())
    if products is None and direction in (None, drift):  # a factor is a view of another parameter, which moves too
        assert step is None
    elif direction in (None, drift):
        code = step.__self__.code
        assert code.count("baddbmm_.default(") == products
        assert code.count("addcmul_.default(") == products * added + len(model.sizes) - products


def test_a_direction_that_looks_at_whole_vectors_is_not_cut():
    model = VectorModel(linear(), torch.float64)
    oracle = make("vmap", model, fs.losses.cross_entropy, None)
    at = on_its_way(model, 2)
    assert oracle.hold(at, drift, Local(), 10**9) is not None
    assert oracle.hold(at, drift, Local(), 3) is None  # too short for tracing to pay
    assert oracle.hold(at, lambda g, y, *rows: g / g.norm(dim=1, keepdim=True), Local(), 10**9) is None
    assert oracle.hold(at, lambda g, y, *rows: g if float(g.sum()) > 0 else -g, Local(), 10**9) is None
    assert oracle.hold(at, lambda g, y, *rows: g + at.y, Local(), 10**9) is None  # it closes over what may change
    owner = nn.Linear(1, 1)
    assert oracle.hold(at, lambda g, y, *rows: g + owner.bias, Local(), 10**9) is None


@pytest.mark.parametrize("method", ["fedavg", "fedbuff", "scaffold", "fedprox", "feddyn"])
def test_whole_runs_agree_with_clients_one_by_one(method, monkeypatch):
    """Long jobs of unequal length; a fleet that differs in speed starts from several models at once."""
    traced = []
    monkeypatch.setattr("fedstride.oracle.PLAIN", 10_000)
    monkeypatch.setattr("fedstride.parts.moving_step", lambda *given: traced.append(moving_step(*given)) or traced[-1])
    clients, _ = digits()
    options = dict(rounds=3, lr=0.05, steps=[60 - 7 * i for i in range(len(clients))], batch_size=5)
    options |= dict(dtype=torch.float64, world=fs.World(devices=[0.1 + 0.07 * i for i in range(len(clients))]))
    one, other = (
        fs.simulate(method, fs.models.make("mlp"), clients, backend=backend, **options)
        for backend in ("sequential", "vmap")
    )
    assert len(traced) == 1 and traced[0] is not None
    torch.testing.assert_close(one.x, other.x, rtol=1e-10, atol=1e-12)
    assert one.rows == [pytest.approx(row, rel=1e-9) for row in other.rows]


def test_a_step_that_looks_at_values_is_not_traced():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 3)

        def forward(self, inputs):
            outputs = self.layer(inputs.flatten(1))
            return outputs if float(outputs.detach().sum()) > 0 else -outputs

    model = VectorModel(Branches(), torch.float64)
    oracle = make("vmap", model, fs.losses.cross_entropy, None)
    batch = Batch(torch.randn(2, 4, 1, 8, 8, dtype=torch.float64), torch.randint(3, (2, 4)))
    at = on_its_way(model, 2)._replace(rows=())
    held, lr = oracle.hold(at, None, Local(), 10**9), torch.ones(2, 1, dtype=torch.float64)
    assert held._traced(held._parts, lr, [], batch) is None
