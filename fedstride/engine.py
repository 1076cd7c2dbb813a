"""The one loop: collect replies, let the server act, write a row.

A synchronous round is a cohort and the exchanges of the method with it; in an asynchronous run a round is one server
update with the replies that have arrived for it. A run is data: server state, client memories, counters and rows;
saving and resuming need nothing from any method.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedstride.algorithm import Algorithm, Exchange
from fedstride.clients import Fleet
from fedstride.errors import FedstrideError
from fedstride.guards import Norms, judged
from fedstride.keys import generator
from fedstride.participation import Cohort, Full, Participation
from fedstride.privacy import Gaussian, PrivateReplies
from fedstride.replies import Reduced, Replies
from fedstride.robust import Robust, RobustReplies
from fedstride.sampling import Jobs
from fedstride.schedule import Deadline, Schedule, Sync
from fedstride.steps import Steps
from fedstride.timeline import Timeline
from fedstride.wire import Wire

RATES = 8  # rounds whose learning rates are kept
PATIENCE = 10  # rounds in a row with nothing but rejected uploads

Rate = Callable[[int], Any]  # round, counted from 1 -> a learning rate, or one a client


class Answers(NamedTuple):
    """Replies of some clients to one exchange."""

    jobs: Jobs
    upload: Any  # NamedTuple of [C, d] and [C, 1] tensors; or Reduced, if it was done where they are
    memory: Any  # what they will remember if the upload is used
    train_loss: Tensor | None  # [C], if they trained
    spans: np.ndarray  # [C, 3]: when training started and ended and when the reply arrived, in seconds


class Transport(Protocol):
    """How a job reaches a client and a reply comes back."""

    sent: int  # messages to clients so far
    refused: set[int]  # clients whose uploads were rejected since one was used

    @property
    def now(self) -> float:
        """Virtual or real seconds since the start."""

    def ask(self, exchange: Exchange, message: Any, jobs: Jobs, deadline: Deadline | None) -> Iterator[Answers]:
        """Send the message to the clients of the jobs; yield replies in any grouping, some perhaps never.

        A deadline cuts the training exchange: replies may then come with fewer steps than asked for.
        """

    def gather(self, exchange: Exchange, message: Any, version: int) -> Iterator[Answers]:
        """Asynchronous: publish a version of the model, then yield replies until the schedule lets the server act."""

    def keep(self, answers: Answers, used: np.ndarray) -> None:
        """Tell the clients which uploads were used, so that their memories count."""

    def gone(self) -> list[tuple[Any, str]]:
        """Jobs of which nothing reached the server since the last call, and why."""


@dataclass(frozen=True)
class Plan:
    """The settings of a run."""

    algorithm: Algorithm
    fleet: Fleet
    participation: Participation
    steps: Steps
    lr: Rate
    epoch: Callable[[np.ndarray], np.ndarray]  # clients -> steps in one local pass
    rounds: int
    seed: int
    secret: int  # seed of what clients must not foresee: who is drawn, the noise of privacy
    every: int
    evaluate: Callable[[Tensor], dict]
    stop: Callable[[dict], bool] | None = None
    schedule: Schedule = Sync()
    seconds: float = float("inf")  # no round begins after so many
    guard: Norms | None = None
    robust: Robust | None = None
    privacy: Gaussian | None = None
    wire: Wire = Wire()
    present: np.ndarray | None = None  # who can be asked at all; None: everybody

    @cached_property
    def weights(self) -> np.ndarray:
        """[N]: the clients' weights in the objective."""
        return self.fleet.weights.cpu().numpy()

    @cached_property
    def _rates(self) -> dict[int, np.ndarray]:
        return {}

    def rates(self, number: int) -> np.ndarray:
        """[N]: everybody's learning rate in a round; the latest are kept, since jobs ask for them one by one."""
        if number not in self._rates:
            if len(self._rates) >= RATES:
                self._rates.clear()
            self._rates[number] = _checked(self, number)
        return self._rates[number]

    def cohort(self, number: int) -> Cohort:
        """Who takes part in a round, drawn from those who are there; in a private run from all, as is accounted for."""
        rng, here = generator(self.secret, "cohort", number), self.present
        if here is None:
            return self.participation.draw(rng, self.weights, number)
        if self.privacy is not None:
            drawn = self.participation.draw(rng, self.weights, number)
            there = np.isin(drawn.clients, here)
            return drawn._replace(clients=drawn.clients[there], times=drawn.times[there])
        drawn = self.participation.draw(rng, self.weights[here], number)
        return drawn._replace(clients=here[drawn.clients])

    @property
    def deadline(self) -> Deadline | None:
        """The end of a training exchange, if there is one."""
        return self.schedule if isinstance(self.schedule, Deadline) else None


