"""The server's life: wait for the clients, run the engine over the network, write a checkpoint after every round."""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message

from fedstride import inputs
from fedstride import steps as step_rules
from fedstride.checkpoint import Folder
from fedstride.clients import Fleet
from fedstride.deploy import wire
from fedstride.deploy.network import POLL, Network
from fedstride.deploy.node import Node, anybody
from fedstride.engine import Plan, Run, play, single_job
from fedstride.errors import FedstrideError
from fedstride.evaluation import Evaluation
from fedstride.experiment import Experiment, Prepared
from fedstride.results import Result
from fedstride.schedule import Deadline, Schedule, SendBuffers
from fedstride.timeline import Timeline
from fedstride.vector import VectorModel
from fedstride.wire import make as make_wire


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
    prepared = experiment.prepare(real=True)
    method, settings = prepared.method, prepared.settings
    if method.pooled:
        raise FedstrideError(f"{method.name} pools all data in one place; it cannot be deployed")
    schedule = settings["schedule"] or method.schedule
    _refuse(experiment, schedule)
    nodes, sizes = _meet(grid, clients, timeout)
    share = sizes / sizes.sum() if (experiment.weights or method.weights) == "data" else np.full(clients, 1 / clients)
    fleet = Fleet(torch.as_tensor(share), torch.as_tensor(sizes))
    vector = VectorModel(prepared.model, settings["dtype"])
    who = inputs.participation(method, settings["participation"], schedule)
    rule = step_rules.resolve(settings["steps"])
    who.check(clients, experiment.rounds)
    rule.check(clients, experiment.rounds)
    inputs.check_schedule(method, schedule, rule, clients, experiment.rounds, bool(method.init_client(vector.x)))
    batch = settings["batch_size"]

    def epoch(chosen: np.ndarray) -> np.ndarray:
        return np.ones(len(chosen), dtype=np.int64) if batch is None else -(-sizes[chosen] // batch)

    evaluate = Evaluation(
        vector, settings["loss"], settings["test"], settings["metrics"], None, experiment.weight_decay
    )
    rate = inputs.rate(settings["lr"], clients)
    way = make_wire(experiment.wire)
    limits = (settings["stop"], schedule, settings["seconds"] or float("inf"), way)
    plan = Plan(
        method, fleet, who, rule, rate, epoch, experiment.rounds, experiment.seed, experiment.every, evaluate, *limits
    )
    run = Run(method.init(vector.x.clone(), fleet), timeline=Timeline())
    job = partial(single_job, plan)
    expected = _uploads(experiment, prepared)
    network = Network(grid, nodes, method, vector.x, name, schedule, job, experiment.seed, expected, way.half, timeout)
    identity = {"method": repr(method), "experiment": experiment.dump(), "sizes": sizes.tolist(), "run": name}
    store = Folder(folder, identity, resume=True)
    store.load(run, network)  # type: ignore[arg-type]

    def after(run: Run) -> None:
        store.append(run)
        store.save(run, network, {"backend": "flower"})  # type: ignore[arg-type]
        progress(run.rows[-1])

    play(run, plan, network, after)
    store.save(run, network, {"backend": "flower"})  # type: ignore[arg-type]
    assert run.timeline is not None
    run.timeline.add_gone((job, "in flight") for job in network.under_way())
    x = method.model(run.state)
    return Result(x, vector.loaded(x), run.rows, run.status, method.name, "flower", run.state, None, 1.0, run.timeline)


def _refuse(experiment: Experiment, schedule: Schedule) -> None:
    """What a simulation can do and a network cannot, or not yet."""
    if isinstance(schedule, Deadline) and schedule.late == "drop":
        raise FedstrideError("a deployed client hands in what it has at the deadline; use late='cut'")
    if isinstance(schedule, SendBuffers) and schedule.resend:
        raise FedstrideError("a deployed client does not send the same update twice; leave resend out")
    if experiment.train_loss:
        raise FedstrideError("the server does not see the clients' data, so there is no train_loss; leave it out")


def _uploads(experiment: Experiment, prepared: Prepared) -> dict[str, dict[str, int]]:
    """What the uploads of every exchange look like: the client half of the method, tried on two examples here."""
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
                _, upload = node.answer(header, fields)
                names = getattr(upload, "_fields", ())
                found[f"{stage}.{number}"] = {name: value.numel() for name, value in zip(names, upload)}
    return found


def _meet(grid: Any, clients: int, timeout: float) -> tuple[dict[int, int], np.ndarray]:
    """Wait until so many nodes are there and have said who they are: client -> node, and everybody's size."""
    facts: dict[int, dict[str, Any]] = {}  # by node
    asked: dict[str, int] = {}
    start = time.monotonic()
    while len(facts) < clients:
        new = [node for node in grid.get_node_ids() if node not in facts and node not in asked.values()]
        requests = [
            Message(wire.pack({"hello": True}, ()), dst_node_id=node, message_type="query", group_id="0")
            for node in new
        ]
        asked |= dict(zip(grid.push_messages(requests), new)) if requests else {}
        for reply in grid.pull_messages(list(asked)):
            node = asked.pop(reply.metadata.reply_to_message_id, None)
            if node is not None and reply.has_error():
                sys.stderr.write(f"client at node {node} failed: {reply.error.reason}\n")
            elif node is not None:
                facts[node] = wire.unpack(reply.content)[0]
        if time.monotonic() - start > timeout:
            raise FedstrideError(f"{len(facts)} of {clients} clients have come within {timeout:g} s")
        time.sleep(POLL)
    nodes = {int(known["client"]): node for node, known in facts.items()}
    if sorted(nodes) != list(range(clients)):
        raise FedstrideError(
            f"the nodes call themselves {sorted(nodes)}; each needs its own number from 0 to {clients - 1}"
        )
    return nodes, np.array([int(facts[nodes[client]]["size"]) for client in range(clients)])
