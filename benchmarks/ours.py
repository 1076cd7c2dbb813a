"""`fs.simulate` on the work of `peers.py`. usage: ours.py FOLDER DEVICE BACKEND SAMPLING

SAMPLING is `replacement`, or `replay` for the very batches of the peers: same work, plus a Python call a batch, so it
is for comparing weights; times are taken with `replacement`, what a user would run.
"""

import sys
import time
from pathlib import Path

import torch
import work

sys.path.insert(0, str(Path(__file__).parent.parent))

import fedstride as fs


def replay(client: int, round: int, step: int) -> range:
    return range(step * work.BATCH, (step + 1) * work.BATCH)


def main(folder: str, device: str, backend: str, sampling: str) -> None:
    job = work.read(folder)
    clients = fs.Clients.from_arrays(list(zip(job.inputs, job.targets)))
    begun: list[float] = []
    times: list[float] = []

    def lr(round: int) -> float:
        begun.append(time.time())  # once a round, the first time before it begins
        return job.lr

    def after(row: dict) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.time())

    result = fs.simulate(
        "fedavg", job.module(), clients, rounds=len(job.cohorts), lr=lr, steps=job.steps, batch_size=work.BATCH,
        sampling=replay if sampling == "replay" else sampling, participation=job.cohorts,
        device=device, backend=backend, progress=after, dtype=job.x.dtype,
    )  # fmt: skip
    work.finish(folder, [begun[0], *times], result.model)


if __name__ == "__main__":
    main(*sys.argv[1:])
