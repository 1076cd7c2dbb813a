"""The transport over Flower: requests are pushed to nodes, replies pulled as they come, in real seconds.

A node cannot send unasked. In asynchronous runs the server therefore keeps one request with every node that is at work
and plays the buffers of the schedule itself: the receive buffer is the newest model at the moment of a request, the
send buffer holds replies that nobody has drawn yet.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor

from fedstride.algorithm import Exchange
from fedstride.courses import Job
from fedstride.deploy import wire
from fedstride.deploy.node import ECHO, job_name
from fedstride.deploy.roll import POLL, Roll
from fedstride.engine import Answers, Plan, single_job
from fedstride.errors import FedstrideError
from fedstride.keys import draw, generator, key
from fedstride.memory import Memories
from fedstride.participation import Uniform
from fedstride.sampling import Jobs
from fedstride.schedule import Buffered, Deadline, SendBuffers

PATIENCE = 3  # rejected uploads in a row after which a client is set aside
ROOM = 1 << 27  # bytes of uploads that are fetched at once


class Sent(NamedTuple):
    """A request under way."""

    header: dict[str, Any]
    times: int  # how often the reply counts
    at: float


class Network:
    """Sends jobs to the nodes of a grid and reads what comes back."""

    def __init__(
        self,
        grid: Any,
        roll: Roll,
        plan: Plan,
        x: Tensor,
        run: str,
        expected: dict[str, tuple[dict[str, int], bool]],
        timeout: float,
    ):
        self._grid, self.roll, self.plan, self._x, self._run, self._timeout = grid, roll, plan, x, run, timeout
        self._method, self._schedule, self._seed, self._half = plan.algorithm, plan.schedule, plan.seed, plan.wire.half
        largest = max(sum(lengths.values()) for lengths, _ in expected.values()) * x.element_size()
        self._at_once = max(1, ROOM // max(1, largest))
        self._origin = time.monotonic()
        self.sent = 0
        self.refused: set[int] = set()
        self.memories = Memories(())  # clients keep their own
        self._accepted: dict[int, str] = {}  # client -> the last job whose upload was used
        self._durable: dict[int, str] = {}  # the same, as the last checkpoint has it
        self._strikes: dict[int, int] = {}  # failures and rejected uploads in a row
        self._expected = expected  # exchange -> the fields of its uploads and their lengths, and whether it has a loss
        self._under_way: dict[str, Sent] = {}  # by Flower's message id
        self._gone: list[tuple[Job, str]] = []
        self._rejections = 0
        self._taken: dict[int, int] = {}  # the last version a client started from
        self._repeats: dict[int, int] = {}
        self._retry: set[int] = set()  # their last job failed
        self._arrived: deque[tuple[int, Answers | None]] = deque()  # read, and not needed yet
        self._slots: dict[int, Answers] = {}  # send buffers
        self._dispatches = 0
        self.awaited: set[int] = set()  # who was there at the last checkpoint

    @property
    def now(self) -> float:
        """Real seconds since the start; a resumed run goes on where it stood."""
        return time.monotonic() - self._origin

    def ask(self, exchange: Exchange, message: Any, jobs: Jobs, deadline: Deadline | None) -> Iterator[Answers]:
        """Ask a cohort and wait for all of it, or until nothing more can be hoped for."""
        budget = deadline.seconds if deadline is not None and exchange.name == "train" else 0.0
        insist = exchange.insist or self._method.full_only  # then nobody may miss it
        work = {int(client): jobs.take(slice(row, row + 1)) for row, client in enumerate(jobs.clients)}
        until, answered = self.now + self._timeout, set()
        while True:
            self.look()
            for client in [client for client in work if client in self.roll.nodes]:
                if self._push(exchange, message, work[client], budget):
                    del work[client]
            if not self._under_way and not (insist and work and self.now < until):
                break
            for client, answers in self._pull():
                if answers is not None:
                    yield answers
                    answered.add(client)
                elif insist:
                    work[client] = jobs.take(jobs.clients == client)
            late = sorted(sent.header["client"] for sent in self._under_way.values())
            if late and self.now > until:
                _say(f"clients {late} have not answered for {self._timeout:g} s; the round goes on without them")
                self._give_up(list(self._under_way))
            elif late or work:
                time.sleep(POLL)
        good = answered & set(self._accepted) if exchange.insist else answered
        missing = sorted(set(jobs.clients.tolist()) - good)
        if insist and missing:
            when = "before the first round" if exchange.insist else f"in a round of {self._method.name}"
            raise FedstrideError(f"clients {missing} have not answered {when}, which nobody may miss")

    def gather(self, exchange: Exchange, message: Any, version: int) -> Iterator[Answers]:
        """Keep clients at work and yield replies until the schedule lets the server act."""
        drawing = isinstance(self._schedule, SendBuffers)
        draws = self._draws(version)
        missing = len(draws) if drawing else self._size
        quiet, self._rejections = self.now, 0
        for client in [client for client in draws if client in self._slots]:
            missing -= 1
            yield _counted(self._slots.pop(client), draws.pop(client))
        while missing > 0 and not (self.refused and self.refused.issuperset(self.roll.nodes)):
            self.look()
            self._dispatch(exchange, message, version)
            self._arrived.extend(self._pull())
            while self._arrived and missing > 0:
                client, answers = self._arrived.popleft()
                if answers is None:
                    self._retry.add(client)  # it may start from the same model again
                    continue
                quiet = self.now
                if drawing and client not in draws:
                    old = self._slots.get(client)
                    if old is not None:
                        self._gone.append((_job_of(old), "overwritten"))
                    self._slots[client] = answers
                    continue
                before = self._rejections
                yield _counted(answers, draws.pop(client, 1))
                # A rejected update does not count as an arrival, unless the server asked for it by name.
                missing -= 1 if drawing else 1 - (self._rejections - before)
            silent = [
                number
                for number, sent in self._under_way.items()
                if sent.header["client"] in draws and self.now - sent.at > self._timeout
            ]
            for client in self._give_up(silent):  # who was not drawn may take as long as it likes
                _say(f"client {client} has not answered for {self._timeout:g} s; the server goes on without it")
                self._retry.add(client)
                del draws[client]
                missing -= 1
            for client in [client for client in draws if client not in self.here]:
                draws.pop(client)
                missing -= 1
            if missing > 0:
                if self.now - quiet > self._timeout:
                    raise FedstrideError(
                        f"no client has answered for {self._timeout:g} s, and the server waits for {missing} updates"
                    )
                time.sleep(POLL)

    def look(self) -> None:
        """Who has come back gets a new chance."""
        for client in self.roll.look():
            if self._strikes.pop(client, 0):
                self.refused.discard(client)

    @property
    def here(self) -> list[int]:
        """Clients that can be asked."""
        return [client for client in self.roll.nodes if client not in self._aside]

    @property
    def _aside(self) -> set[int]:
        """Clients that have failed too often in a row."""
        return {client for client, strikes in self._strikes.items() if strikes >= PATIENCE}

    @property
    def _size(self) -> int:
        """Replies that make a server update."""
        return self._schedule.size if isinstance(self._schedule, Buffered) else self._schedule.n  # type: ignore[attr-defined]

    def _draws(self, version: int) -> dict[int, int]:
        """Under SendBuffers, whose updates the server asks for, and how often each counts."""
        if not isinstance(self._schedule, SendBuffers):
            return {}
        rng, here = generator(self._seed, "cohort", version + 1), self.here
        cohort = Uniform(self._schedule.n, replacement=True).draw(rng, np.full(len(here), 1 / len(here)), version + 1)
        return {here[place]: times for place, times in zip(cohort.clients.tolist(), cohort.times.tolist())}

    def _dispatch(self, exchange: Exchange, message: Any, version: int) -> None:
        """Give work to clients that have none: some, drawn by key, or whoever has not had this model."""
        busy = {sent.header["client"] for sent in self._under_way.values()}
        busy |= {client for client, _ in self._arrived}
        idle = [client for client in self.here if client not in busy]
        if isinstance(self._schedule, Buffered):
            room = (self._schedule.concurrency or len(self.roll.nodes)) - len(busy)
            while room > 0 and idle:
                place = draw(key(self._seed, "dispatch"), self._dispatches) * len(idle) >> 64
                self._dispatches, room = self._dispatches + 1, room - 1
                self._start(exchange, message, version, idle.pop(place))
            return
        for client in idle:
            if self._taken.get(client, -1) < version or client in self._retry:
                self._start(exchange, message, version, client)

    def _start(self, exchange: Exchange, message: Any, version: int, client: int) -> None:
        self._repeats[client] = self._repeats[client] + 1 if self._taken.get(client) == version else 0
        self._taken[client] = version
        self._retry.discard(client)
        target, steps, lr = single_job(self.plan, client, version)
        columns = (client, version, self._repeats[client], target, steps, lr, 1)
        if not self._push(exchange, message, Jobs(*(np.array([value]) for value in columns)), 0.0):
            self._retry.add(client)

    def _push(self, exchange: Exchange, message: Any, job: Jobs, budget: float) -> bool:
        """Send one request; False: the node has just left."""
        stage = "prologue" if exchange.insist else "round"
        client = int(job.clients[0])
        header = {
            "run": self._run, "client": client, "version": int(job.versions[0]), "repeat": int(job.repeats[0]),
            "stage": stage, "exchange": self._method.place(exchange), "target": int(job.targets[0]),
            "steps": int(job.steps[0]), "lr": float(job.lr[0]), "budget": budget, "fleet": self.plan.fleet.clients,
            "trains": exchange.name == "train", "accepted": self._accepted.get(client, ""),
            "durable": self._durable.get(client, ""),
        }  # fmt: skip
        content = wire.pack(header, message, self._half)
        request = Message(
            content, dst_node_id=self.roll.nodes[client], message_type="train", group_id=str(header["version"])
        )
        (number,) = self._grid.push_messages([request])
        if not number:
            self.roll.lose(client)
            return False
        self.sent += 1
        self._under_way[number] = Sent(header, int(job.times[0]), self.now)
        return True

    def _pull(self) -> Iterator[tuple[int, Answers | None]]:
        """Whatever has come: the client, and its answer or None if it failed."""
        for reply in self._fetched(list(self._under_way)):
            sent = self._under_way.pop(reply.metadata.reply_to_message_id, None)
            if sent is None:
                continue  # twice the same
            client = sent.header["client"]
            if reply.has_error():
                _say(f"client {client} failed: {reply.error.reason}")
                self._strike(client)
                self._gone.append((self._job(sent), "lost"))
                yield client, None
                continue
            yield client, self._read(reply.content, sent)

    def _fetched(self, waiting: list[str]) -> Iterator[Message]:
        """What has come, a few uploads at a time, so that a large fleet does not fill the memory."""
        for start in range(0, len(waiting), self._at_once):
            yield from self._grid.pull_messages(waiting[start : start + self._at_once])

    def _read(self, content: Any, sent: Sent) -> Answers:
        """A reply as an answer; what is not of the right form becomes an upload that is not finite, and is rejected."""
        asked, (expected, trained) = sent.header, self._expected[self._place(sent.header)]
        try:
            header, fields = wire.unpack(content)
            told = {name: header.get(name) for name in ECHO}
            if told != {name: asked[name] for name in ECHO}:
                raise FedstrideError(f"it answers {told}")
            lengths = {name: value.numel() if isinstance(value, Tensor) else 0 for name, value in fields.items()}
            if lengths != expected:
                raise FedstrideError(f"it has fields of the lengths {lengths}, not {expected}")
            steps, seconds, loss = int(header["steps"]), float(header["seconds"]), float(header.get("loss", 0.0))
            if not 1 <= steps <= asked["steps"] or not 0 <= seconds < float("inf"):
                raise FedstrideError(f"it claims {steps} steps of {asked['steps']} in {seconds} s")
            if ("loss" in header) != trained or math.isnan(loss):
                raise FedstrideError(f"it tells a loss of {header.get('loss')}")
        except (FedstrideError, KeyError, TypeError, ValueError, OverflowError) as error:
            _say(f"the reply of client {asked['client']} is refused: {error}")
            fields = {name: torch.full((length,), float("nan")) for name, length in expected.items()}
            steps, seconds, loss = asked["steps"], 0.0, float("nan")
        columns = (
            asked["client"], asked["version"], asked["repeat"], asked["target"], steps, asked["lr"], sent.times
        )  # fmt: skip
        arrival = self.now
        span = np.array([[max(sent.at, arrival - seconds), arrival, arrival]])
        losses = torch.tensor([loss], dtype=self._x.dtype) if trained else None
        job = Jobs(*(np.array([value]) for value in columns))
        return Answers(job, wire.rows(fields, self._x), asked, losses, span)

    @staticmethod
    def _place(header: dict[str, Any]) -> str:
        return f"{header['stage']}.{header['exchange']}"

    @staticmethod
    def _job(sent: Sent) -> Job:
        names = ("client", "version", "repeat", "target", "steps", "lr")
        return Job(**{name: sent.header[name] for name in names}, start=sent.at, end=sent.at, lost=True)

    def keep(self, answers: Answers, used: np.ndarray) -> None:
        """Remember whose upload was used; the next request tells the client."""
        header, good = answers.memory, bool(used[0])
        client = header["client"]
        if good:
            self._strikes[client] = 0
            self._accepted[client] = job_name(header)
            self.refused = set(self._aside)
        else:
            self._strike(client)
            self._rejections += 1
            self.refused.add(client)

    def _give_up(self, numbers: list[str]) -> list[int]:
        """Requests that are not answered; whose they were."""
        silent = [self._under_way.pop(number) for number in numbers]
        self._gone += [(self._job(sent), "lost") for sent in silent]
        for sent in silent:
            self._strike(sent.header["client"])
        return [sent.header["client"] for sent in silent]

    def _strike(self, client: int) -> None:
        self._strikes[client] = self._strikes.get(client, 0) + 1
        if self._strikes[client] == PATIENCE:
            _say(f"client {client} has failed or sent useless uploads {PATIENCE} times in a row and is set aside")
            self.refused.add(client)

    def gone(self) -> list[tuple[Job, str]]:
        """Jobs of which nothing came."""
        gone, self._gone = self._gone, []
        return gone

    def under_way(self) -> list[Job]:
        """Jobs that have not come back."""
        return [self._job(sent)._replace(lost=False) for sent in self._under_way.values()]

    def dump(self) -> dict[str, Any]:
        """What a restarted server must know: whose uploads it has used. All else under way is asked for again."""
        self._durable = dict(self._accepted)
        return {
            "accepted": list(map(list, self._accepted.items())), "dispatches": self._dispatches,
            "strikes": list(map(list, self._strikes.items())), "sizes": list(map(list, self.roll.sizes.items())),
            "here": self.here,
        }  # fmt: skip

    def load(self, stored: dict[str, Any], now: float) -> None:
        """Undo `dump`."""
        self._accepted = {client: job for client, job in stored["accepted"]}
        self._durable, self._strikes = dict(self._accepted), {client: count for client, count in stored["strikes"]}
        self._dispatches = stored["dispatches"]
        self.roll.sizes.update({client: size for client, size in stored["sizes"]})
        self.awaited = set(stored["here"])
        self._origin = time.monotonic() - now


def _job_of(answers: Answers) -> Job:
    header, (start, end, _) = answers.memory, answers.spans[0].tolist()
    names = ("client", "version", "repeat", "target", "steps", "lr")
    return Job(**{name: header[name] for name in names}, start=start, end=end, lost=False)


def _counted(answers: Answers, times: int) -> Answers:
    return answers._replace(jobs=answers.jobs._replace(times=np.array([times])))


def _say(words: str) -> None:
    sys.stderr.write(words + "\n")
