"""Runs whose cohorts train as one: each gives what it gives alone."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from problems import digits
from torch import nn

import fedstride as fs
from fedstride import checkpoint, study, together
from fedstride.compiled import Compiled
from fedstride.vector import VectorModel

OPTIONS = dict(batch_size=4, dtype=torch.float64, rounds=3, lr=0.1, steps=[1, 4, 2, 5, 3, 1])


def runs(clients, test):
    """Methods that step alike, and one that does not; other seeds, rates, steps, lengths and partitions."""
    model = partial(fs.models.make, "mlp")
    turned = fs.Clients(clients.inputs, clients.targets, clients.order.flip(0), clients.sizes[::-1].copy())
    return [
        partial(fs.simulate, "fedavg", model(), clients, test=test, **OPTIONS),
        partial(fs.simulate, "fedavg", model(seed=5), turned, **OPTIONS | dict(seed=3, lr=0.02, rounds=5)),
        partial(
            fs.simulate,
            "fedavgm",
            model(),
            clients,
            **OPTIONS | dict(steps=7, seed=1, participation=fs.participation.uniform(3)),
        ),
        partial(fs.simulate, "fedprox", model(), clients, **OPTIONS),
        partial(fs.simulate, "fedprox", model(seed=2), clients, **OPTIONS | dict(seed=9)),
        partial(fs.simulate, "fedavg", model(), clients, **OPTIONS | dict(batch_size=None)),
    ]


@pytest.mark.parametrize(("share", "turns"), [(1.0, [5, 5, 5, 1, 1]), (0.5, [5, 5, 3, 2, 1, 1])])
def test_runs_together_equal_runs_alone(monkeypatch, share, turns):
    """All at a time, or in halves where the runs' own work takes long."""
    monkeypatch.setattr(fs.together.Begun, "share", lambda self: share)
    clients, test = digits()
    works = runs(clients, test)
    together, batches, begun = fs.Together(backend="compiled"), [], []
    steps = together._descend
    monkeypatch.setattr(together, "_descend", lambda waiting: begun.append(len(waiting)) or steps(waiting))
    ordinary = fs.together.Compiled.descend_all
    monkeypatch.setattr(
        fs.together.Compiled, "descend_all", lambda self, ask: batches.append(len(ask)) or ordinary(self, ask)
    )
    found = together.play([partial(work, backend=together) for work in works])
    for result, work in zip(found, works):
        alone = work(backend="vmap")
        torch.testing.assert_close(result.x, alone.x, rtol=1e-9, atol=1e-11)
        for row, other in zip(result.rows, alone.rows):
            assert row == pytest.approx(other, rel=1e-8)
        assert len(result.rows) == len(alone.rows)
    assert max(batches) == 3  # the three that step alike, in one batch
    assert begun == turns


@pytest.fixture
def traced(monkeypatch):
    """Programs run as they were traced, which is quicker than to compile them."""
    monkeypatch.setattr(torch, "compile", lambda function, options: function)


