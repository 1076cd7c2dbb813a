"""Settings drawn at random: chunks, backends and company agree; a resumed run is the whole one, bit for bit."""

import random
from functools import partial

import pytest
import torch
from conformance import UNEVEN
from problems import OPTIONS, digits, small_network

import fedstride as fs

WAYS = ({"chunk": 2}, {"backend": "sequential"}, {"backend": "vmap"})
CLIENTS, TEST = digits()
COHORTS = [[0, 1], [2, 3], [4, 5], [1, 2], [0, 5]]


def draw(rng: random.Random) -> dict:
    """Settings that may not fit together."""
    devices, links = UNEVEN.devices, UNEVEN.links
    away = rng.choice([None, fs.availability.dropout(0.3), fs.availability.cycle(2.0, 3.0)])
    choices = {
        "lr": [0.02, [0.01, 0.05, 0.02, 0.03, 0.04, 0.02], lambda number: 0.05 / number],
        "steps": [3, [1, 6, 3, 5, 2, 4], fs.steps.gaussian(4, 4, redraw=True), fs.steps.epochs(1)],
        "batch_size": [None, 3, 5, 7],
        "sampling": ["replacement", "shuffle"],
        "participation": [
            fs.participation.uniform(3), fs.participation.uniform(4, replacement=True), fs.participation.weighted(3),
            fs.participation.bernoulli(0.5), COHORTS,
        ],
        "world": [fs.World(devices, links, away), fs.World(devices)],
        "schedule": [
            fs.schedule.Deadline(1.2), fs.schedule.Deadline(0.6, late="drop"), fs.schedule.Buffered(3, 2),
            fs.schedule.Buffered(6, 1), fs.schedule.FirstArrivals(2), fs.schedule.SendBuffers(2),
        ],
        "weights": ["data", "uniform"],
        "momentum": [0.5], "weight_decay": [0.1], "clip": [0.5],
        "guard": [fs.guards.Norms(bound=0.3), fs.guards.Norms(bound=5.0), fs.guards.Norms(times=1.5)],
        "robust": [fs.robust.Median(), fs.robust.TrimmedMean(0.2)],
        "privacy": [fs.privacy.Gaussian(clip=0.5, noise=0.5, delta=1e-5)],
        "timeline": [True], "train_loss": [True],
    }  # fmt: skip
    always, seldom = ("lr", "steps", "batch_size"), ("robust", "privacy", "guard", "momentum")
    drawn = {
        name: rng.choice(values)
        for name, values in choices.items()
        if name in always or rng.random() < (0.15 if name in seldom else 0.4)
    }
    return drawn | {"seed": rng.randrange(5)}


def fitting(name: str, rng: random.Random) -> tuple[dict, fs.Result]:
    """Settings that a method accepts, fewer and fewer of them, and what they give."""
    settings = draw(rng)
    while True:
        try:
            return settings, run(name, settings)
        except fs.FedstrideError:
            if not settings:
                raise
            del settings[rng.choice(sorted(settings))]


def run(name: str, settings: dict, rounds: int = 5, **more) -> fs.Result:
    return fs.simulate(
        fs.algorithms.make(name, **OPTIONS.get(name, {})), small_network(0.3), CLIENTS, rounds=rounds, test=TEST,
        dtype=torch.float64, device="cpu", **({"lr": 0.02} | settings | more),
    )  # fmt: skip


def run_beside(name: str, settings: dict, beside: dict) -> fs.Result:
    """The same run, its cohorts in one batch with those of another."""
    side = fs.Together(backend="vmap")
    return side.play([partial(run, name, own, backend=side) for own in (settings, beside)])[0]


def check(name: str, number: int, folder) -> None:
    rng = random.Random(f"{name} {number}")
    settings, whole = fitting(name, rng)
    for way in (*WAYS, {"beside": settings | {"lr": 0.01}}):
        other = run_beside(name, settings, **way) if "beside" in way else run(name, settings, **way)
        assert other.status == whole.status, (settings, way)
        found, wanted = (other.x, other.rows), (whole.x, whole.rows)
        torch.testing.assert_close(
            found, wanted, rtol=1e-6, atol=1e-7, equal_nan=True, msg=lambda text, way=way: f"{settings} {way}: {text}"
        )
    run(name, settings, rounds=rng.randrange(1, 5), folder=folder)
    resumed = run(name, settings, folder=folder, resume=True)
    assert torch.equal(resumed.x, whole.x) and resumed.rows == whole.rows, settings


@pytest.mark.parametrize("name", fs.algorithms.names())
def test_any_settings_together(name, tmp_path):
    check(name, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", fs.algorithms.names())
@pytest.mark.parametrize("number", range(1, 9))
def test_many_settings_together(name, number, tmp_path):
    check(name, number, tmp_path)
