"""A client's life: one request, one answer, and a memory on its own disk.

A node computes what the simulator would compute for this client, with the same keys, on its own data alone. Its memory
is provisional until the server has used the upload it came with: the next request names the job that was accepted.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fedstride import inputs
from fedstride.algorithm import Exchange
from fedstride.checkpoint import write_whole
from fedstride.choices import build
from fedstride.clients import Clients, Fleet
from fedstride.deploy import wire
from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment
from fedstride.keys import job_keys
from fedstride.memory import as_rows
from fedstride.sampling import Jobs, Sampler
from fedstride.simulate import make_oracle
from fedstride.train import Work
from fedstride.vector import VectorModel
from fedstride.wire import make as make_wire

ECHO = ("run", "client", "version", "repeat", "stage", "exchange")  # what tells one job from another


class Memory:
    """What a client remembers, on disk: one version a job, as long as the server may still come back to it.

    The server names the last job whose upload it used, and the last one that its checkpoint knows of: a server that
    starts again after a crash goes on from there.
    """

    def __init__(self, path: Path, initial: Any):
        self._path, self._initial = path, as_rows(initial)
        self._names = getattr(self._initial, "_fields", ())
        self._versions: dict[str, dict[str, Tensor]] = {}  # job -> fields
        if self._names and path.exists():
            try:
                for name, value in safetensors.torch.load(path.read_bytes()).items():
                    job, _, field = name.partition("/")
                    self._versions.setdefault(job, {})[field] = value
            except Exception:  # whatever a damaged file may bring
                raise FedstrideError(f"{path} is damaged; this client cannot go on with its memory") from None

    def get(self, version: int, accepted: str, durable: str) -> Any:
        """The memory of an accepted job; those that nobody will name again are forgotten."""
        if not self._names:
            return ()
        newest = max((int(job.partition(".")[0]) for job in self._versions), default=0)
        if version < newest:  # it knows nothing of what has been accepted since
            raise FedstrideError(f"a request from version {version} came late, after one from version {newest}")
        self._versions = {job: kept for job, kept in self._versions.items() if job in (accepted, durable)}
        if not accepted:
            return self._initial
        if accepted not in self._versions:
            raise FedstrideError(
                f"this client's memory of job {accepted} is lost; it cannot take part in this run any more"
            )
        return type(self._initial)(*(self._versions[accepted][name] for name in self._names))

    def put(self, job: str, memory: Any) -> None:
        """A new memory, which counts once the server names its job."""
        if not self._names:
            return
        self._versions[job] = {
            name: value.detach().cpu().contiguous().clone() for name, value in zip(self._names, memory)
        }
        tensors = {f"{job}/{name}": value for job, kept in self._versions.items() for name, value in kept.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, safetensors.torch.save(tensors))


class Node:
    """One client: its number in the fleet, its data, and the folder of its memory."""

    def __init__(self, experiment: Experiment, client: int, folder: Path, data: tuple[Any, Any] | None = None):
        self.client, self.method, self.folder, self.seed = client, experiment.make_method(), folder, experiment.seed
        self.half = make_wire(experiment.wire).half
        device, dtype = inputs.device(experiment.device), getattr(torch, experiment.dtype)
        classes, self.own = 0, data is not None  # a settled experiment names the classes
        if data is None:  # a fleet made of one data set, as in a simulation: take our part
            fleet, _, names = experiment.fleet()
            data, classes = fleet.data(client), len(names)
        self.clients = Clients.from_arrays([data]).to(device, dtype)
        batch = None if experiment.batch_size == "all" else experiment.batch_size
        self.sampler = Sampler(self.clients, batch, experiment.sampling)
        model = experiment.make_model(tuple(self.clients.inputs.shape[1:]), classes)
        self.vector = VectorModel(model, dtype, device)
        loss = experiment.make_loss(not self.clients.targets.is_floating_point())
        self.oracle = make_oracle("auto", self.vector, self.clients, loss)
        local = inputs.local(self.method, experiment.momentum, experiment.weight_decay, experiment.clip)
        augment = None if experiment.augment is None else build("augment", experiment.augment)
        self.local = dataclasses.replace(local, augment=inputs.augmentation(augment, self.sampler))

    def facts(self) -> dict[str, Any]:
        """What the server must know before it starts."""
        return {"client": self.client, "size": int(self.clients.sizes[0]), "own": self.own}

    @torch.no_grad()
    def answer(self, header: dict[str, Any], fields: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """The reply to a request: a header, and the upload."""
        if header["client"] != self.client:
            raise FedstrideError(f"a request for client {header['client']} came to client {self.client}")
        exchange = self._exchange(header)
        kind = type(exchange.message(self.method.init(self.vector.x, anybody(int(header["fleet"]), self.vector.x))))
        memory = Memory(
            self.folder / f"{header['run']}-{self.client}.safetensors", self.method.init_client(self.vector.x)
        )
        mine = memory.get(int(header["version"]), header["accepted"], header["durable"])
        start = time.monotonic()
        steps = self._within(header, exchange)
        jobs = Jobs(*(np.array([value]) for value in (
            self.client, header["version"], header["repeat"], header["target"], steps, header["lr"], 1
        )))  # fmt: skip
        device = self.vector.x.device
        keys = job_keys(self.seed, exchange.name, *jobs[:3], device)
        work = Work(self.oracle, self.sampler, jobs._replace(clients=np.zeros(1, dtype=np.int64)), keys, self.local)
        upload, new = exchange.client(work, wire.rows(fields, self.vector.x, kind), mine)
        memory.put(job_name(header), new)
        reply = {name: header[name] for name in ECHO} | {"steps": int(steps), "seconds": time.monotonic() - start}
        if work.train_loss is not None:
            reply["loss"] = float(work.train_loss[0])
        return reply, upload

    def _exchange(self, header: dict[str, Any]) -> Exchange:
        stage = self.method.prologue if header["stage"] == "prologue" else self.method.exchanges
        return stage[header["exchange"]]

    def _within(self, header: dict[str, Any], exchange: Exchange) -> int:
        """Steps to do: those asked for, or what fits into the seconds given, by the time that one step takes here."""
        steps, seconds = int(header["steps"]), float(header.get("budget", 0.0))
        if not seconds or exchange.name != "train":
            return steps
        jobs = Jobs(*(np.array([value]) for value in (0, 0, 0, 2, 2, 1e-9, 1)))
        keys = torch.zeros(1, dtype=torch.int64, device=self.vector.x.device)
        times = []
        for _ in range(2):  # the first one warms up
            start = time.monotonic()
            Work(self.oracle, self.sampler, jobs, keys, self.local).descend(self.vector.x[None])
            times.append((time.monotonic() - start) / 2)
        return max(1, min(steps, int((seconds - sum(times) * 2) / max(times[-1], 1e-9))))


def job_name(header: dict[str, Any]) -> str:
    """A job within a run and client."""
    return f"{header['version']}.{header['repeat']}.{header['stage']}.{header['exchange']}"


def anybody(count: int, x: Tensor) -> Fleet:
    """A fleet of so many, to see what a message looks like; its numbers are not used."""
    return Fleet(
        torch.full((count,), 1 / count, dtype=torch.float64, device=x.device), torch.ones(count, device=x.device)
    )