def test_runs_that_compute_in_different_types_do_not_share_a_program(traced):
    clients, _ = digits()
    works = [
        partial(fs.simulate, "fedavg", fs.models.make("mlp"), clients, **OPTIONS | dict(dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    side = fs.Together(backend="compiled")
    found = side.play([partial(work, backend=side) for work in works])
    assert (found[0].x - found[1].x).abs().max() > 1e-4
    for result, work in zip(found, works):
        torch.testing.assert_close(result.x, work(backend="compiled").x, rtol=0, atol=1e-6)


class Scaled(nn.Module):
    """A layer whose factor is a buffer, a number or a function: nothing that its parameters tell."""

    def __init__(self, kind, factor):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        if kind == "buffer":
            self.register_buffer("factor", torch.tensor(factor))
        else:
            self._own = factor if kind == "number" else lambda: factor

    def forward(self, inputs):
        factor = self.factor if hasattr(self, "factor") else self._own
        factor = factor() if callable(factor) else factor
        return factor * self.inner(inputs)


def dropping(rate):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Dropout(rate), nn.Linear(20, 10))


def base(seed):
    """A first layer that is not trained."""
    model = dropping(0.0)
    torch.manual_seed(seed)
    nn.init.normal_(model[1].weight).requires_grad_(False)
    return model


NETWORKS = {
    "dropout": (dropping, 0.1, 0.9), "frozen": (base, 0, 1), "buffer": (partial(Scaled, "buffer"), 1.0, 0.1),
    "number": (partial(Scaled, "number"), 1.0, 0.1), "function": (partial(Scaled, "function"), 1.0, 0.1),
}  # fmt: skip


@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_that_only_their_settings_tell_apart(kind, traced):
    clients, _ = digits()
    build, *settings = NETWORKS[kind]
    works = [partial(fs.simulate, "fedavg", build(setting), clients, **OPTIONS) for setting in settings]
    side = fs.Together(backend="compiled")
    found = side.play([partial(work, backend=side) for work in works])
    assert (found[0].x - found[1].x).abs().max() > 1e-3
    for result, work in zip(found, works):
        torch.testing.assert_close(result.x, work(backend="sequential").x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["dropout", "frozen", "buffer", "number"])
def test_networks_that_are_alike_share_programs(kind):
    build, setting, _ = NETWORKS[kind]
    side, loss = fs.Together(backend="compiled"), fs.losses.cross_entropy
    for _ in range(2):
        side.oracle(Compiled(VectorModel(build(setting), torch.float32), loss, None))
    assert len(side._oracles) == 1


@pytest.fixture
def uncompiled(monkeypatch):
    """They wait for each other, and then everybody does its steps alone."""
    monkeypatch.setattr(fs.together.Compiled, "descend_all", lambda self, requests: False)


def test_an_error_of_one_run_lets_the_others_end(uncompiled):
    clients, _ = digits()
    together, ended = fs.Together(backend="compiled"), []

    def fails(row):
        raise ValueError("enough")

    def good():
        ended.append(fs.simulate("fedavg", fs.models.make("mlp"), clients, backend=together, **OPTIONS))

    bad = partial(fs.simulate, "fedavg", fs.models.make("mlp"), clients, backend=together, progress=fails, **OPTIONS)
    with pytest.raises(ValueError, match="enough"):
        together.play([bad, good])
    assert len(ended[0].rows) == 3


def test_checkpoints_of_runs_side_by_side_share_their_budget(monkeypatch, tmp_path, uncompiled):
    """While one run writes, the others wait: five per cent of each would be twenty of four (here twenty and 45)."""
    clients, _ = digits()
    now, writing, whole = [0.0], [0.0], checkpoint.write_whole

    def write(path, data):
        whole(path, data)
        if path.suffix == ".safetensors":
            now[0] += 1
            writing[0] += 1

    def progress(row):
        now[0] += 0.25  # a second for a round of all four

    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(checkpoint, "write_whole", write)
    monkeypatch.setattr(checkpoint, "BUDGET", 5)
    options = OPTIONS | dict(rounds=60, steps=1, batch_size=1, every=60, progress=progress)
    side = fs.Together(backend="compiled")
    side.play([
        partial(fs.simulate, "fedavg", fs.models.make("mlp"), clients, backend=side, folder=tmp_path / name, **options)
        for name in "abcd"
    ])  # fmt: skip
    again = writing[0] - 8  # every run writes one in its first round and one at its end
    assert 0.1 < again / now[0] < 0.2


def test_large_groups_are_cut():
    class Ask:
        def __init__(self, rows):
            self.keys = [0] * rows

    group = [together.Waiting(None, Ask(rows), (), None, []) for rows in (3, 3, 3, 9, 1)]
    parts = fs.Together._parts(group, 6)
    assert [[len(one.request.keys) for one in part] for part in parts] == [[3, 3], [3], [9], [1]]


def test_a_study_does_its_runs_together(tmp_path, monkeypatch, uncompiled):
    planned = study.Study({"rounds": 2, "partition": {"name": "iid", "clients": 4}}, methods=["fedavg"], seeds=3)
    monkeypatch.setattr(study, "able", lambda experiment: False)
    alone = planned.play(tmp_path / "alone")
    monkeypatch.setattr(study, "able", lambda experiment: True)
    joint = planned.play(tmp_path / "together")
    assert list(joint) == list(alone)
    for one, other in zip(joint["fedavg"], alone["fedavg"]):
        assert one.seed == other.seed
        for row, like in zip(one.rows, other.rows):
            assert row == pytest.approx(like, rel=1e-4)


@pytest.mark.parametrize(
    "clients, participation, number",
    [(4, None, 16), (20, None, 13), (100, {"name": "uniform", "n": 10}, 16), (300, None, 1)],
)
def test_so_many_runs_as_fill_a_batch(clients, participation, number, monkeypatch):
    monkeypatch.setattr(together.inputs, "device", lambda name: torch.device("cuda"))
    run = fs.Experiment(partition={"name": "iid", "clients": clients}, participation=participation)
    assert together.several([run, run]) == number


@pytest.mark.parametrize(
    "clients, hidden, batch, number",
    [(10, 50, 32, 16), (50, 50, 32, 16), (51, 50, 32, 1), (10, 1000, 32, 5), (10, 40_000, 32, 1), (10, 50, 8192, 1)],
)
def test_so_many_runs_as_a_cpu_keeps_the_memory_of(clients, hidden, batch, number):
    """The model has 75 numbers for every hidden unit, an example 64."""
    model = {"name": "mlp", "hidden": hidden}
    run = fs.Experiment(partition={"name": "iid", "clients": clients}, model=model, batch_size=batch, device="cpu")
    assert together.able(run) == (number > 1)
    assert number == 1 or together.several([run, run]) == number


@pytest.mark.parametrize(
    "changes, gains",
    [({}, True), ({"model": "cnn"}, False), ({"backend": "sequential"}, False), ({"backend": "vmap"}, True)],
)
def test_runs_that_gain_by_others(changes, gains):
    """Networks with convolutions train client by client on a CPU, alone as well as beside others."""
    assert together.able(fs.Experiment(device="cpu", **changes)) == gains
