"""Large fleets: what a round costs as the fleet grows, and memories larger than the memory allowed.

python benchmarks/fleet.py sizes      # FedAvg on logistic regression, cohorts of 50 from 1,000 to 1,000,000 clients
python benchmarks/fleet.py memories   # SCAFFOLD on the 582,026-parameter CNN, 100,000 clients, 4 GiB for memories

`own` is what the process holds at most, `files` what of mapped files lies in memory beside it: the system takes that
back when somebody needs it. With `--picture FILE` the sizes are drawn, too.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import pictures
from models import NETWORKS

import fedstride as fs

FLEETS = (1_000, 10_000, 100_000, 1_000_000)


def play(method: str, network: str, fleet: int, cohort: int, rounds: int, **options) -> None:
    """One run; every client has five of 60,000 shared examples."""
    begin = time.perf_counter()
    torch.manual_seed(0)
    inputs, targets = torch.randn(60_000, 1, 28, 28), torch.randint(0, 10, (60_000,))
    clients = fs.Clients(inputs, targets, torch.randint(0, 60_000, (5 * fleet,)), np.full(fleet, 5))
    times: list[float] = []
    peaks: list[tuple[int, int]] = []

    def after(row: dict) -> None:
        times.append(time.perf_counter())
        peaks.append(resident())

    fs.simulate(
        method, NETWORKS[network](), clients, rounds=rounds, steps=1, batch_size=5, device="cpu",
        participation=fs.participation.uniform(cohort), progress=after, **options,
    )  # fmt: skip
    start, middle = times[0] - begin, statistics.median(np.diff(times))
    held = " | ".join(f"{max(column) / 1024:,.0f}" for column in zip(*peaks))
    print(f"| {fleet:,} | {cohort} | {rounds} | {start:.1f} | {1000 * middle:.0f} | {held} |", flush=True)


def resident() -> tuple[int, int]:
    """KiB in memory now: the process's own, and of mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]), int(lines["RssFile"].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", choices=("sizes", "memories"))
    parser.add_argument("--fleet", type=int, help="this size alone, in this process")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    if given.fleet:
        play("fedavg", "logistic", given.fleet, 50, 30)
        return
    print(
        "| clients | cohort | rounds | first round after, s | a round, ms | own, MiB | files, MiB |\n"
        + "|---" * 7
        + "|"
    )
    if given.scene == "memories":
        play("scaffold", "cnn", 100_000, 100, 150, memory=4.0)
        return
    found = []
    for fleet in FLEETS:  # a process each, since the peak is that of a process
        command = [sys.executable, __file__, "sizes", "--fleet", str(fleet)]
        line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        print(line, flush=True)
        found.append([float(part.replace(",", "")) for part in line.strip("| ").split("|")])
    if given.picture:
        pictures.fleets(given.picture, *np.array(found)[:, [0, 4, 5]].T)


if __name__ == "__main__":
    main()
