"""Liars and noise on the digits: what guards and robust means save, what privacy costs. Prints the tables of
docs/guards.md.

    python benchmarks/guards.py
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import fedstride as fs

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from attackers import lying

SEEDS = range(3)
LIARS = {0, 5, 10, 15}  # of twenty
LIES = {
    "nobody lies": None,
    "-5 D": lambda value: -5 * value,
    "1000 D": lambda value: 1000 * value,
    "-D": lambda value: -value,
}
RULES: dict[str, dict[str, Any]] = {
    "plain mean": {},
    "norms, times 3": {"guard": {"name": "norms", "times": 3.0}},
    "trimmed mean, 0.2": {"robust": {"name": "trimmed-mean", "share": 0.2}},
    "median": {"robust": "median"},
}


def accuracies(fields, lie=None):
    found = []
    for seed in SEEDS:
        experiment = fs.Experiment(**fields, seed=seed, every=fields["rounds"], timeline=False)
        with lying(LIARS, lie) if lie else nullcontext():
            result = experiment.run()
        found.append(result.rows[-1].get("accuracy"))
    return found, result.rows[-1].get("epsilon")


def shown(values):
    if None in values:
        return "diverged" if all(value is None for value in values) else f"{values.count(None)} of 3 diverged"
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"


def attacks():
    for name, partition, lies in (
        ("iid", {"name": "iid", "clients": 20}, list(LIES)),
        ("Dirichlet(0.3)", {"name": "dirichlet", "clients": 20, "alpha": 0.3}, ["nobody lies", "-5 D"]),
    ):
        print(f"\n| {name} | {' | '.join(lies)} |\n|---|{'---|' * len(lies)}")
        for rule, more in RULES.items():
            fields = dict(partition=partition, rounds=40, weights="uniform", **more)
            print(f"| {rule} | {' | '.join(shown(accuracies(fields, LIES[lie])[0]) for lie in lies)} |", flush=True)


def private():
    print("\n| noise z | epsilon, coin 0.2 | accuracy | epsilon, 20 of 100 | accuracy |\n|---|---|---|---|---|")
    draws = ({"name": "bernoulli", "p": 0.2}, {"name": "uniform", "n": 20})
    base = dict(partition={"name": "iid", "clients": 100}, rounds=40, weights="uniform", lr=0.1, steps=10)
    for noise in (None, 0.5, 1.0, 2.0):
        cells = []
        for draw in draws:
            privacy = None if noise is None else {"name": "gaussian", "clip": 0.5, "noise": noise}
            values, epsilon = accuracies(base | {"participation": draw, "privacy": privacy})
            cells += ["none" if epsilon is None else f"{epsilon:.1f}", shown(values)]
        print(f"| {'off' if noise is None else f'{noise:g}'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    attacks()
    private()
