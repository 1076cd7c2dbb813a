"""Runs side by side on a CPU: each gives what it gives alone, whatever is beside it."""

import dataclasses
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from problems import digits
from torch import nn

import fedstride as fs
from fedstride import study
from fedstride.algorithm import Algorithm, Delta, Params
from fedstride.joint import Several

OPTIONS = dict(batch_size=4, dtype=torch.float64, rounds=3, lr=0.1, steps=[1, 4, 2, 5, 3, 1], device="cpu")


def sizes_of_batches(monkeypatch) -> list[int]:
    """How many runs were in each batch, as it goes on."""
    found, ordinary = [], Several.descend_all
    monkeypatch.setattr(
        Several, "descend_all", lambda self, requests: found.append(len(requests)) or ordinary(self, requests)
    )
    return found


def check(works, tolerance=1e-10) -> None:
    side = fs.Together()
    beside = side.play([partial(work, backend=side) for work in works])
    for work, result in zip(works, beside):
        torch.testing.assert_close(result.x, work().x, rtol=tolerance, atol=tolerance)


def simulated(method="fedavg", clients=None, **changes):
    return partial(fs.simulate, method, fs.models.make("mlp"), clients or digits()[0], **OPTIONS | changes)


@dataclasses.dataclass(frozen=True)
class Pulled(Algorithm):
    """Steps towards the start, told in one of several ways."""

    displacements = True
    way: str = "bound"
    mu: float = 0.1

    def pull(self, g, y, x):
        return g + self.mu * (y - x)

    def client(self, work, msg, memory):
        def named(g, y, x, *, mu=self.mu):
            return g + mu * (y - x)

        ways = {
            "bound": self.pull,
            "closed": lambda g, y, x: g + self.mu * (y - x),
            "named": named,
            "partial": partial(lambda mu, g, y, x: g + mu * (y - x), self.mu),
        }
        return Delta(work.descend(msg.x, ways[self.way], rows=(msg.x,)) - msg.x), memory

    def server(self, state, replies):
        return Params(state.x + replies.mean("dx"))


@pytest.mark.parametrize("way", ["bound", "closed", "named", "partial"])
def test_directions_that_look_alike(way):
    clients, _ = digits()
    check([simulated(Pulled(way, mu), clients) for mu in (0.1, 5.0)])


@pytest.mark.parametrize("part", [slice(None, None, 2), slice(0, 24)], ids=["every second", "the first"])
def test_tables_that_begin_at_the_same_place(part):
    clients, _ = digits()
    inputs, targets = clients.inputs.float(), clients.targets
    fleets = [
        fs.Clients(a, b, torch.arange(24), [4] * 6) for a, b in ((inputs[part], targets[part]), (inputs, targets))
    ]
    check([simulated(clients=fleet, dtype=torch.float32) for fleet in fleets], tolerance=1e-5)


def test_examples_that_nobody_holds():
    clients, _ = digits()
    order = torch.randperm(len(clients.inputs), generator=torch.Generator().manual_seed(1))
    few = fs.Clients(clients.inputs, clients.targets, order, [4] * 6)
    check([simulated(clients=few, seed=seed) for seed in (0, 1)])


@pytest.mark.parametrize("settings", [dict(sampling="shuffle"), dict(batch_size=None)])
def test_labels_that_only_one_of_them_ignores(settings):
    clients, _ = digits()
    targets = clients.targets.clone()
    targets[::5] = -1
    other = fs.Clients(clients.inputs, targets, clients.order, clients.sizes)
    loss = nn.CrossEntropyLoss(ignore_index=-1)
    check([simulated(clients=given, loss=loss, **settings) for given in (clients, other)])


@dataclasses.dataclass
class Scaled:
    """An augmentation, or a loss, that cannot be hashed."""

    by: float

    def __call__(self, inputs, keys_or_targets):
        if keys_or_targets.dtype == torch.int64 and inputs.dim() > 2:
            return inputs * self.by
        return self.by * fs.losses.cross_entropy(inputs, keys_or_targets)


@pytest.mark.parametrize("slot", ["augment", "loss"])
def test_settings_that_cannot_be_hashed(slot):
    clients, _ = digits()
    check([simulated(clients=clients, **{slot: Scaled(by)}) for by in (0.5, 1.0)])


def test_an_error_in_the_steps_reaches_all_and_nobody_waits(monkeypatch):
    def fails(self, group, rows):
        raise MemoryError("none left")

    monkeypatch.setattr(fs.Together, "_parts", fails)
    side = fs.Together()
    with pytest.raises(MemoryError, match="none left"):
        side.play([simulated(backend=side, seed=seed) for seed in (0, 1)])


def test_an_interrupt_ends_all_runs():
    side, rows, before = fs.Together(), [], threading.active_count()
    joined = threading.Thread.join

    def interrupted(self, *timeout):
        if rows_wanted():
            threading.Thread.join = joined
            raise KeyboardInterrupt
        return joined(self, *timeout)

    def rows_wanted():
        while len(rows) < 5:
            time.sleep(0.01)
        return True

    threading.Thread.join = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            side.play([simulated(backend=side, seed=seed, rounds=100_000, progress=rows.append) for seed in (0, 1)])
    finally:
        threading.Thread.join = joined
    seen = len(rows)
    time.sleep(0.2)
    assert len(rows) == seen < 2000
    assert threading.active_count() <= before + 1  # the one that does the steps may be about to end


SMALL = {"rounds": 3, "steps": 2, "partition": {"name": "iid", "clients": 4}, "device": "cpu"}


def test_a_study_begins_no_new_run_after_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "several", lambda experiments: 2)
    planned, begun = study.Study(SMALL, methods=["fedavg"], seeds=6), set()

    def watch(plan, row):
        begun.add(plan.experiment.seed)
        if plan.experiment.seed == 0:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        planned.play(tmp_path, watch=watch)
    assert begun == {0, 1}


def test_a_study_of_seeds_is_one_batch(tmp_path, monkeypatch):
    batches = sizes_of_batches(monkeypatch)
    study.Study(SMALL, methods=["fedavg"], seeds=3).play(tmp_path)
    assert batches == [3] * 3


@pytest.mark.parametrize(
    "changes",
    [{"data": {"name": "synthetic", "clients": 4, "alpha": 1, "beta": 1}}, {"chunk": 1}],
    ids=["examples of their own", "a chunk that is told"],
)
def test_runs_that_stay_alone(changes):
    assert not fs.together.able(fs.Experiment.parse(SMALL | changes))


def test_only_the_partition_of_the_seed_is_drawn():
    """Others may be impossible."""
    partition = {"name": "dirichlet", "clients": 95, "alpha": 0.115, "minimum": 2}
    seeds = []
    for seed in range(8):
        run = fs.Experiment(partition=partition, seed=seed, device="cpu")
        try:
            run.prepare()
        except fs.FedstrideError:
            continue
        seeds.append(seed)
        fs.together.NETWORKS.clear()
        fs.together.able(run)
    assert seeds and len(seeds) < 8


def test_its_own_backend_is_kept():
    side = fs.Together()
    run = fs.Experiment.parse(SMALL | {"backend": "sequential"})
    assert side.play([partial(run.run, together=side)])[0].backend == "sequential"


def test_bytes_of_a_batch_whose_size_is_not_known():
    clients, _ = digits()
    replay = fs.sampling.Sampler(clients, 10, lambda client, round, step: [0])
    plain = fs.sampling.Sampler(clients, 10, "replacement")
    assert (replay.bytes, plain.bytes) == (0, 10 * 64 * np.dtype(np.float32).itemsize)
