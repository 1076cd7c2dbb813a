"""Ours on one GPU: the backends side by side, sixteen runs as one batch, and what rounding does to accuracy.

usage: gpu.py speeds [MODEL ...]     client-steps a second of each backend, beside what the memory allows
       gpu.py together [MODEL ...]   sixteen runs with ten clients beside one with ten and one with a hundred
       gpu.py accuracy               DLSGD's CNN on Fashion-MNIST in float32, TF32 and bfloat16

Whole rounds of `fs.simulate`. The median round counts; what comes once (compiling, recording) is told apart. Products
are rounded to TF32, as JAX and torch's convolutions do by default, unless `--numbers` says otherwise.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import roofline
from models import NETWORKS

import fedstride as fs

STEPS, ROUNDS, EXAMPLES, RUNS = 50, 12, 200, 16
NUMBERS = ("float32", "tf32", "bfloat16")
CASES = {  # cohort, batch
    "logistic": [(10, 10), (100, 10)],
    "mlp": [(10, 10), (100, 10)],
    "cnn": [(10, 10), (100, 10), (100, 50)],
    "alexnet": [(80, 25)],
}


def network(model: str) -> torch.nn.Module:
    """A benchmark's network, or the AlexNet of FedaGrac's Table 6."""
    torch.manual_seed(0)
    return fs.models.make("alexnet-fedagrac") if model == "alexnet" else NETWORKS[model]()


def fleet(model: str, clients: int) -> fs.Clients:
    """Random images."""
    shape = (3, 32, 32) if model == "alexnet" else (1, 28, 28)
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(EXAMPLES, *shape, generator=generator), torch.randint(0, 10, (EXAMPLES,), generator=generator))
        for _ in range(clients)
    ]
    return fs.Clients.from_arrays(data)


def rounding(numbers: str) -> torch.dtype:
    """How products are rounded from now on, and the type that models compute in."""
    torch.set_float32_matmul_precision("highest" if numbers == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = numbers != "float32"
    return torch.bfloat16 if numbers == "bfloat16" else torch.float32


def play(
    model: str, clients: fs.Clients, batch: int, backend, dtype: torch.dtype, times: list[float], seed: int = 0
) -> fs.Result:
    """A run that notes when its rounds end: their losses have been read by then, so their steps are over."""

    def after(row: dict) -> None:
        times.append(time.perf_counter())

    augment = fs.data.crop_flip(4) if model == "alexnet" else None
    return fs.simulate(
        "fedavg", network(model), clients, rounds=ROUNDS, lr=0.01, steps=STEPS, batch_size=batch, backend=backend,
        device="cuda", dtype=dtype, augment=augment, seed=seed, progress=after,
    )  # fmt: skip


def rate(times: list[float], rows: int) -> float:
    """Client-steps a second of the median round of the second half."""
    later = times[len(times) // 2 :]
    return rows * STEPS / statistics.median(b - a for a, b in zip(later, later[1:]))


def speeds(models: list[str], backends: list[str], dtype: torch.dtype) -> None:
    """The backends side by side; `limit` is what copying the bytes of a step allows."""
    copy = roofline.rates("cuda")[1]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies {copy / 1e9:,.0f} GB/s\n")
    print("| model | cohort | batch | backend | client-steps/s | first round after, s | limit | reached |")
    print("|---|---|---|---|---|---|---|---|")
    for model in models:
        for cohort, batch in CASES[model]:
            clients = fleet(model, cohort)
            limit = copy / roofline.traffic(network(model), clients.inputs[:batch])
            for backend in backends:
                times: list[float] = []
                begin = time.perf_counter()
                play(model, clients, batch, backend, dtype, times)
                speed, first = rate(times, cohort), times[0] - begin
                told = f"{speed:,.0f} | {first:.1f} | {limit:,.0f} | {speed / limit:.0%}"
                print(f"| {model} | {cohort} | {batch} | {backend} | {told} |", flush=True)


def together(models: list[str], dtype: torch.dtype) -> None:
    """Sixteen small runs beside a small and a large one."""
    print(
        "| model | one run, 10 clients | one run, 100 clients | 16 runs, 10 clients | of 100 | times as long as one |"
    )
    print("|---|---|---|---|---|---|")
    for model in models:
        alone = {}
        for cohort in (10, 100):
            times: list[float] = []
            play(model, fleet(model, cohort), 10, "compiled", dtype, times)
            alone[cohort] = rate(times, cohort)
        side, clients = fs.Together(), fleet(model, 10)
        noted: list[list[float]] = [[] for _ in range(RUNS)]
        side.play([partial(play, model, clients, 10, side, dtype, times, seed) for seed, times in enumerate(noted)])
        all_of_them = rate(noted[-1], 10 * RUNS)
        ratios = f"{all_of_them / alone[100]:.0%} | {RUNS * alone[10] / all_of_them:.1f}"
        print(f"| {model} | {alone[10]:,.0f} | {alone[100]:,.0f} | {all_of_them:,.0f} | {ratios} |", flush=True)


def accuracy(rounds: int = 200, seeds: int = 3) -> None:
    """Ten clients with an equal share of the data, the same seeds three times."""
    data = fs.data.load("fashion-mnist")
    clients = fs.partition.iid(data, 10)
    print(f"FedAvg, {rounds} rounds of {STEPS} steps, batch 10: test accuracy in %, mean and range of {seeds} seeds")
    for numbers in NUMBERS:
        dtype, side = rounding(numbers), fs.Together()
        runs = side.play(
            [
                partial(
                    fs.simulate, "fedavg", network("cnn"), clients, rounds=rounds, lr=0.05, steps=STEPS, batch_size=10,
                    backend=side, device="cuda", dtype=dtype, seed=seed, test=data.test, every=rounds,
                )
                for seed in range(seeds)
            ]
        )  # fmt: skip
        found = [100 * run.rows[-1]["accuracy"] for run in runs]
        print(f"{numbers}: {statistics.mean(found):.2f} ({min(found):.2f} to {max(found):.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", choices=("speeds", "together", "accuracy"))
    parser.add_argument("models", nargs="*")
    parser.add_argument("--backends", default="vmap,graph,compiled")
    parser.add_argument("--numbers", choices=NUMBERS, default="tf32")
    given = parser.parse_args()
    if given.scene == "accuracy":
        accuracy()
    elif given.scene == "speeds":
        speeds(given.models or list(CASES), given.backends.split(","), rounding(given.numbers))
    else:
        together(given.models or ["logistic", "mlp", "cnn"], rounding(given.numbers))


if __name__ == "__main__":
    main()
