"""`simulate`: a whole federated run in this process."""

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstride import inputs
from fedstride import oracle as oracles
from fedstride import participation as participations
from fedstride import steps as step_rules
from fedstride import wire as wires
from fedstride.algorithm import Algorithm, make
from fedstride.checkpoint import Folder
from fedstride.clients import Clients
from fedstride.descent import Augment, Local
from fedstride.engine import Plan, Run, play, single_job
from fedstride.errors import FedstrideError
from fedstride.evaluation import Evaluation, Metric
from fedstride.guards import Norms
from fedstride.keys import job_keys
from fedstride.losses import LossFunction, check_scalar, cross_entropy, per_example
from fedstride.privacy import Gaussian
from fedstride.results import Result, Target
from fedstride.robust import Robust
from fedstride.sampling import Jobs, Replay, Sampler
from fedstride.scale.pool import Pool, hired
from fedstride.schedule import Schedule, Sync
from fedstride.simulator import Simulator
from fedstride.timeline import Timeline
from fedstride.together import Together
from fedstride.train import Work
from fedstride.vector import VectorModel
from fedstride.world import Pace, World

SMALL = 1 << 18  # numbers in a cohort's models up to which one thread is quicker than two


def simulate(
    algorithm: Algorithm | str,
    model: nn.Module,
    clients: Clients,
    *,
    loss: LossFunction = cross_entropy,
    rounds: int = 100,
    seconds: float | None = None,
    lr: float | Sequence[float] | Callable[[int], Any] = 0.05,
    steps: Any = 10,
    batch_size: int | None = 10,
    sampling: str | Replay = "replacement",
    augment: Augment | None = None,
    participation: Any = None,
    schedule: Schedule | None = None,
    world: World | None = None,
    weights: str | None = None,
    wire: str | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    guard: Norms | None = None,
    robust: Robust | None = None,
    privacy: Gaussian | None = None,
    test: tuple[Any, Any] | None = None,
    every: int = 1,
    metrics: dict[str, Metric] | None = None,
    train_loss: bool = False,
    stop: Target | None = None,
    seed: int = 0,
    device: str = "auto",
    backend: str | Together = "auto",
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
    memory: float | None = None,
    timeline: bool = False,
    folder: str | os.PathLike | None = None,
    resume: bool = False,
    progress: bool | Callable[[dict[str, Any]], None] = False,
    workers: int | Pool | None = None,
) -> Result:
    """Run a method on a fleet of clients and return the model and one row a round.

    algorithm: an instance such as `fs.algorithms.Scaffold(server_lr=1.0)`, or a registry name.
    model: any module; its weights are the starting point, frozen parameters stay frozen and are shared.
    loss: a callable (outputs, targets) -> scalar.
    rounds, seconds: the run ends after so many rounds, or with the first that ends after so many virtual seconds.
    lr: a number, one number a client, or a function of the round (counted from 1) that gives either.
    steps: a number, one number a client, a rounds x clients table, or a rule from `fs.steps`.
    batch_size: None uses all local data in every step: exact gradients.
    sampling: "replacement", "shuffle" (passes over the local data), or a function (client, round, step) -> indices,
        all counted from 0.
    augment: changes the inputs of mini-batches (not of full gradients or tests), such as fs.data.crop_flip(padding=4).
    participation: a rule from `fs.participation`, or a list of cohorts, one a round.
    schedule: None (the method's own), fs.schedule.Sync(), .Deadline(seconds), which cuts the local steps of slow
        clients, or an asynchronous one: .Buffered(concurrency, size), .FirstArrivals(n), .SendBuffers(n).
    world: fs.World(devices=..., links=..., availability=...) gives rounds their virtual seconds; None: no time passes.
    weights: None (the method's own), "data" or "uniform"; one policy for every upload.
    wire: "float16" rounds messages and uploads, as on a network that carries them so; None: they are as they are.
    momentum, weight_decay, clip: options of the local optimiser, for methods that allow them.
    guard: fs.guards.Norms(bound, times) rejects uploads that are too long; robust: fs.robust.TrimmedMean(share) or
        .Median() in place of means; privacy: fs.privacy.Gaussian(clip, noise, delta). See docs/guards.md.
    test, every, metrics: evaluate the global model every so many rounds; train_loss adds the loss over all clients.
    stop: fs.Target(accuracy, loss, train_loss) ends the run with the first round that meets all that is given.
    seed: of all that is drawn; the same seed gives the same run. The model's first weights are the caller's.
    device: "auto" (a GPU if there is one), or as torch names it: "cpu", "cuda", "cuda:1".
    backend: "auto", the name of one (fedstride/oracle.py), or a fs.Together that several runs share.
    dtype: torch.float32, torch.float64, or torch.bfloat16: models compute in it, weights stay in float32.
    chunk: clients trained together at most; None keeps their vectors under 256 MiB, or a fourth of a GPU's memory.
    memory: GiB of main memory for what clients remember, None: a quarter of the machine's; the rest is in a file.
    timeline: record who trained when, from which version, and what the server did, in `result.timeline`.
    progress: True shows the round and its numbers; a function is called with every row.
    folder, resume: rows and checkpoints go here; an interrupted run goes on with resume=True.
    workers: train in so many processes of their own, or in those of an open fs.Pool; None: in this one.
    """
    method = make(algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(method, Algorithm):
        raise FedstrideError(f"algorithm must be a name or an instance from fs.algorithms, not {algorithm!r}")
    if not isinstance(model, nn.Module):
        raise FedstrideError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(clients, Clients):
        raise FedstrideError("clients must be made with fs.Clients.from_arrays")
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise FedstrideError("torch.autocast does not reach all threads of a run; say dtype=torch.bfloat16 instead")
    rounds, every, seed = inputs.whole("rounds", rounds), inputs.whole("every", every), inputs.whole("seed", seed, 0)
    batch_size = None if batch_size is None else inputs.whole("batch_size", batch_size)
    chunk = None if chunk is None else inputs.whole("chunk", chunk)
    workers = workers if workers is None or isinstance(workers, Pool) else inputs.whole("workers", workers)
    if workers is not None and isinstance(backend, Together):
        raise FedstrideError("a run trains on workers or together with others, not both; leave workers or backend out")
    if workers is not None and (guard or robust or privacy or wire):
        raise FedstrideError(
            "workers sum uploads where they train, unrounded and unguarded; leave workers, or guard, "
            "robust, privacy and wire out"
        )
    memory = None if memory is None else inputs.real("memory", memory, 0)
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise FedstrideError(f"folder must be a path, not {folder!r}")
    if resume and folder is None:
        raise FedstrideError("resume=True needs the folder of the run")
    local, way = inputs.local(method, momentum, weight_decay, clip), wires.make(None if method.pooled else wire)
    stop = inputs.goal(stop, test, train_loss)
    schedule = method.schedule if schedule is None else schedule
    who, rule = inputs.participation(method, participation, schedule), step_rules.resolve(steps)
    who.check(len(clients), rounds)
    rule.check(len(clients), rounds)
    rate = inputs.rate(lr, 1 if method.pooled else len(clients))
    target = inputs.device(device)
    if method.pooled:
        shares = clients.fleet(weights or method.weights, torch.device("cpu")).weights.numpy()
        rule = step_rules.Pooled(rule, who, Sampler(clients, batch_size, sampling), shares)
        clients, who = clients.pooled(), participations.Full()
    vector = VectorModel(model, dtype, target)
    clients = clients.to(target, dtype)
    sampler = Sampler(clients, batch_size, sampling)
    local = dataclasses.replace(local, augment=inputs.augmentation(augment, sampler))
    pace = Pace(None if method.pooled else world, len(clients), seed)  # pooled data: no devices, nothing travels
    if method.pooled:
        schedule = Sync()
    inputs.check_schedule(method, schedule, rule, len(clients), rounds, bool(method.init_client(vector.x)))
    inputs.check_time(method, world, schedule, pace)
    inputs.check_protection(method, schedule, who, len(clients), rounds, guard, robust, privacy)
    store = None
    if folder is not None:
        named = dict(seed=seed, dtype=str(dtype), batch_size=batch_size, lr=lr, sampling=sampling, loss=loss)
        named |= dict(local=local, world=pace.identity, schedule=schedule, weights=weights or method.weights)
        named |= dict(timeline=timeline, wire=wire, guard=guard, robust=robust, privacy=privacy)
        # An augmentation of ours is known by its options, any other function by its name.
        named["augment"] = repr(augment) if dataclasses.is_dataclass(augment) else augment
        store = Folder(folder, inputs.identity(method, vector, clients, rule, who, **named), resume)
        if backend == "auto":
            backend = store.setup.get("backend", backend)
    # With workers, this process only measures; theirs may be other devices, with other backends.
    oracle = make_oracle(backend if workers is None else "auto", vector, clients, loss)
    inputs.check_batches(oracle.model, clients, sampler)
    fleet = clients.fleet(weights or method.weights, target)
    training = (clients, fleet.weights) if train_loss else None
    evaluate = Evaluation(oracle.model, loss, test, metrics, training, local.weight_decay)
    if stop is not None and stop.accuracy is not None and not evaluate.classifies:
        raise FedstrideError("the target is an accuracy, which needs classes; pass fs.Target(loss=...) instead")
    limits = (stop, schedule, inputs.budget(seconds, world, method), guard, robust, privacy, way)
    plan = Plan(method, fleet, who, rule, rate, sampler.steps_per_epoch, rounds, seed, seed, every, evaluate, *limits)
    job = partial(single_job, plan)
    run = Run(method.init(vector.x.clone(), fleet), timeline=Timeline() if timeline else None)
    plan.rates(1)
    alone = not isinstance(backend, Together)
    with hired(workers) as pool, _threads(oracle, len(clients)) if alone else nullcontext():
        settings, name = (oracle, sampler, local, seed, pace, schedule, job, way), oracle.name
        if pool is None:
            transport = Simulator(method, *settings, chunk or oracles.room(vector.x), memory)
        else:
            from fedstride.scale.cluster import connect  # needs Ray

            transport, name = connect(pool, plan, model, loss, device, str(backend), chunk, *settings)
        if store is not None:
            store.load(run, transport)
            if run.round > rounds:
                raise FedstrideError(f"{folder} holds {run.round} rounds, more than the {rounds} asked for")
            if run.status == "finished" or (run.status == "stopped" and not (stop and stop(run.rows[-1]))):
                run.status = "running"  # more rounds are asked for, or another target
        setup = {"backend": name}

        def after(run: Run) -> None:
            if store is not None:
                store.append(run)
                if store.due():
                    store.save(run, transport, setup)
            if callable(progress):
                progress(run.rows[-1])
            elif progress:
                _show(run.rows[-1], rounds)

        play(run, plan, transport, after)
        if progress is True:
            sys.stderr.write("\n")
        if store is not None:
            store.save(run, transport, setup)
        if run.timeline is not None:
            run.timeline.add_gone((job, "in flight") for job in transport.under_way())
        x, batch = method.model(run.state), transport.trained / max(1, transport.batches)
        ending = (run.status, method.name, name, run.state, transport.memories.here(), batch, run.timeline)
    return Result(x, vector.loaded(x), run.rows, *ending)


@contextmanager
def _threads(oracle: oracles.Oracle, clients: int) -> Iterator[None]:
    """One thread where a cohort is too small to share out: two then wait for each other more than they work."""
    before, x = torch.get_num_threads(), oracle.model.x
    if x.device.type == "cpu" and oracle.name == "vmap" and clients * len(x) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    oracle = make_oracle("auto", vector, clients, loss)
    everyone, zeros = np.arange(len(clients)), np.zeros(len(clients), dtype=np.int64)
    jobs = Jobs(everyone, zeros, zeros, zeros, zeros, zeros, zeros)
    keys = job_keys(0, "smoothness", *jobs[:3], target)
    work = Work(oracle, Sampler(clients, None, "replacement"), jobs, keys, Local(weight_decay=weight_decay))
    return work.smoothness(vector.x[None])[:, 0]


def make_oracle(backend: str | Together, vector: VectorModel, clients: Clients, loss: LossFunction) -> oracles.Oracle:
    """Try model and loss on a few examples, then build the backend."""
    examples, targets = (part[:4] for part in clients.data(0))
    outputs = vector.probe(examples)
    inputs.check_labels(clients, loss, outputs)
    check_scalar(loss, outputs, targets)
    each = per_example(loss, outputs, targets, clients.targets)
    if isinstance(backend, Together):
        name, automatic = backend.backend(vector.x.device)
        oracle = build_oracle(name, vector, len(clients), loss, each, examples, targets, automatic=automatic)
        return backend.oracle(oracle)
    return build_oracle(backend, vector, len(clients), loss, each, examples, targets)


def build_oracle(
    backend: str,
    vector: VectorModel,
    cohort: int,
    loss: LossFunction,
    each: tuple[LossFunction, str] | None,
    examples: Tensor,
    targets: Tensor,
    *,
    automatic: bool = False,
) -> oracles.Oracle:
    """The backend, tried on a few examples; where nobody asked for it by name, another one if it fails."""
    name = oracles.choose(backend, vector, vector.x.device, cohort)
    oracle = oracles.make(name, vector, loss, each)
    key = torch.zeros(1, dtype=torch.int64, device=vector.x.device) if vector.dropouts else None
    try:
        oracle(vector.x[None], oracles.Batch(examples[None], targets[None], None, key))
    except (RuntimeError, ValueError) as error:
        if name == "sequential" or not (automatic or backend == "auto"):
            raise FedstrideError(
                f"the {name} backend cannot take this model and loss: {str(error).splitlines()[0]}"
                + ("" if name == "sequential" else "; use backend='sequential'")
            ) from None
        reason = str(error).splitlines()[0][:120]
        warnings.warn(f"{name} cannot take this model and loss, `sequential` goes on: {reason}", stacklevel=3)
        oracle = oracles.make("sequential", vector, loss, each)
    return oracle


def _show(row: dict, rounds: int) -> None:
    numbers = "  ".join(f"{name} {row[name]:.4f}" for name in ("loss", "accuracy", "local_loss") if name in row)
    sys.stderr.write(f"\rround {row['round']}/{rounds}  {numbers}\x1b[K")
    sys.stderr.flush()
