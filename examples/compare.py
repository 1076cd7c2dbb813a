"""Which method copes with skewed data and unequal steps? Handwritten digits, twenty clients, a minute on two cores.

usage: compare.py [ROUNDS]
"""

import sys
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedstride as fs

METHODS = [
    fs.algorithms.FedAvg(),
    fs.algorithms.FedProx(mu=0.1),
    fs.algorithms.FedNova(),
    fs.algorithms.Scaffold(),
    fs.algorithms.FedDyn(alpha=0.1),
    fs.algorithms.FedaGrac(calibration=1.0),
    fs.algorithms.FedVeca(),
    fs.algorithms.FedLGA(),
    fs.algorithms.Tracking(),
    fs.algorithms.Centralised(),
]
SEEDS = (0, 1, 2)


def fleet(seed: int, clients: int = 20, alpha: float = 0.3):
    """Digits dealt to the clients by label, each label in its own Dirichlet shares; a fifth is kept for testing."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    test, train = order[:360], order[360:]
    parts: list[list[int]] = [[int(index)] for index in train[:clients]]  # nobody goes without
    for label in range(10):
        mine = train[clients:][labels[train[clients:]] == label]
        cuts = (np.cumsum(rng.dirichlet(np.full(clients, alpha))) * len(mine)).astype(int)[:-1]
        for part, more in zip(parts, np.split(mine, cuts)):
            part.extend(more.tolist())
    return fs.Clients.from_arrays([(images[part], labels[part]) for part in parts]), (images[test], labels[test])


def main(rounds: int = 20) -> None:
    start = time.perf_counter()
    print("20 clients, Dirichlet(0.3) labels, 1 to 40 local steps, batch 10, lr 0.1, 3 seeds\n")
    print(f"{'method':14} {'accuracy %':>18} {'round of 85 %':>15} {'client steps':>13} {'MB up':>7}")
    for method in METHODS:
        accuracy, reached, steps, megabytes = [], [], 0, 0.0
        for seed in SEEDS:
            clients, test = fleet(seed)
            torch.manual_seed(seed)  # every method starts from the same weights
            counts = np.random.default_rng(seed).integers(1, 41, len(clients))
            result = fs.simulate(
                method, nn.Linear(64, 10), clients, rounds=rounds, lr=0.1, steps=counts, test=test, seed=seed
            )
            rows = [row for row in result.rows if "accuracy" in row]
            accuracy.append(100 * rows[-1]["accuracy"])
            reached.append(next((row["round"] for row in rows if row["accuracy"] >= 0.85), None))
            steps += sum(row["steps"] for row in result.rows) // len(SEEDS)
            megabytes += sum(row["bytes_up"] for row in result.rows) / 1e6 / len(SEEDS)
        shown = " ".join("-" if first is None else str(first) for first in reached)
        spread = f"{np.mean(accuracy):.1f} ({min(accuracy):.1f}-{max(accuracy):.1f})"
        print(f"{method.name:14} {spread:>18} {shown:>15} {steps:13,} {megabytes:7.1f}", flush=True)
    print(f"\n'-': not reached within {rounds} rounds. {time.perf_counter() - start:.0f} seconds in all.")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:2]))
