"""What workers cost and bring on this machine: the overhead of a round, and two of them against one.

    python benchmarks/workers.py

Overhead: FedAvg on a model of 5 MiB, 100 clients, one step on a single example each, two workers. The slowest worker
says how long it has trained, checked and summed; what a round takes beyond that is the message, the sums, their way
through Ray's object store, and the engine. The in-process engine is measured alike; the difference is the overhead.
Speed: the 784-400-10 MLP, 100 clients, 10 steps, batch 10, with one single-thread worker and with two; they take turns,
because machines drift. Startup is from `fs.Pool(2)` to two workers that answer.
"""

import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from models import NETWORKS

import fedstride as fs
from fedstride import guards
from fedstride.replies import Replies
from fedstride.scale.team import Team
from fedstride.simulator import Simulator

PLACES: list[tuple[Any, str]] = [(Team, "share"), (Simulator, "_train"), (Replies, "reduce"), (guards, "finite")]
TURNS, ROUNDS = 3, 8


def fleet(clients: int, examples: int, shape: tuple[int, ...]) -> fs.Clients:
    torch.manual_seed(0)
    return fs.Clients.from_arrays(
        [(torch.randn(examples, *shape), torch.randint(0, 10, (examples,))) for _ in range(clients)]
    )


class Stopwatch:
    """Seconds of every round, and of training and summing in it: by the slowest worker, or by the process itself."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.training: list[float] = []
        self._before = 0.0

    def after(self, row: dict) -> None:
        """A round is over."""
        now = time.perf_counter()
        self.rounds.append(now - self._before)
        self._before = now

    def __enter__(self) -> "Stopwatch":
        self._saved = [(kind, name, getattr(kind, name)) for kind, name in PLACES]
        for place, (kind, name, function) in enumerate(self._saved):
            setattr(kind, name, self._timed(place, function))
        return self

    def _timed(self, place: int, function: Callable) -> Callable:
        def timed(*arguments):
            start = time.perf_counter()
            done = function(*arguments)
            seconds = time.perf_counter() - start
            if place == 0:  # the workers know better than the process that waits for them
                self.training.append(max(part.result.seconds for part in done))
            elif place == 1:
                self.training.append(seconds)
            else:
                self.training[-1] += seconds
            return done

        return timed

    def __exit__(self, *_: object) -> None:
        for kind, name, function in self._saved:
            setattr(kind, name, function)

    @property
    def round(self) -> float:
        """Seconds of the median round; the first few are left out."""
        return statistics.median(self.rounds[2:])

    @property
    def beyond(self) -> float:
        """Seconds of the median round that are not training."""
        return statistics.median(a - b for a, b in zip(self.rounds[2:], self.training[2:]))


def measured(model: nn.Module, clients: fs.Clients, steps: int, batch: int, workers: fs.Pool | None) -> Stopwatch:
    with Stopwatch() as watch:
        fs.simulate("fedavg", model, clients, rounds=ROUNDS + 2, steps=steps, batch_size=batch, lr=0.05,
                    backend="sequential", device="cpu", chunk=100, workers=workers, progress=watch.after)  # fmt: skip
    return watch


def overhead(pool: fs.Pool) -> None:
    """A 5 MiB model that is quick to train, so that what is not training can be seen."""
    model, clients = nn.Sequential(nn.Flatten(), nn.Linear(131_071, 10)), fleet(100, 1, (131_071,))
    with_workers, without = [], []
    for _ in range(TURNS):
        with_workers.append(measured(model, clients, 1, 1, pool).beyond)
        without.append(measured(model, clients, 1, 1, None).beyond)
    ours, base = statistics.median(with_workers), statistics.median(without)
    size = 4 * sum(part.numel() for part in model.parameters()) / 2**20
    print(
        f"overhead a round, {size:.2f} MiB, 100 clients, two workers: {1e3 * ours:.1f} ms beside training and summing, "
        f"in-process {1e3 * base:.1f} ms: {1e3 * (ours - base):.1f} ms more (target 25)"
    )


def speed(pool: fs.Pool) -> None:
    clients, model = fleet(100, 100, (1, 28, 28)), NETWORKS["mlp"]()
    one = copy.copy(pool)
    one.handles, one.machines = pool.handles[:1], pool.machines[:1]
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(TURNS):
        for count, workers in ((1, one), (2, pool)):
            seconds[count].append(measured(model, clients, 10, 10, workers).round)
    rate = {count: 1000 / statistics.median(values) for count, values in seconds.items()}
    print(
        f"mlp, 100 clients, 10 steps, batch 10, client-steps a second: one worker {rate[1]:,.0f}, two {rate[2]:,.0f}: "
        f"{rate[2] / rate[1]:.2f}x (target 1.5)"
    )


def main() -> None:
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}")
    start = time.perf_counter()
    with fs.Pool(2) as pool:
        print(f"startup of two workers: {time.perf_counter() - start:.1f} s")
        overhead(pool)
        speed(pool)
    print(f"load after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
