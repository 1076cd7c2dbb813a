"""Client-steps per second of every backend, beside pfl-research on the same work in the same run.

usage: oracle.py [--pfl PYTHON] [--models logistic,mlp,cnn] [--clients 10,100] [--device cpu]

PYTHON is the interpreter of an environment with torch and `pfl[pytorch]==0.6.0`; without it the peer is left out.
Every figure is from the median round of a whole FedAvg run, batch 10. Peer and backends take turns (three turns each,
median reported), because machines drift; only the ratios mean anything.
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

from models import NETWORKS

import fedstride as fs

BATCH, TURNS = 10, 3
STEPS = {"logistic": 20, "mlp": 10, "cnn": 5}
ROUNDS = {"logistic": 12, "mlp": 6, "cnn": 4}


def ours(name: str, clients: int, backend: str, device: str) -> float:
    """Client-steps per second of `fs.simulate`; the learning-rate schedule, asked once a round, is the stopwatch."""
    torch.manual_seed(0)
    steps = STEPS[name]
    fleet = fs.Clients.from_arrays(
        [(torch.randn(steps * BATCH, 1, 28, 28), torch.randint(0, 10, (steps * BATCH,))) for _ in range(clients)]
    )
    times: list[float] = []

    def lr(round: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return 0.05

    fs.simulate("fedavg", NETWORKS[name](), fleet, rounds=ROUNDS[name] + 1, lr=lr, steps=steps, batch_size=BATCH,
                backend=backend, device=device)  # fmt: skip
    return clients * steps / statistics.median(np.diff(times[1:]))  # the first call only checks the schedule


def pfl(python: str, name: str, clients: int, device: str) -> float:
    program = Path(__file__).with_name("pfl_cohort.py")
    command = [python, program, name, clients, BATCH, STEPS[name], ROUNDS[name] + 1]
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True, text=True, env={"PFL_PYTORCH_DEVICE": device, "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"pfl failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pfl", metavar="PYTHON")
    parser.add_argument("--models", default="logistic,mlp,cnn")
    parser.add_argument("--clients", default="10,100")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, device {options.device}, batch {BATCH}")
    print(
        "| model | clients | sequential | vmap | auto takes | pfl 0.6.0 | auto / pfl |\n|---|---|---|---|---|---|---|"
    )
    for name in options.models.split(","):
        for clients in (int(count) for count in options.clients.split(",")):
            figures: dict[str, list[float]] = {"sequential": [], "vmap": [], "pfl": []}
            for _ in range(TURNS):
                for backend in ("sequential", "vmap"):
                    figures[backend].append(ours(name, clients, backend, options.device))
                if options.pfl:
                    figures["pfl"].append(pfl(options.pfl, name, clients, options.device))
            middle = {key: statistics.median(values) for key, values in figures.items() if values}
            vector = fs.vector.VectorModel(NETWORKS[name](), torch.float32)
            auto = fs.oracle.choose("auto", vector, torch.device(options.device), clients)
            peer = f"{middle['pfl']:,.0f} | {middle[auto] / middle['pfl']:.1f}x" if options.pfl else "- | -"
            print(
                f"| {name} | {clients} | {middle['sequential']:,.0f} | {middle['vmap']:,.0f} | {auto} | {peer} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
