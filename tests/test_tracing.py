"""Plain steps that write no gradients, equal to steps along gradients."""

import pytest
import torch
from problems import digits
from torch import nn

import fedstride as fs
from fedstride.oracle import Batch, make
from fedstride.tracing import plain_step
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


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("network", "products"), CASES)
def test_a_plain_step_equals_a_step_along_the_gradient(network, products, weighted):
    """One trace for every number of clients; `products` of its gradients are never written down."""
    torch.manual_seed(0)
    model = VectorModel(network(), torch.float64)
    oracle = make("vmap", model, fs.losses.cross_entropy, (fs.losses.cross_entropy.each, "mean"))
    y = model.x + 0.1 * torch.randn(5, len(model.x), dtype=torch.float64)
    expected, held = y.clone(), oracle.take(y, 10**9)
    for count in (5, 4, 1, 1):
        batch = Batch(
            torch.randn(count, 8, 1, 8, 8, dtype=torch.float64),
            torch.randint(3, (count, 8)),
            torch.rand(count, 8, dtype=torch.float64) if weighted else None,
            torch.arange(count) if model.dropouts else None,
        )
        lr = torch.rand(count, 1, dtype=torch.float64)
        (loss,) = oracle.step(held, lr, batch)
        right, g = oracle(expected[:count], batch)
        expected[:count] -= lr * g
        torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-12)
    oracle.give(held, y)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    (step,) = oracle._steps.values()
    if products is None:  # a factor is a view of another parameter, which moves too
        assert step is None
    else:
        assert step.__self__.code.count("baddbmm_.default(") == products


@pytest.mark.parametrize("method", ["fedavg", "fedbuff"])
def test_whole_runs_agree_with_clients_one_by_one(method, monkeypatch):
    """Long jobs of unequal length; a fleet that differs in speed starts from several models at once."""
    traced = []
    monkeypatch.setattr("fedstride.oracle.PLAIN", 10_000)
    monkeypatch.setattr("fedstride.oracle.plain_step", lambda *given: traced.append(plain_step(*given)) or traced[-1])
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
    held, lr = oracle.take(model.x.repeat(2, 1), 10**9), torch.ones(2, 1, dtype=torch.float64)
    assert oracle._plain_step(held, lr, batch) is None


def test_losses_of_plain_steps_are_those_of_steps_with_a_direction():
    clients, _ = digits()
    options = dict(rounds=2, lr=0.05, steps=4, batch_size=5, dtype=torch.float64)
    methods = ("fedavg", fs.algorithms.make("fedprox", mu=0.0))
    one, other = (fs.simulate(method, fs.models.make("mlp"), clients, **options) for method in methods)
    assert [row["local_loss"] for row in one.rows] == pytest.approx([row["local_loss"] for row in other.rows])
