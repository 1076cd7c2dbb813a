"""`simulate`: a whole federated run in this process."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstride import oracle as oracles
from fedstride import participation as participations
from fedstride import steps as step_rules
from fedstride.algorithm import Algorithm, Exchange, make
from fedstride.checkpoint import Folder
from fedstride.clients import Clients
from fedstride.engine import Answers, Plan, Run, play
from fedstride.errors import FedstrideError
from fedstride.evaluation import Evaluation, Metric
from fedstride.keys import job_keys
from fedstride.losses import LossFunction, check_scalar, cross_entropy, per_example
from fedstride.memory import Memories, as_rows
from fedstride.results import Result, Target
from fedstride.sampling import Jobs, Replay, Sampler
from fedstride.schedule import Sync
from fedstride.train import Local, Work
from fedstride.vector import VectorModel

CHUNK_BYTES = 1 << 31  # about this much memory for the vectors of the clients that train together
VECTORS = 8  # [C, d] matrices alive at once in the hungriest client code


class Simulator:
    """The transport of a simulation: trains cohorts in batches on one device."""

    def __init__(
        self, algorithm: Algorithm, oracle: oracles.Oracle, sampler: Sampler, local: Local, chunk: int, seed: int
    ):
        self._oracle, self._sampler, self._local, self._chunk, self._seed = oracle, sampler, local, chunk, seed
        self.memories = Memories(algorithm.init_client(oracle.model.x))

    @torch.no_grad()
    def ask(self, exchange: Exchange, message: Any, jobs: Jobs) -> Iterator[Answers]:
        """Train the cohort chunk by chunk, longest jobs first, so that chunks hold clients of similar length."""
        jobs = jobs.take(np.argsort(-jobs.steps, kind="stable"))
        message = as_rows(message)
        device = self._oracle.model.x.device
        for start in range(0, len(jobs.clients), self._chunk):
            part = jobs.take(slice(start, start + self._chunk))
            columns = (torch.as_tensor(column, device=device) for column in part[:3])
            keys = job_keys(self._seed, exchange.name, *columns)
            work = Work(self._oracle, self._sampler, part, keys, self._local)
            upload, memory = exchange.client(work, message, self.memories.get(part.clients))
            yield Answers(part, upload, memory, work.train_loss)

    def keep(self, answers: Answers, used: np.ndarray) -> None:
        """Memories of used uploads become the clients' own; the others stay as they were."""
        if answers.memory and used.any():
            mask = torch.as_tensor(used, device=self._oracle.model.x.device)
            self.memories.put(answers.jobs.clients[used], [value[mask] for value in answers.memory])


