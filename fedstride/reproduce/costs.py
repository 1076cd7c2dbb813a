"""What an item will cost, roughly: the arithmetic of all examples over what machines like these did.

The rates are those this project reached with the papers' networks (docs/performance.md), the other numbers are fitted
to stored results. A run that stops at its target ends earlier. Good to a factor of two or three.
"""

import math
from functools import cache

import torch

from fedstride import devices, models
from fedstride.choices import FLEETS, Choice, build
from fedstride.experiment import Experiment
from fedstride.reproduce.items import Item
from fedstride.reproduce.store import points

RATES = {"cpu": 25e9, "cuda": 1e13}  # operations a second: two cores; one H200
EXAMPLE = {"cpu": 8e-6, "cuda": 2e-7}  # seconds that an example takes however small the model is
LAUNCH = {"cpu": 2e-3, "cuda": 5e-4}  # the same of a step of a cohort
ROUND = {"cpu": 1e-2, "cuda": 5e-3}  # and of a round without its steps
START = {"cpu": 0, "cuda": 30}  # and of a run: compiling, which a few runs share
SHAPES = {"digits": (8, 8), "mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar-10": (3, 32, 32)}
SHAPES |= {"cifar-100": (3, 32, 32), "a9a": (123,)}
EXAMPLES = {"digits": 1_500, "mnist": 60_000, "fashion-mnist": 60_000, "cifar-10": 50_000, "cifar-100": 50_000}
TEST = 10_000  # examples in most test sets


def seconds(item: Item, seeds: int, kind: str) -> float:
    """Of all runs of an item, on "cpu" or "cuda"."""
    return sum((len(points(cell)) + seeds - 1) * _run(cell.experiment, kind) for cell in item.cells)


def _run(experiment: Experiment, kind: str) -> float:
    """One run."""
    steps, cohorts = _steps(experiment)
    batch = 100 if experiment.batch_size == "all" else experiment.batch_size
    name = experiment.data.name
    rounds = experiment.rounds
    if name in FLEETS:
        return START[kind] + cohorts * LAUNCH[kind] + rounds * ROUND[kind]
    shape, classes = SHAPES.get(name, (100,)), 100 if name == "cifar-100" else 10
    example = max(_operations(experiment.model.name, shape, classes) / RATES[kind], EXAMPLE[kind])
    passes = rounds * EXAMPLES.get(name, 30_000) * experiment.make_method().full_gradients
    looks = rounds / experiment.every * TEST / 3  # a third of the arithmetic: nothing goes backward
    stepping = max((steps * batch + passes + looks) * example, cohorts * LAUNCH[kind])
    return START[kind] + stepping + rounds * ROUND[kind]


@cache
def _operations(name: str, shape: tuple[int, ...], classes: int) -> float:
    """Of one example, forward and backward."""
    known = {} if name == "svm-fedveca" else {"classes": classes}
    return devices.measured_flops(models.make(name, inputs=shape, **known), torch.zeros(2, *shape)) / 2


def _steps(experiment: Experiment) -> tuple[float, float]:
    """Client steps of a run, and how many steps of a whole cohort these are."""
    method = experiment.make_method()
    part = experiment.data if experiment.data.name in FLEETS else experiment.partition
    clients = 20 if part is None else part.options.get("clients", 20)
    cohort = clients
    if experiment.participation is not None and "n" in experiment.participation.options:
        cohort = experiment.participation.options["n"]
    each = method.local_steps or _each(experiment, clients)
    if experiment.seconds is not None and experiment.world is not None and method.schedule.asynchronous:
        per_job = each * devices.resolve(build("devices", experiment.world.devices), clients, 0) + _transfers(
            experiment
        )
        total = experiment.seconds * float((each / per_job).sum())
        return total, total / clients
    return experiment.rounds * cohort * each, experiment.rounds * each


def _transfers(experiment: Experiment) -> float:
    """Seconds that a model takes both ways, as far as it is known without building it."""
    links = experiment.world.links if experiment.world else None
    if links is None:
        return 0.0
    up = float(links.options["up"])
    shape = SHAPES.get(experiment.data.name, (100,))
    return 64 * _parameters(experiment.model.name, shape) / up


@cache
def _parameters(name: str, shape: tuple[int, ...]) -> int:
    return sum(p.numel() for p in models.make(name, inputs=shape).parameters())


def _each(experiment: Experiment, clients: int) -> float:
    """Local steps of a client, on average."""
    rule = experiment.steps
    if not isinstance(rule, Choice):
        return sum(rule) / len(rule) if isinstance(rule, tuple) else rule
    if rule.name == "gaussian":
        return rule.options["mean"]
    if rule.options.get("unit") == "step":
        return rule.options.get("epochs", 5)
    batch = 1 if experiment.batch_size == "all" else experiment.batch_size
    epoch = math.ceil(EXAMPLES.get(experiment.data.name, 30_000) / clients / batch)
    return epoch * rule.options.get("count", rule.options.get("epochs", 5))
