"""The work all contenders of `peers.py` do, in a folder: data, first weights, cohorts.

Each reads it and leaves its times and final weights there. It needs torch and numpy alone, so that peers can read it in
environments of their own.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from models import NETWORKS
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

BATCH = 10


class Work(NamedTuple):
    """FedAvg: every cohort takes `steps` steps of SGD a client, through its data in order."""

    model: str
    steps: int
    cohorts: list[list[int]]  # one a round
    lr: float
    inputs: Tensor  # [users, steps * BATCH, ...]
    targets: Tensor  # [users, steps * BATCH]
    x: Tensor  # first weights

    def module(self) -> nn.Module:
        """The network with the first weights."""
        module = NETWORKS[self.model]().to(self.x)
        vector_to_parameters(self.x.clone(), module.parameters())
        return module

    def batches(self, user: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A user's mini-batches."""
        return zip(self.inputs[user].split(BATCH), self.targets[user].split(BATCH))


def write(folder: Path, model: str, users: int, cohort: int, steps: int, rounds: int) -> None:
    """Draw data, weights and cohorts."""
    rng = np.random.default_rng(0)
    shape = (3, 32, 32) if model == "cifar" else (1, 28, 28)
    np.save(folder / "inputs.npy", rng.standard_normal((users, steps * BATCH, *shape), dtype=np.float32))
    np.save(folder / "targets.npy", rng.integers(0, 10, (users, steps * BATCH)))
    torch.manual_seed(0)
    np.save(folder / "x.npy", flat(NETWORKS[model]()))
    cohorts = [rng.choice(users, cohort, replace=False).tolist() for _ in range(rounds)]
    told = {"model": model, "steps": steps, "cohorts": cohorts, "lr": 0.05, "dtype": "float32"}
    (folder / "work.json").write_text(json.dumps(told))


def make_comparable(folder: Path) -> None:
    """From now on the work is to be done in float64 and in small steps, so that the order of summing hardly matters."""
    path = folder / "work.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lr": 1e-3, "dtype": "float64"}))


@cache
def read(folder: str, device: str = "cpu") -> Work:
    """The work in a folder; the data stay in their files until they are touched."""
    named = json.loads(Path(folder, "work.json").read_text())
    dtype = getattr(torch, named.pop("dtype"))
    for name in ("inputs", "targets", "x"):
        array = torch.from_numpy(np.load(Path(folder, f"{name}.npy"), mmap_mode="c"))
        named[name] = array.to(device, dtype if array.is_floating_point() else array.dtype)
    return Work(**named)


def train(module: nn.Module, job: Work, user: int) -> None:
    """One user's local steps in plain PyTorch."""
    optimiser = torch.optim.SGD(module.parameters(), lr=job.lr)
    for inputs, targets in job.batches(user):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        optimiser.step()


def flat(module: nn.Module) -> np.ndarray:
    """All weights of a network as one vector."""
    return parameters_to_vector(module.parameters()).detach().cpu().numpy()


def finish(folder: str, times: list[float], module: nn.Module) -> None:
    """Leave the results: when the first round began and every round ended, by the wall clock, and the weights."""
    Path(folder, "times.json").write_text(json.dumps(times))
    np.save(Path(folder, "final.npy"), flat(module))
