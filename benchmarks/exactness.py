"""How far every method ends from the optimum, and biased ones from their closed form: the table of docs/exactness.md.

Six heterogeneous quadratics in float64, exact gradients, steps 1, 40, 8, 3, 20, 5, weights by data size, lr 0.1.
"""

import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from problems import Quadratics

import fedstride as fs
from fedstride import algorithms

STEPS, LR, ROUNDS = [1, 40, 8, 3, 20, 5], 0.1, 300
METHODS = [
    *(algorithms.FedaGrac(mode=mode, nu_scope="all") for mode in ("std", "avg", "first", "reverse")),
    algorithms.FedaGracSaving(),
    algorithms.Scaffold(option="I"),
    algorithms.Scaffold(option="II"),
    algorithms.FedDyn(alpha=2.0),
    algorithms.FedTrack(),
    algorithms.FedLin(),
    algorithms.Tracking(),
    algorithms.Scaffnew(p=0.1),
    algorithms.FedAvg(),
    algorithms.FedProx(mu=0.1),
    algorithms.FedNova(),
]


def closed_form(problem: Quadratics, method) -> np.ndarray | None:
    """Where a biased method rests."""
    mu = getattr(method, "mu", 0.0) if isinstance(method, algorithms.FedProx) else 0.0
    if not isinstance(method, (algorithms.FedAvg, algorithms.FedProx, algorithms.FedNova)):
        return None
    paths = [LR * problem.path(LR, k, a + mu * np.eye(4)) for k, a in zip(STEPS, problem.a)]
    if isinstance(method, algorithms.FedNova):
        paths = [path / k for path, k in zip(paths, STEPS)]
    return problem.balance(paths)


def main() -> None:
    problem = Quadratics()
    print("| method | everyone | 3 of 6 | 4 draws with replacement | own closed form |\n|---|---|---|---|---|")
    for method in METHODS:
        cells = []
        for who in (None, fs.participation.uniform(3), fs.participation.uniform(4, replacement=True)):
            if who is not None and not method.exact_partial:
                cells.append("-")
                continue
            rounds = ROUNDS if who is None else 2 * ROUNDS
            result = problem.run(method, steps=STEPS, lr=LR, rounds=rounds, participation=who, backend="sequential")
            cells.append(f"{problem.distance(result, problem.optimum()):.0e}")
            if who is None:
                point = closed_form(problem, method)
                own = "-" if point is None else f"{problem.distance(result, point):.0e}"
        extra = {"mode": getattr(method, "mode", ""), "option": getattr(method, "option", "")}
        label = " ".join([method.name, *(value for value in extra.values() if value)])
        print(f"| {label} | {' | '.join(cells)} | {own} |", flush=True)


if __name__ == "__main__":
    main()
