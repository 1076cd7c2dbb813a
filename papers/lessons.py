"""What the five papers teach together. Nothing is printed; docs/lessons.md draws the conclusions.

Most of it is shown on one fleet, logistic regression on a9a with twenty clients: the objective is convex, so the
distance from its least value says how far a method is from the solution, and nothing about accuracy on test data has to
be read into it.
"""

from functools import cache
from typing import Any

import numpy as np
import torch

from fedstride import data
from fedstride.experiment import Experiment
from fedstride.reproduce import Cell, Item, Measure, final

TITLE = "Lessons (ours)"
OURS = True  # no paper prints these
SKEWED = {"name": "dirichlet", "clients": 20, "alpha": 0.3, "balance": True}
ALIKE = {"name": "iid", "clients": 20}
SLOWEST, FASTEST = 5, 95  # steps of a round; 50 on average
SMALL = 0.3  # server step of methods that use several stale updates at once; with 1 they leave the ground
UNEQUAL = [round(SLOWEST + (FASTEST - SLOWEST) * client / 19) for client in range(20)]


@cache
def _least() -> float:
    """The least value of the objective over all data, by L-BFGS."""
    train = data.load("a9a").train
    inputs, targets = train.inputs.double(), train.targets
    model = torch.nn.Linear(inputs.shape[1], 2, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    solver = torch.optim.LBFGS(model.parameters(), max_iter=3000, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        solver.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    solver.step(closure)  # type: ignore[arg-type]
    return closure().item()


def _error(row: dict[str, Any], experiment: Experiment) -> dict[str, float]:
    known = experiment.data.name == "a9a" and "train_loss" in row
    return {"error": row["train_loss"] - _least()} if known else {"error": row["loss"]} if "loss" in row else {}


ERROR = Measure(
    "distance from the least loss x 1000, mean of the last 5",
    lambda run: 1000 * float(np.mean([row["error"] for row in run.rows if "error" in row][-5:])),
    places=2,
)


def _experiment(method: Any, partition: dict[str, Any], steps: Any, **more: Any) -> Experiment:
    fields: dict[str, Any] = dict(
        data="a9a", partition=partition, model="logistic", method=method, steps=steps, rounds=50, lr=0.05,
        batch_size=20, train_loss=True, weights="data",
    )  # fmt: skip
    return Experiment(**fields | more)


def steps(scale: str) -> Item:
    """Everybody in every round: which method suits which kind of heterogeneity?"""
    methods = {
        "FedAvg": "fedavg",
        "FedProx": {"name": "fedprox", "mu": 1.0},
        "FedNova": "fednova",
        "SCAFFOLD": "scaffold",
        "FedaGrac": {"name": "fedagrac", "start": "zeros"},
        "FedaGrac, mode avg": {"name": "fedagrac", "start": "zeros", "mode": "avg"},
        "FedDyn": {"name": "feddyn", "alpha": 1.0},
    }
    rows = {
        "data alike, steps equal": (ALIKE, 50),
        "data alike, steps unequal": (ALIKE, UNEQUAL),
        "data skewed, steps equal": (SKEWED, 50),
        "data skewed, steps unequal": (SKEWED, UNEQUAL),
    }
    cells = [
        Cell(row, column, _experiment(method, partition, steps))
        for row, (partition, steps) in rows.items()
        for column, method in methods.items()
    ]
    return Item(
        "Skew and steps", "Which method suits which kind of heterogeneity.", tuple(cells), (ERROR,),
        curve=("error", "rounds"), log=True, derive=_error,
        choices=("lr 0.05, batch 20, 50 rounds; steps 50 for all, or from 5 to 95.",),
    )  # fmt: skip


def seconds(scale: str) -> Item:
    """Devices of different speed, the same virtual seconds for everybody."""
    synchronous = {"FedAvg, everybody": ("fedavg", {}), "SCAFFOLD, everybody": ("scaffold", {})}
    half = {"participation": {"name": "uniform", "n": 5}}
    methods: dict[str, tuple[Any, dict[str, Any]]] = synchronous | {
        "FedAvg, 5 of 20": ("fedavg", half),
        "FedBuff, 5": ({"name": "fedbuff", "n": 5, "server_lr": SMALL}, {}),
        "FedAsync": ("fedasync", {}),
        "DLSGD-homo, 5": ({"name": "dlsgd-homo", "n": 5, "server_lr": SMALL}, {}),
        "DLSGD-hetero, 5": ({"name": "dlsgd-hetero", "n": 5, "server_lr": SMALL}, {}),
    }
    world = {
        "devices": {"name": "slowdown", "base": 0.001, "low": 1, "high": 10},
        "links": {"name": "bandwidth", "up": 1e6, "latency": 0.01},
    }
    cells = [
        Cell(
            row, column,
            _experiment(method, partition, 50, world=world, rounds=3000, seconds=30.0, **{"every": 4} | more),
        )
        for row, partition in (("data alike", ALIKE), ("data skewed", SKEWED))
        for column, (method, more) in methods.items()
    ]  # fmt: skip
    return Item(
        "Speeds", "What waiting for slow devices costs, and what not waiting costs.", tuple(cells), (ERROR,),
        curve=("error", "seconds"), log=True, derive=_error,
        choices=("Devices take 1 to 10 ms a step, 50 steps; 30 virtual seconds; lr 0.05, batch 20.",
                 "FedBuff and DLSGD take a server step of 0.3; with 1 errors grew to 1.5 to 3.4 (one seed)."),
    )  # fmt: skip


def calibration(scale: str) -> Item:
    """Why a network learns nothing at FedaGrac's rate 1: too many steps, or the noise of first gradients?"""
    sent = {"its own choice": "std", "means": "avg", "first gradients": "first"}
    methods: dict[str, Any] = {"FedAvg": "fedavg"}
    for name, mode in sent.items():
        methods[f"FedaGrac, {name}"] = {"name": "fedagrac", "start": "zeros", "mode": mode}
    uneven = [round(100 + 100 * client / 3) for client in range(10)]  # as in FedaGrac's figure 2a
    fleet = dict(data="fashion-mnist", model="cnn-fedagrac", lr=0.03, train_loss=False, every=2)
    cells = [
        Cell(row, column, _experiment(method, {**SKEWED, "clients": 10}, own, batch_size=batch, **fleet))
        for row, own, batch in (
            ("250 steps for all, batch 25", 250, 25),
            ("100 to 400 steps, batch 25", uneven, 25),
            ("100 to 400 steps, batch 100", uneven, 100),
        )
        for column, method in methods.items()
        if (
            batch == 25 or column in ("FedAvg", "FedaGrac, its own choice")
        )  # the larger batch takes four times as long
        and (own == uneven or "choice" not in column)  # with equal steps nobody is fast: its choice is the means
    ]
    return Item(
        "Calibration", "What a client sends as its reference decides how large the calibration rate may be.",
        tuple(cells), (final(last=10),),
        choices=("The fleet of FedaGrac's figure 2a, rate 1, lr 0.03, 50 rounds, every other one measured.",
                 "250 is the mean of 100 to 400, so all rows have as many steps a round."),
    )  # fmt: skip


ITEMS = {"steps": steps, "seconds": seconds, "calibration": calibration}