@dataclass
class Run:
    """Everything a run is, but for the clients' memories."""

    state: Any
    round: int = 0  # server updates so far
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    status: str = "running"  # running, finished, stopped (target reached), diverged
    timeline: Timeline | None = None  # recorded on request


def play(
    run: Run,
    plan: Plan,
    transport: Transport,
    after: Callable[[Run], None],
    before: Callable[[Plan], Plan] = lambda plan: plan,
) -> None:
    """Run until the last round, the target, or divergence.

    `after` sees the run at the end of every round; `before` may renew the plan, where clients come and go.
    """
    algorithm = plan.algorithm
    if run.round == 0 and algorithm.prologue and not run.rows:
        known = torch.nonzero(plan.fleet.sizes)[:, 0].cpu().numpy()
        everyone = Cohort(known, np.ones_like(known))
        insisting = tuple(exchange._replace(insist=True) for exchange in algorithm.prologue)
        _round(run, plan, transport, everyone, Full(), insisting, 0)
        after(run)
    while run.status == "running" and run.round < plan.rounds and run.seconds < plan.seconds:
        plan, number = before(plan), run.round + 1
        cohort = None if plan.schedule.asynchronous else plan.cohort(number)
        _round(run, plan, transport, cohort, plan.participation, algorithm.exchanges, number)
        after(run)
    if run.status == "running":
        run.status = "finished"


def _round(
    run: Run,
    plan: Plan,
    transport: Transport,
    cohort: Cohort | None,
    participation: Participation,
    exchanges: tuple[Exchange, ...],
    number: int,
) -> None:
    jobs = None if cohort is None else _jobs(run, plan, cohort, number)
    row: dict[str, Any] = {"round": number, "seconds": run.seconds, "clients": 0, "steps": 0}
    sent = transport.sent
    row |= {"bytes_up": 0, "bytes_down": 0, "rejected": 0}
    for exchange in exchanges:
        jobs = _exchange(run, plan, transport, exchange, participation, jobs, row)
        if not math.isfinite(float(plan.algorithm.model(run.state).sum())):
            run.status = "diverged"
        if run.status == "diverged":
            break
    run.round = number
    if row["clients"]:
        row |= plan.algorithm.report(run.state)
    gone = transport.gone()
    if run.timeline is not None:
        run.timeline.add_gone(gone)
        if number:
            run.timeline.add_update(number, run.seconds, transport.sent - sent, participation.by_weight)
    if plan.privacy is not None:
        row["epsilon"] = plan.privacy.spent(participation, plan.fleet.clients, number)
        row["delta"] = plan.privacy.delta
    if run.status != "diverged" and (number % plan.every == 0 or number == plan.rounds or run.seconds >= plan.seconds):
        row |= plan.evaluate(plan.algorithm.model(run.state))
    run.rows.append(row)
    if run.status == "running" and plan.stop is not None and plan.stop(row):
        run.status = "stopped"


