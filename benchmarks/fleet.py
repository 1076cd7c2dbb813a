"""Large fleets: what a round costs as the fleet grows, and memories larger than the memory allowed.

python benchmarks/fleet.py sizes      # FedAvg on logistic regression, cohorts of 50 from 1,000 to 1,000,000 clients
python benchmarks/fleet.py memories   # SCAFFOLD on the 582,026-parameter CNN, 100,000 clients, 4 GiB for memories
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

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
    fs.simulate(
        method, NETWORKS[network](), clients, rounds=rounds, steps=1, batch_size=5, device="cpu",
        participation=fs.participation.uniform(cohort), progress=lambda row: times.append(time.perf_counter()),
        **options,
    )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start, middle = times[0] - begin, statistics.median(np.diff(times))
    print(f"| {fleet:,} | {cohort} | {rounds} | {start:.1f} | {1000 * middle:.0f} | {peak:,.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", choices=("sizes", "memories"))
    parser.add_argument("--fleet", type=int, help="this size alone, in this process")
    given = parser.parse_args()
    if given.scene == "memories":
        play("scaffold", "cnn", given.fleet or 100_000, 100, 60, memory=4.0)
    elif given.fleet:
        play("fedavg", "logistic", given.fleet, 50, 30)
    else:
        print(
            "| clients | cohort | rounds | first round after, s | a round, ms | peak, MiB |\n|---|---|---|---|---|---|"
        )
        for fleet in FLEETS:  # a process each, since the peak is that of a process
            subprocess.run([sys.executable, __file__, "sizes", "--fleet", str(fleet)], check=True)


if __name__ == "__main__":
    main()