def simulate(
    algorithm: Algorithm | str,
    model: nn.Module,
    clients: Clients,
    *,
    loss: LossFunction = cross_entropy,
    rounds: int = 100,
    lr: float | Sequence[float] | Callable[[int], Any] = 0.05,
    steps: Any = 10,
    batch_size: int | None = 10,
    sampling: str | Replay = "replacement",
    participation: Any = None,
    schedule: Sync | None = None,
    weights: str | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    test: tuple[Any, Any] | None = None,
    every: int = 1,
    metrics: dict[str, Metric] | None = None,
    train_loss: bool = False,
    stop: Target | None = None,
    seed: int = 0,
    device: str = "auto",
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
    folder: str | os.PathLike | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Result:
    """Run a method on a fleet of clients and return the model and one row a round.

    algorithm: an instance such as `fs.algorithms.Scaffold(server_lr=1.0)`, or a registry name.
    model: any module; its weights are the starting point, frozen parameters stay frozen and are shared.
    loss: a callable (outputs, targets) -> scalar.
    lr: a number, one number a client, or a function of the round (counted from 1) that gives either.
    steps: a number, one number a client, a rounds x clients table, or a rule from `fs.steps`.
    batch_size: None uses all local data in every step: exact gradients.
    sampling: "replacement", "shuffle" (passes over the local data), or a function (client, round, step) -> indices.
    participation: a rule from `fs.participation`, or a list of cohorts, one a round.
    weights: None (the method's own), "data" or "uniform"; one policy for every upload.
    momentum, weight_decay, clip: options of the local optimiser, for methods that allow them.
    test, every, metrics: evaluate the global model every so many rounds; train_loss adds the loss over all clients.
    chunk: clients trained together at most; None keeps their vectors under about 2 GiB.
    folder, resume: rows and checkpoints go here; an interrupted run goes on with resume=True.
    """
    method = make(algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(method, Algorithm):
        raise FedstrideError(f"algorithm must be a name or an instance from fs.algorithms, not {algorithm!r}")
    if not isinstance(model, nn.Module):
        raise FedstrideError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(clients, Clients):
        raise FedstrideError("clients must be made with fs.Clients.from_arrays or fs.partition")
    for name, value in (("rounds", rounds), ("every", every)) + ((("chunk", chunk),) if chunk is not None else ()):
        if not isinstance(value, (int, np.integer)) or value < 1:
            raise FedstrideError(f"{name} must be a whole number from 1, not {value!r}")
    local = Local(momentum, weight_decay, clip)
    _check_local(method, local)
    who = participations.resolve(participation)
    if schedule is not None and schedule.participation is not None:
        if participation is not None:
            raise FedstrideError("participation is given twice: in the schedule and on its own; give one of them")
        who = schedule.participation
    rule = step_rules.resolve(steps)
    if method.full_only and not who.everyone:
        raise FedstrideError(f"{method.name} needs every client in every round; use participation=None, not {who}")
    who.check(len(clients), rounds)
    rule.check(len(clients), rounds)
    rate = _rate(lr, len(clients))

    target = _device(device)
    if method.pooled:
        epoch = Sampler(clients, batch_size, sampling).steps_per_epoch(np.arange(len(clients)))
        rule, clients, who = step_rules.Pooled(rule, epoch), clients.pooled(), participations.Full()
    vector = VectorModel(model, dtype, target)
    store = None
    if folder is not None:
        options = {field.name: repr(getattr(method, field.name)) for field in dataclasses.fields(method)}  # type: ignore[arg-type]
        identity = {
            "method": method.name, "options": options, "model": vector.signature, "sizes": clients.sizes.tolist(),
            "seed": seed, "dtype": str(dtype), "batch_size": batch_size, "steps": repr(rule),
            "participation": repr(who), "local": repr(local), "weights": weights or method.weights,
        }  # fmt: skip
        store = Folder(folder, identity, resume)
    name = oracles.choose(backend, vector, target, len(clients))
    if store is not None and backend == "auto":
        name = store.setup.get("backend", name)
    if name == "vmap" and target.type == "cuda":
        vector = VectorModel(model, dtype, target, patches=True)
    clients = clients.to(target, dtype)
    sampler = Sampler(clients, batch_size, sampling)
    oracle = _oracle(name, vector, clients, loss)
    fleet = clients.fleet(weights or method.weights, target, dtype)
    rows_at_once = chunk or max(1, CHUNK_BYTES // (VECTORS * vector.x.element_size() * len(vector.x)))

    transport = Simulator(method, oracle, sampler, local, rows_at_once, seed)
    evaluate = Evaluation(vector, loss, test, metrics, (clients, fleet.weights) if train_loss else None)
    plan = Plan(method, fleet, who, rule, rate, sampler.steps_per_epoch, rounds, seed, every, evaluate, stop)
    run = Run(method.init(vector.x.clone(), fleet))
    if store is not None:
        store.load(run, transport.memories)
        if run.status == "finished" or (run.status == "stopped" and not (stop and stop(run.rows[-1]))):
            run.status = "running"  # more rounds are asked for, or another target

    def after(run: Run) -> None:
        if progress:
            _show(run.rows[-1], rounds)
        if store is not None:
            store.append(run.rows[-1])
            if store.due():
                store.save(run, transport.memories, {"backend": name})

    play(run, plan, transport, after)
    if progress:
        sys.stderr.write("\n")
    if store is not None:
        store.save(run, transport.memories, {"backend": name})
    x = method.model(run.state)
    return Result(x, vector.loaded(x), run.rows, run.status, method.name, name, run.state, transport.memories)


@torch.no_grad()
def smoothness(
    model: nn.Module,
    clients: Clients,
    *,
    loss: LossFunction = cross_entropy,
    weight_decay: float = 0.0,
    device: str = "auto",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Smoothness constant L_i of every client's objective at the model's weights, by power iteration."""
    target = _device(device)
    vector, clients = VectorModel(model, dtype, target), clients.to(target, dtype)
    oracle = _oracle(oracles.choose("auto", vector, target, len(clients)), vector, clients, loss)
    everyone, zeros = np.arange(len(clients)), np.zeros(len(clients), dtype=np.int64)
    jobs = Jobs(everyone, zeros, zeros, zeros, zeros, zeros, zeros)
    keys = job_keys(0, "smoothness", *(torch.as_tensor(column, device=target) for column in jobs[:3]))
    work = Work(oracle, Sampler(clients, None, "replacement"), jobs, keys, Local(weight_decay=weight_decay))
    return work.smoothness(vector.x[None])[:, 0]


def _oracle(name: str, vector: VectorModel, clients: Clients, loss: LossFunction) -> oracles.Oracle:
    """Try model and loss on a few examples, then build the backend."""
    inputs, targets = (part[:4] for part in clients.data(0))
    outputs = vector.probe(inputs)
    check_scalar(loss, outputs, targets)
    return oracles.make(name, vector, loss, per_example(loss, outputs, targets))


def _show(row: dict, rounds: int) -> None:
    numbers = "  ".join(f"{name} {row[name]:.4f}" for name in ("loss", "accuracy", "local_loss") if name in row)
    sys.stderr.write(f"\rround {row['round']}/{rounds}  {numbers}\x1b[K")
    sys.stderr.flush()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FedstrideError(f"unknown device {name!r}; use 'auto', 'cpu', 'cuda' or 'cuda:0'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FedstrideError("device 'cuda' was asked for, but torch sees no GPU here; use device='cpu'")
    return device


def _rate(lr: Any, count: int) -> Callable[[int], Any]:
    if callable(lr):
        return lr
    try:
        rates = np.asarray(lr, dtype=np.float64)
    except (TypeError, ValueError):
        raise FedstrideError(
            f"lr must be a number, one number a client, or a function of the round, not {lr!r}"
        ) from None
    if rates.ndim > 1 or rates.size not in (1, count):
        raise FedstrideError(f"lr lists {rates.size} numbers for {count} clients; give one, or one a client")
    if not np.isfinite(rates).all() or (rates <= 0).any():
        raise FedstrideError(f"lr must be positive, not {lr!r}")
    return lambda round: rates


def _check_local(method: Algorithm, local: Local) -> None:
    if not 0 <= local.momentum < 1:
        raise FedstrideError(f"momentum must be in [0, 1), not {local.momentum!r}")
    if local.weight_decay < 0:
        raise FedstrideError(f"weight_decay must not be negative, not {local.weight_decay!r}")
    if local.clip is not None and not local.clip > 0:
        raise FedstrideError(f"clip must be positive, not {local.clip!r}")
    for option in ("momentum", "weight_decay", "clip"):
        if getattr(local, option) and option not in method.local_options:
            allowed = ", ".join(sorted(method.local_options)) or "none"
            raise FedstrideError(f"{method.name} does not allow local {option}; of these options it allows {allowed}")
