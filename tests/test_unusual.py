"""Models, methods and data that few people have: side by side, in long jobs, by every backend the same."""

import types
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstride as fs
from fedstride.algorithm import Algorithm, Delta, Params
from fedstride.oracle import Vmap
from fedstride.vector import VectorModel

OPTIONS = dict(batch_size=4, dtype=torch.float64, rounds=2, lr=0.05, steps=[1, 4, 2, 5, 3, 1], device="cpu")
LONG = OPTIONS | dict(steps=100, rounds=1)  # jobs whose steps are traced


def fleet(shape=(8,), scale=1.0):
    rng = np.random.default_rng(0)
    pairs = [(scale * rng.normal(size=(12 + i, *shape)), rng.integers(0, 3, 12 + i)) for i in range(6)]
    return fs.Clients.from_arrays([(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs])


def made(build, *arguments):
    torch.manual_seed(0)
    return build(*arguments).double()


def assert_same(one, two):
    torch.testing.assert_close(one.x, two.x, rtol=1e-9, atol=1e-11)


class Shared(nn.Module):
    """A block that is used several times."""

    def __init__(self, depth):
        super().__init__()
        block = nn.Linear(8, 8)
        self.blocks, self.last = nn.ModuleList([block] * depth), nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


class Tied(nn.Module):
    """Two layers have one bias, and which they are may differ."""

    def __init__(self, which):
        super().__init__()
        self.layers, self.last = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]), nn.Linear(8, 3)
        self.layers[which].bias = self.layers[0].bias
        self.layers[3 - which].bias = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def hooked(function):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    model[0].register_forward_hook(lambda module, inputs, output: function(output))
    return model


class Scaled(nn.Module):
    """A tensor among its settings, which is no buffer."""

    def __init__(self, factors):
        super().__init__()
        self.layer, self.factors = nn.Linear(8, 3), factors

    def forward(self, x):
        return self.layer(x) * self.factors.sum(0)


@pytest.mark.parametrize(
    ("build", "one", "other"),
    [
        (Shared, 1, 4), (Tied, 1, 2), (hooked, torch.tanh, torch.relu),
        (Scaled, torch.arange(6.0).view(2, 3), torch.arange(6.0).view(6, 1)),
    ],
    ids=["depth", "ties", "hooks", "shape"],
)  # fmt: skip
def test_networks_that_look_alike_do_not_train_as_one(build, one, other, tmp_path):
    clients, side = fleet(), fs.Together()
    works = [partial(fs.simulate, "fedavg", made(build, which), clients, **OPTIONS) for which in (one, other)]
    alone = [work(backend="vmap") for work in works]
    for result, expected in zip(side.play([partial(work, backend=side) for work in works]), alone):
        assert_same(result, expected)
    assert (alone[0].x[:20] - alone[1].x[:20]).abs().max() > 1e-4
    if build is not hooked:  # two unnamed functions look alike on disk
        works[0](folder=tmp_path)
        with pytest.raises(fs.FedstrideError, match=str(tmp_path)):
            works[1](folder=tmp_path, resume=True, rounds=4)


class Bits(nn.Module):
    """Numbers of thirteen bits, brought to one: 8191 is a prime."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 400), nn.Linear(400, 3)

    def forward(self, x):
        return self.last((self.first(x) * 8191 / 8209).tanh())


class Attention(nn.Module):
    """Torch's has no rule for being batched."""

    def __init__(self):
        super().__init__()
        self.mixed, self.wide, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(8, 1200), None
        self.last = nn.Linear(1200, 3)

    def forward(self, x):
        h = x.view(-1, 2, 4)
        return self.last(self.wide((h + self.mixed(h, h, h, need_weights=False)[0]).flatten(1)).tanh())


class Hollow(nn.Module):
    """A parameter without numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.empty = nn.Linear(8, 400), nn.Linear(400, 3), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.last(self.first(x).tanh()) + self.empty.sum()


class Strided(nn.Module):
    """It says itself how images lie in memory."""

    def __init__(self):
        super().__init__()
        self.convolution, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(64, 3)

    def forward(self, x):
        made = self.convolution(x).tanh()
        patches = made.as_strided((len(made), 4, 4, 4, 2, 2), (256, 64, 16, 2, 8, 1))
        return self.last(patches.amax((-1, -2)).flatten(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("build", [Bits, Attention, Hollow])
def test_long_jobs_of_unusual_models(build):
    results = [fs.simulate("fedavg", made(build), fleet(), backend=kind, **LONG) for kind in ("vmap", "sequential")]
    assert_same(*results)


def test_models_that_say_how_images_lie_get_them_so():
    network = made(Strided)
    images = fleet((2, 8, 8)).inputs[:5]
    model = VectorModel(network, torch.float64)
    outputs = model.probe(images)
    torch.testing.assert_close(model.predict(model.x, images), outputs.detach())


@dataclass(frozen=True)
class Pulled(Algorithm):
    """A pull that shrinks with the number of parameters."""

    def client(self, work, msg, memory):
        y = work.descend(msg.x, lambda g, y, x: g + 10 / y.shape[1] * (y - x), rows=(msg.x,))
        return Delta(y - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + replies.mean("dx"))


def test_directions_may_ask_how_many_parameters_there_are():
    network = made(lambda: nn.Sequential(nn.Linear(8, 400), nn.Tanh(), nn.Linear(400, 3)))
    assert_same(*(fs.simulate(Pulled(), network, fleet(), backend=kind, **LONG) for kind in ("vmap", "sequential")))


@dataclass(frozen=True)
class History(Algorithm):
    """y <- y - lr (g + the gradient of two steps ago / 2)."""

    newest_first: bool = False
    twice: bool = False  # one tensor for both

    def client(self, work, msg, memory):
        def newest_first(g, y, carry):
            last, before = carry
            return g + 0.5 * before, (g, last)

        def newest_last(g, y, carry):
            before, last = carry
            return g + 0.5 * before, (last, g)

        zeros = work.zeros(msg.x)
        carry = (zeros, zeros if self.twice else work.zeros(msg.x))
        y, _ = work.descend(msg.x, newest_first if self.newest_first else newest_last, carry=carry)
        assert not zeros.any()  # the caller's own is not written over
        return Delta(y - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + replies.mean("dx"))


@pytest.mark.parametrize("kind", ["vmap", "sequential"])
def test_what_is_handed_on_may_change_places(kind):
    network, settings = made(nn.Linear, 8, 3), OPTIONS | dict(steps=6, backend=kind)
    expected = fs.simulate(History(), network, fleet(), **settings)
    for method in (History(newest_first=True), History(twice=True), History(newest_first=True, twice=True)):
        assert_same(fs.simulate(method, network, fleet(), **settings), expected)


class Sum(NamedTuple):
    c: Tensor


@dataclass(frozen=True)
class Summing(Algorithm):
    """Clients remember the sum of their gradients and send by how much it grew."""

    def init_client(self, x):
        return Sum(torch.zeros_like(x))

    def client(self, work, msg, memory):
        _, c = work.descend(msg.x, lambda g, y, c: (g, c + g), carry=memory.c)
        return Delta(c - memory.c), Sum(c)

    def server(self, state, replies):
        return Params(state.x - replies.mean("dx"))


def test_memory_may_be_handed_on():
    result = fs.simulate(Summing(), made(nn.Linear, 8, 3), fleet(), **OPTIONS)
    start = torch.cat([p.detach().flatten() for p in made(nn.Linear, 8, 3).parameters()])
    assert (result.x - start).abs().max() > 1e-3


TEXT = """
from fedstride.algorithm import Algorithm, Delta, Params
from dataclasses import dataclass

