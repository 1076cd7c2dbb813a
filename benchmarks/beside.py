"""Eight small runs on a CPU, one after the other and side by side, in processes of their own, in turns.

    python benchmarks/beside.py

Whole calls of `fs.simulate` without what comes once (data, first weights); random images. Medians, and how much less
time the runs took side by side.
"""

import statistics
import subprocess
import sys
import time
from functools import partial

import torch

import fedstride as fs

RUNS, TURNS = 8, 3
SETTINGS = [
    (model, clients, steps)
    for model, clients in (("logistic", 4), ("logistic", 20), ("logistic", 100), ("mlp", 4), ("mlp", 20))
    for steps in (1, 10)
]


def measure(way: str, model: str, clients: int, steps: int) -> float:
    """Seconds of all runs."""
    pixels, rounds = torch.rand(clients * 100, 784), 400 // (clients * steps) + 20
    fleet = fs.Clients.from_arrays([(p, torch.randint(10, (100,))) for p in pixels.split(100)])
    network = {"logistic": fs.models.logistic, "mlp": fs.models.mlp}[model]((784,), 10)
    fedavg = partial(
        fs.simulate, "fedavg", network, fleet, rounds=rounds, steps=steps, batch_size=32, lr=0.05, device="cpu"
    )
    works = [partial(fedavg, seed=seed) for seed in range(RUNS)]
    begin = time.perf_counter()
    if way == "alone":
        for work in works:
            work()
    else:
        side = fs.Together()
        side.play([partial(work, backend=side) for work in works])
    return time.perf_counter() - begin


def main() -> None:
    if len(sys.argv) > 1:
        way, model, clients, steps = sys.argv[1:]
        print(measure(way, model, int(clients), int(steps)))
        return
    print("| model | clients | steps | one after the other, s | side by side, s | times as fast |")
    print("|---|---|---|---|---|---|")
    for setting in SETTINGS:
        seconds: dict[str, list[float]] = {"alone": [], "beside": []}
        for _ in range(TURNS):
            for way, noted in seconds.items():
                command = [sys.executable, __file__, way, *map(str, setting)]
                noted.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        alone, beside = (statistics.median(noted) for noted in seconds.values())
        told = " | ".join(map(str, setting))
        print(f"| {told} | {alone:.2f} | {beside:.2f} | {alone / beside:.2f} |", flush=True)


if __name__ == "__main__":
    main()
