"""`simulate`: a whole federated run in this process."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstride import inputs
from fedstride import oracle as oracles
from fedstride import participation as participations
from fedstride import steps as step_rules
from fedstride.algorithm import Algorithm, Exchange, make
from fedstride.checkpoint import Folder
from fedstride.clients import Clients
from fedstride.engine import Answers, Plan, Run, play, rates, traffic
from fedstride.errors import FedstrideError
from fedstride.evaluation import Evaluation, Metric
from fedstride.keys import job_keys
from fedstride.losses import LossFunction, check_scalar, cross_entropy, per_example
from fedstride.memory import Memories, as_rows
from fedstride.results import Result, Target
from fedstride.sampling import Jobs, Replay, Sampler
from fedstride.schedule import Deadline, Schedule
from fedstride.train import Augment, Local, Work
from fedstride.vector import VectorModel
from fedstride.world import Pace, World

# About this much memory for the vectors of the clients that train together. On a CPU small enough that the allocator
# hands the same memory out again, instead of asking the system for fresh pages every round.
CHUNK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 34}
VECTORS = 8  # [C, d] matrices alive at once in the hungriest client code


class Simulator:
    """The transport of a simulation: trains cohorts in batches on one device."""

    def __init__(
        self,
        algorithm: Algorithm,
        oracle: oracles.Oracle,
        sampler: Sampler,
        local: Local,
        chunk: int,
        seed: int,
        pace: Pace,
    ):
        self._oracle, self._sampler, self._local, self._chunk, self._seed = oracle, sampler, local, chunk, seed
        self._pace, self._extra = pace, algorithm.full_gradients
        self.now = 0.0
        self.memories = Memories(algorithm.init_client(oracle.model.x))

    @torch.no_grad()
    def ask(self, exchange: Exchange, message: Any, jobs: Jobs, deadline: Deadline | None = None) -> Iterator[Answers]:
        """Train the cohort chunk by chunk, longest jobs first, so that chunks hold clients of similar length."""
        asked = len(jobs.clients)
        jobs = jobs if exchange.insist else self._present(jobs)
        cut = deadline.seconds if deadline is not None and exchange.name == "train" else None
        down = self._pace.transfer(jobs, traffic(message), "down")
        late = np.zeros(len(jobs.clients), dtype=bool)
        if deadline is not None and cut is not None:
            room = cut - down - self._pace.compute(jobs, self._extra * self._sampler.steps_per_epoch(jobs.clients))
            done = self._pace.steps_within(jobs, room)
            late = done < jobs.steps
            if deadline.late == "drop":
                done = np.where(late, 0, done)
            jobs, down, late = (jobs._replace(steps=done).take(done > 0), down[done > 0], late[done > 0])
        end = self.now
        if cut is not None and (late.any() or len(jobs.clients) < asked):
            end = self.now + cut  # the server waits for the missing until the deadline
        order = np.argsort(-jobs.steps, kind="stable")
        jobs, down, late = jobs.take(order), down[order], late[order]
        message = as_rows(message)
        device = self._oracle.model.x.device
        for start in range(0, len(jobs.clients), self._chunk):
            rows = slice(start, start + self._chunk)
            part = jobs.take(rows)
            columns = (torch.as_tensor(column, device=device) for column in part[:3])
            keys = job_keys(self._seed, exchange.name, *columns)
            work = Work(self._oracle, self._sampler, part, keys, self._local)
            upload, memory = exchange.client(work, message, self.memories.get(part.clients))
            ready = down[rows] + self._pace.compute(part, work.evaluations)
            if cut is not None:
                ready = np.where(late[rows], cut, ready)
            size = traffic(upload) / len(part.clients)
            end = max(end, float((self.now + ready + self._pace.transfer(part, size, "up")).max()))
            yield Answers(part, upload, memory, work.train_loss)
        self.now = end

    def _present(self, jobs: Jobs) -> Jobs:
        """Those who will answer; where none of them is there, the server waits for the first to come back."""
        there = self._pace.answers(jobs, self.now)
        later = self.now if there.any() else self._pace.wake(jobs, self.now)
        if later == float("inf"):
            if self._pace.forsaken(self.now):
                raise FedstrideError(
                    f"at virtual second {self.now:g} no client of the fleet is there, and none is known to come back"
                )
        elif later > self.now:
            self.now = later
            there = self._pace.answers(jobs, self.now)
        return jobs.take(there)

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
    augment: Augment | None = None,
    participation: Any = None,
    schedule: Schedule | None = None,
    world: World | None = None,
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
    augment: changes the inputs of mini-batches (not of full gradients or tests), such as fs.data.crop_flip(padding=4).
    participation: a rule from `fs.participation`, or a list of cohorts, one a round.
    schedule: fs.schedule.Sync() or .Deadline(seconds), which cuts the local steps of slow clients.
    world: fs.World(devices=..., links=..., availability=...) gives rounds their virtual seconds; None: no time passes.
    weights: None (the method's own), "data" or "uniform"; one policy for every upload.
    momentum, weight_decay, clip: options of the local optimiser, for methods that allow them.
    test, every, metrics: evaluate the global model every so many rounds; train_loss adds the loss over all clients.
    chunk: clients trained together at most; None keeps their vectors under about 256 MiB (CPU), 16 GiB (GPU).
    folder, resume: rows and checkpoints go here; an interrupted run goes on with resume=True.
    """
    method = make(algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(method, Algorithm):
        raise FedstrideError(f"algorithm must be a name or an instance from fs.algorithms, not {algorithm!r}")
    if not isinstance(model, nn.Module):
        raise FedstrideError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(clients, Clients):
        raise FedstrideError("clients must be made with fs.Clients.from_arrays")
    rounds, every, seed = inputs.whole("rounds", rounds), inputs.whole("every", every), inputs.whole("seed", seed, 0)
    batch_size = None if batch_size is None else inputs.whole("batch_size", batch_size)
    chunk = None if chunk is None else inputs.whole("chunk", chunk)
    if resume and folder is None:
        raise FedstrideError("resume=True needs the folder of the run")
    local = inputs.local(method, momentum, weight_decay, clip)
    stop = inputs.goal(stop, test, train_loss)
    who, rule = inputs.participation(participation, schedule), step_rules.resolve(steps)
    if method.full_only and not who.everyone:
        raise FedstrideError(f"{method.name} needs every client in every round; use participation=None, not {who}")
    who.check(len(clients), rounds)
    rule.check(len(clients), rounds)
    rate = inputs.rate(lr, 1 if method.pooled else len(clients))
    target = inputs.device(device)
    if method.pooled:
        rule = step_rules.Pooled(rule, who, Sampler(clients, batch_size, sampling))
        clients, who = clients.pooled(), participations.Full()
    clients = clients.to(target, dtype)
    sampler = Sampler(clients, batch_size, sampling)
    local = dataclasses.replace(local, augment=inputs.augmentation(augment, sampler))
    pace = Pace(None if method.pooled else world, len(clients), seed)  # pooled data: no devices, nothing travels
    deadline = schedule if isinstance(schedule, Deadline) and not method.pooled else None
    inputs.check_time(method, world, deadline, pace)
    vector = VectorModel(model, dtype, target)
    store = None
    if folder is not None:
        named = dict(seed=seed, dtype=str(dtype), batch_size=batch_size, lr=lr, sampling=sampling, loss=loss)
        named |= dict(local=local, world=pace.identity, schedule=schedule, weights=weights or method.weights)
        # An augmentation of ours is known by its options, any other function by its name.
        named["augment"] = repr(augment) if dataclasses.is_dataclass(augment) else augment
        store = Folder(folder, inputs.identity(method, vector, clients, rule, who, **named), resume)
        if backend == "auto":
            backend = store.setup.get("backend", backend)
    oracle = _oracle(backend, vector, clients, loss)
    inputs.check_batches(oracle.model, clients, sampler)
    fleet = clients.fleet(weights or method.weights, target)
    rows_at_once = chunk or max(1, CHUNK_BYTES[target.type] // (VECTORS * vector.x.element_size() * len(vector.x)))

    transport = Simulator(method, oracle, sampler, local, rows_at_once, seed, pace)
    evaluate = Evaluation(oracle.model, loss, test, metrics, (clients, fleet.weights) if train_loss else None)
    plan = Plan(method, fleet, who, rule, rate, sampler.steps_per_epoch, rounds, seed, every, evaluate, stop, deadline)
    run = Run(method.init(vector.x.clone(), fleet))
    rates(plan, 1)
    if store is not None:
        store.load(run, transport.memories)
        transport.now = run.seconds
        if run.status == "finished" or (run.status == "stopped" and not (stop and stop(run.rows[-1]))):
            run.status = "running"  # more rounds are asked for, or another target

    def after(run: Run) -> None:
        if progress:
            _show(run.rows[-1], rounds)
        if store is not None:
            store.append(run.rows[-1])
            if store.due():
                store.save(run, transport.memories, {"backend": oracle.name})

    play(run, plan, transport, after)
    if progress:
        sys.stderr.write("\n")
    if store is not None:
        store.save(run, transport.memories, {"backend": oracle.name})
    x = method.model(run.state)
    return Result(x, vector.loaded(x), run.rows, run.status, method.name, oracle.name, run.state, transport.memories)


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
    target = inputs.device(device)
    vector, clients = VectorModel(model, dtype, target), clients.to(target, dtype)
    oracle = _oracle("auto", vector, clients, loss)
    everyone, zeros = np.arange(len(clients)), np.zeros(len(clients), dtype=np.int64)
    jobs = Jobs(everyone, zeros, zeros, zeros, zeros, zeros, zeros)
    keys = job_keys(0, "smoothness", *(torch.as_tensor(column, device=target) for column in jobs[:3]))
    work = Work(oracle, Sampler(clients, None, "replacement"), jobs, keys, Local(weight_decay=weight_decay))
    return work.smoothness(vector.x[None])[:, 0]


def _oracle(backend: str, vector: VectorModel, clients: Clients, loss: LossFunction) -> oracles.Oracle:
    """Try model and loss on a few examples, then build the backend."""
    examples, targets = (part[:4] for part in clients.data(0))
    outputs = vector.probe(examples)
    inputs.check_labels(clients, loss, outputs)
    check_scalar(loss, outputs, targets)
    each = per_example(loss, outputs, targets, clients.targets)
    name = oracles.choose(backend, vector, vector.x.device, len(clients))
    oracle = oracles.make(name, vector, loss, each)
    key = torch.zeros(1, dtype=torch.int64, device=vector.x.device) if vector.dropouts else None
    try:
        oracle(vector.x[None], oracles.Batch(examples[None], targets[None], None, key))
    except (RuntimeError, ValueError) as error:
        if name == "sequential" or backend == "vmap":
            raise FedstrideError(
                f"the {name} backend cannot take this model and loss: {str(error).splitlines()[0]}"
                + ("; use backend='sequential'" if name == "vmap" else "")
            ) from None
        oracle = oracles.make("sequential", vector, loss, each)
    return oracle


def _show(row: dict, rounds: int) -> None:
    numbers = "  ".join(f"{name} {row[name]:.4f}" for name in ("loss", "accuracy", "local_loss") if name in row)
    sys.stderr.write(f"\rround {row['round']}/{rounds}  {numbers}\x1b[K")
    sys.stderr.flush()