MU = {}

def pull(g, y, x):
    return g + MU * (y - x)

@dataclass(frozen=True)
class Pull(Algorithm):
    def client(self, work, msg, memory):
        return Delta(work.descend(msg.x, pull, rows=(msg.x,)) - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + replies.mean("dx"))
"""


def test_two_files_that_differ_in_a_constant_do_not_train_as_one(monkeypatch):
    methods = []
    for mu in (0.1, 5.0):
        module = types.ModuleType(f"pull_{int(mu)}")
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
        exec(compile(TEXT.format(mu), "pull.py", "exec"), module.__dict__)
        methods.append(module.Pull())
    clients, side = fleet(), fs.Together()
    works = [partial(fs.simulate, method, made(nn.Linear, 8, 3), clients, **OPTIONS) for method in methods]
    for result, work in zip(side.play([partial(work, backend=side) for work in works]), works):
        assert_same(result, work(backend="vmap"))


class Root(nn.Module):
    """Has no output where its matrix is not positive definite."""

    def __init__(self):
        super().__init__()
        self.matrix, self.last = nn.Parameter(2 * torch.eye(8)), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(x @ torch.linalg.cholesky(self.matrix @ self.matrix.T - torch.eye(8, dtype=x.dtype)))


def test_a_run_that_fails_leaves_its_neighbour_alone():
    clients, side, ended = fleet(), fs.Together(backend="vmap"), {}

    def run(lr):
        ended[lr] = fs.simulate("fedavg", made(Root), clients, backend=side, **OPTIONS | dict(lr=lr, rounds=4))

    with pytest.raises(RuntimeError, match="not positive-definite"):
        side.play([partial(run, lr) for lr in (0.05, 30.0)])
    alone = fs.simulate("fedavg", made(Root), fleet(), backend="vmap", **OPTIONS | dict(rounds=4))
    assert list(ended) == [0.05]
    assert_same(ended[0.05], alone)


@dataclass(frozen=True)
class Drifting(Algorithm):
    """A number that is another one every round."""

    def client(self, work, msg, memory):
        mu = 1 / int(work.round[0])
        return Delta(work.descend(msg.x, lambda g, y, x: g + mu * (y - x), rows=(msg.x,)) - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + replies.mean("dx"))


def test_numbers_that_change_every_round_do_not_fill_the_memory(monkeypatch):
    kept = []
    hold = Vmap.hold
    monkeypatch.setattr("fedstride.oracle.TRACES", 3)
    monkeypatch.setattr("fedstride.oracle.PLAIN", 1)
    monkeypatch.setattr(Vmap, "hold", lambda self, *given: (kept.append(len(self._steps)), hold(self, *given))[1])
    settings = OPTIONS | dict(rounds=8)
    result = fs.simulate(Drifting(), made(nn.Linear, 8, 3), fleet(), backend="vmap", **settings)
    assert max(kept) == 3
    assert_same(result, fs.simulate(Drifting(), made(nn.Linear, 8, 3), fleet(), backend="sequential", **settings))


def test_data_that_change_between_runs_are_read_anew():
    clients, settings = fleet(), OPTIONS | dict(dtype=torch.float32, batch_size=None)
    network = nn.Linear(8, 3)
    before = fs.simulate("fedavg", network, clients, **settings)
    clients.inputs.mul_(3)
    after = fs.simulate("fedavg", network, clients, **settings)
    fresh = fs.simulate("fedavg", network, fleet(scale=3.0), **settings)
    assert torch.equal(after.x, fresh.x) and not torch.equal(after.x, before.x)


def test_autocast_is_refused_since_not_all_threads_have_it():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fs.FedstrideError, match="dtype=torch.bfloat16"):
        fs.simulate("fedavg", made(nn.Linear, 8, 3), fleet(), **OPTIONS)