def _exchange(
    run: Run,
    plan: Plan,
    transport: Transport,
    exchange: Exchange,
    participation: Participation,
    jobs: Jobs | None,
    row: dict,
) -> Jobs | None:
    """One exchange, with a cohort's jobs or, if None, with whoever arrives.

    Returns the jobs as they were done, of those whose reply was used: who failed it sits out the rest of the round.
    """
    algorithm = plan.algorithm
    message = plan.wire.carry(exchange.message(run.state))
    version, sent = max(0, row["round"] - 1), transport.sent
    if jobs is None:
        source = transport.gather(exchange, message, version)
    else:
        asked = jobs if exchange.audience is None else jobs.take(exchange.audience(run.state, jobs))
        asked = asked.take(asked.steps > 0)  # zero steps: the client does not answer
        source = transport.ask(exchange, message, asked, plan.deadline) if len(asked.clients) else iter(())
    replies = _replies(plan, participation, run.state.x, version)
    done: list[Jobs] = []
    losses, rejected = [], 0
    carried = (answers._replace(upload=plan.wire.carry(answers.upload)) for answers in source)
    for answers, used in judged(carried, plan.guard, run.state.x.numel(), exchange.insist):
        if answers.train_loss is not None:
            row["steps"] += int(answers.jobs.steps.sum())
            losses.append(answers.train_loss.cpu().numpy()[used])
        upload = answers.upload  # workers elsewhere have reduced theirs
        if not isinstance(upload, Reduced):
            upload = replies.reduce(answers.jobs, upload, used, plan.wire.bytes(upload))
        rejected += int((~used).sum())
        if not algorithm.pooled:
            row["bytes_up"] += upload.bytes
        transport.keep(answers, used)
        if run.timeline is not None:
            run.timeline.add(row["round"], exchange.name, answers.jobs, answers.spans, used)
        if used.any():
            done.append(answers.jobs if used.all() else answers.jobs.take(used))
            replies.add(done[-1], upload)
    if not algorithm.pooled:
        row["bytes_down"] += plan.wire.bytes(message) * (transport.sent - sent)
    run.seconds = row["seconds"] = transport.now
    row["rejected"] += rejected
    if losses and len(replies):
        row["local_loss"] = float((replies.shares * np.concatenate(losses)).sum())
    if len(replies):
        row["clients"] = max(row["clients"], len(replies))
        staleness = replies.header("staleness")
        row["staleness"], row["max_staleness"] = float((replies.shares * staleness).sum()), int(staleness.max())
    if len(replies) or plan.privacy is not None:
        run.state = exchange.server(run.state, replies)
    everyone = range(plan.fleet.clients) if plan.present is None else plan.present
    nobody = bool(transport.refused) and transport.refused.issuperset(everyone)  # whose upload would be usable
    fruitless = rejected > 0 and not len(replies) and exchange.audience is None and plan.privacy is None
    if (jobs is None and nobody) or (fruitless and (nobody or _fruitless(run.rows) + 1 >= PATIENCE)):
        run.status = "diverged"
    if jobs is None or exchange.audience is not None:  # those who were not asked did not fail
        return jobs
    if not done:
        return jobs.take(slice(0, 0))
    together = Jobs(*(np.concatenate(columns) for columns in zip(*done)))
    return together.take(np.argsort(together.clients))


def _fruitless(rows: list[dict[str, Any]]) -> int:
    """How many rounds in a row, up to the last, brought nothing but rejected uploads."""
    return sum(1 for _ in itertools.takewhile(lambda row: row["rejected"] and not row["clients"], reversed(rows)))


def _replies(plan: Plan, participation: Participation, x: Tensor, version: int) -> Replies:
    """What is to become of the uploads of an exchange."""
    method = plan.algorithm
    settings = (
        plan.weights, x.numel(), participation.by_weight, method.needs_rows, version, method.factor, x.device
    )  # fmt: skip
    if plan.robust is not None:
        return RobustReplies(plan.robust, *settings)
    if plan.privacy is not None:
        share = plan.privacy.share(participation, plan.fleet.clients)
        return PrivateReplies(plan.privacy, share, plan.secret, x.dtype, *settings)
    return Replies(*settings)


def _jobs(run: Run, plan: Plan, cohort: Cohort, number: int) -> Jobs:
    clients = cohort.clients
    if number == 0:  # a prologue asks everybody, whatever their steps
        targets = done = np.ones(len(clients), dtype=np.int64)
    elif plan.algorithm.assigns:
        rng = generator(plan.seed, "assign", number)
        targets = done = np.asarray(plan.algorithm.assign(run.state, clients, rng), dtype=np.int64)
    else:
        targets, done = work(plan, clients, number)
    lr = plan.rates(max(1, number))[clients]
    versions = np.full(len(clients), max(0, number - 1))
    return Jobs(clients, versions, np.zeros_like(versions), targets, done, lr, cohort.times)


def work(plan: Plan, clients: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps asked for and steps done of some clients in a round."""
    fixed = plan.algorithm.local_steps
    if fixed is not None:
        return (steps := np.full(len(clients), fixed), steps)
    return plan.steps.draw(clients, number, plan.epoch(clients), plan.seed)


def single_job(plan: Plan, client: int, version: int) -> tuple[int, int, float]:
    """Steps asked for, steps done and learning rate of one client that starts from a version of the model."""
    target, done = work(plan, np.array([client]), version + 1)
    return int(target[0]), int(done[0]), float(plan.rates(version + 1)[client])


def _checked(plan: Plan, number: int) -> np.ndarray:
    """[N]: everybody's learning rate in a round."""
    value = plan.lr(number)
    try:
        given = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise FedstrideError(f"lr must give numbers; in round {number} it gives {value!r}") from None
    if given.size not in (1, plan.fleet.clients) or not np.isfinite(given).all() or (given <= 0).any():
        raise FedstrideError(
            f"lr must be one positive number, or one for each of {plan.fleet.clients} clients; "
            f"in round {number} it is {given.tolist()}"
        )
    if plan.algorithm.common_lr and given.size > 1 and (given != given.flat[0]).any():
        raise FedstrideError(f"{plan.algorithm.name} needs the same lr for all clients")
    return np.broadcast_to(given.reshape(-1), (plan.fleet.clients,))
