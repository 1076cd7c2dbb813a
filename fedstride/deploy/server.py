"""The server's life: wait for the clients, run the engine over the network, write a checkpoint after every round."""

import dataclasses
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstride import inputs
from fedstride import steps as step_rules
from fedstride.algorithm import Algorithm
from fedstride.checkpoint import Folder, write_whole
from fedstride.clients import Fleet
from fedstride.deploy import wire
from fedstride.deploy.network import Network
from fedstride.deploy.node import Node, anybody
from fedstride.deploy.roll import POLL, Roll
from fedstride.engine import Plan, Run, play
from fedstride.errors import FedstrideError
from fedstride.evaluation import Evaluation
from fedstride.experiment import Experiment, Prepared
from fedstride.results import Result
from fedstride.schedule import Deadline, Schedule, SendBuffers
from fedstride.study import facts
from fedstride.timeline import Timeline
from fedstride.vector import VectorModel
from fedstride.wire import make as make_wire

CLIENTS, EXAMPLES = 1_000_000, 1 << 40  # what numbers and sizes are believed: tables are made for them
SETUP = {"backend": "flower", "clock": "wall-clock"}


def serve(
    experiment: Experiment,
    grid: Any,
    folder: str | Path,
    name: str,
    clients: int,
    timeout: float = 600.0,
    progress: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Result:
    """Run an experiment with so many nodes; `name` tells this run from others, also after a restart of the server."""
    prepared = deployable(experiment)
    method, settings = prepared.method, prepared.settings
    schedule = settings["schedule"] or method.schedule
    vector, listed = VectorModel(prepared.model, settings["dtype"]), _listed(experiment)
    # What is told of a private run's epsilon holds for the fleet it starts with.
    fixed = method.fixed_fleet or experiment.privacy is not None

    def hindrance(client: int, size: int) -> str:
        return _hindrance(client, size, method, fixed, roll.sizes, clients, listed, bool(run.rows))

    roll = Roll(grid, hindrance)
    plan = _plan(experiment, prepared, vector, schedule, clients, max(clients, listed), roll.sizes)
    run = Run(method.init(vector.x.clone(), plan.fleet), timeline=Timeline())
    network = Network(grid, roll, plan, vector.x, name, _uploads(experiment, prepared), timeout)
    identity = {"method": repr(method), "experiment": experiment.dump(), "run": name}
    store = Folder(folder, identity, resume=True)
    store.load(run, network)  # type: ignore[arg-type]
    roll.meet(clients, network.awaited, timeout)

    def renewed(plan: Plan) -> Plan:
        """The plan with the fleet as it is known now, and who of it is there."""
        start = time.monotonic()
        network.look()
        while not network.here or (method.full_only and len(network.here) < len(roll.sizes)):
            if time.monotonic() - start > timeout:
                there = f"only clients {network.here} are there" if network.here else "no client is there"
                raise FedstrideError(f"for {timeout:g} s {there}; the same command goes on from the last round")
            time.sleep(POLL)
            network.look()
        fleet = _fleet(roll.sizes, listed, experiment.weights or method.weights)
        network.plan = dataclasses.replace(plan, fleet=fleet, present=np.array(network.here))
        return network.plan

    if not run.rows:
        plan = renewed(plan)
        run.state = method.init(vector.x.clone(), plan.fleet)

    def after(run: Run) -> None:
        store.append(run)
        store.save(run, network, SETUP)  # type: ignore[arg-type]
        progress(run.rows[-1])

    play(run, plan, network, after, renewed)
    store.save(run, network, SETUP)  # type: ignore[arg-type]
    assert run.timeline is not None
    run.timeline.add_gone((job, "in flight") for job in network.under_way())
    x = method.model(run.state)
    result = Result(
        x, vector.loaded(x), run.rows, run.status, method.name, "flower", run.state, None, 1.0, run.timeline
    )
    # What everybody holds is known here only where all have taken their part of the experiment's own data set.
    known = not roll.strange and set(roll.sizes) == set(range(len(prepared.clients)))
    told = facts(result, prepared) if known else {"sizes": _fleet(roll.sizes, listed, "data").sizes.tolist()}
    write_whole(Path(folder) / "clients.json", json.dumps(told).encode())
    return result


def _plan(
    experiment: Experiment, prepared: Prepared, vector: VectorModel, schedule: Schedule, clients: int, count: int,
    sizes: dict[int, int],
) -> Plan:  # fmt: skip
    """The settings of the run, for so many clients at the start; lists of steps or rates are for `count`."""
    method, settings = prepared.method, prepared.settings
    who = inputs.participation(method, settings["participation"], schedule)
    rule = step_rules.resolve(settings["steps"])
    who.check(clients, experiment.rounds)
    rule.check(count, experiment.rounds)
    inputs.check_schedule(method, schedule, rule, clients, experiment.rounds, bool(method.init_client(vector.x)))
    protection = {name: settings[name] for name in ("guard", "robust", "privacy")}
    inputs.check_protection(method, schedule, who, clients, experiment.rounds, *protection.values())
    # The nodes know the experiment's seed; what they must not foresee is drawn from the system, anew at every start.
    secret = experiment.seed if settings["privacy"] is None else secrets.randbits(62)
    batch = settings["batch_size"]

    def epoch(chosen: np.ndarray) -> np.ndarray:
        held = np.array([sizes[int(client)] for client in chosen], dtype=np.int64)
        return np.ones(len(chosen), dtype=np.int64) if batch is None else -(-held // batch)

    return Plan(
        method, anybody(count, vector.x), who, rule, inputs.rate(settings["lr"], count), epoch, experiment.rounds,
        experiment.seed, secret, experiment.every,
        Evaluation(vector, settings["loss"], settings["test"], settings["metrics"], None, experiment.weight_decay),
        settings["stop"], schedule, settings["seconds"] or float("inf"), wire=make_wire(experiment.wire), **protection,
    )  # fmt: skip


def deployable(experiment: Experiment) -> Prepared:
    """The parts of an experiment; what a simulation can do and a network cannot, or not yet, is refused."""
    prepared = experiment.prepare(real=True)
    method = prepared.method
    schedule = prepared.settings["schedule"] or method.schedule
    if method.pooled:
        raise FedstrideError(f"{method.name} pools all data in one place; it cannot be deployed")
    if isinstance(schedule, Deadline) and schedule.late == "drop":
        raise FedstrideError("a deployed client hands in what it has at the deadline; use late='cut'")
    if isinstance(schedule, SendBuffers) and schedule.resend:
        raise FedstrideError("a deployed client does not send the same update twice; leave resend out")
    if experiment.world is not None:
        sys.stderr.write("the experiment's world is not used: over a network devices and links are what they are\n")
    if experiment.train_loss:
        raise FedstrideError("the server does not see the clients' data, so there is no train_loss; leave it out")
    return prepared


def _uploads(experiment: Experiment, prepared: Prepared) -> dict[str, tuple[dict[str, int], bool]]:
    """What the replies of every exchange look like: the client half of the method, tried on two examples here."""
    few = tuple(part[:2] for part in prepared.clients.data(0))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        node = Node(experiment.settled(len(prepared.classes)), 0, Path(folder), few)  # type: ignore[arg-type]
        state = node.method.init(node.vector.x, anybody(2, node.vector.x))
        for stage, exchanges in (("prologue", node.method.prologue), ("round", node.method.exchanges)):
            for number, exchange in enumerate(exchanges):
                header = dict(
                    run="try", client=0, version=0, repeat=0, stage=stage, exchange=number, target=1, steps=1, lr=1e-9,
                    fleet=2, accepted="", durable="",
                )  # fmt: skip
                _, fields = wire.unpack(wire.pack({}, exchange.message(state)))
                reply, upload = node.answer(header, fields)
                lengths = {name: value.numel() for name, value in zip(getattr(upload, "_fields", ()), upload)}
                found[f"{stage}.{number}"] = lengths, "loss" in reply
    return found


def _listed(experiment: Experiment) -> int:
    """How many clients the experiment lists one by one; 0: what it says holds for anybody."""
    given = [value for value in (experiment.steps, experiment.lr) if isinstance(value, tuple) and len(value) > 1]
    return max(map(len, given), default=0)


def _hindrance(
    client: int, size: int, method: Algorithm, fixed: bool, known: dict[int, int], clients: int, listed: int,
    started: bool,
) -> str:  # fmt: skip
    """Why a client cannot take part; empty if it can."""
    if not 0 <= client < CLIENTS or not 1 <= size <= EXAMPLES:
        return f"its number is {client} and it has {size} examples"
    if listed and client >= listed:
        return f"steps or lr are listed for {listed} clients, from 0"
    if not fixed:
        return ""
    if client not in known and (started or client >= clients):
        return f"{method.name} works with the fleet it starts with, numbers 0 to {clients - 1}; nobody can join later"
    if known.get(client, size) != size:
        return f"it has {size} examples and had {known[client]}, on which the vectors of {method.name} build"
    return ""


def _fleet(sizes: dict[int, int], listed: int, weights: str) -> Fleet:
    """Everybody who is known; a number nobody has told has no weight."""
    table = np.zeros(max(listed, max(sizes) + 1), dtype=np.int64)
    table[list(sizes)] = list(sizes.values())
    share = table if weights == "data" else (table > 0).astype(np.int64)
    return Fleet(torch.as_tensor(share / share.sum()), torch.as_tensor(table))
