"""Buffered: a fixed number of clients at work."""

from typing import Any

from fedstride.clock import ARRIVAL, SERVER
from fedstride.courses.base import Course, Work, some
from fedstride.keys import draw, key
from fedstride.world import Costs


class BufferedCourse(Course):
    """FedBuff's: so many clients at work; who has sent is replaced by an idle one, drawn by key, at once."""

    state = ("idle", "free", "dispatches", "alarm", "planned")

    def __init__(self, costs: Costs, work: Work, seed: int, now: float, concurrency: int | None, size: int):
        super().__init__(costs, work, seed, now)
        self.size = size
        self.idle = list(range(len(costs.step)))
        self.free = len(self.idle) if concurrency is None else int(concurrency)
        self.dispatches = 0  # draws so far
        self.alarm = -1.0  # when an absent client will be back
        self.planned = -1.0  # the moment of the dispatch that is planned
        self._key = key(seed, "dispatch")

    def publish(self, version: int) -> None:
        self.version, self.missing = version, self.size
        if not len(self.clock):
            self._plan()

    def _plan(self) -> None:
        """One dispatch a moment, after all arrivals of that moment."""
        if self.planned != self.clock.now:
            self.planned = self.clock.now
            self.clock.push(self.clock.now, SERVER, "dispatch")

    def handle(self, kind: str, subject: Any) -> int | None:
        if kind == "dispatch":
            self._dispatch()
            return None
        job = self.jobs[subject]
        self.idle.append(job.client)
        self.free += 1
        self._plan()
        if job.lost:  # the server learns of it when the answer is due
            self._forget(subject, "lost")
            return None
        return subject

    def _dispatch(self) -> None:
        self.planned = -1.0
        now, absent, back = self.clock.now, [], float("inf")
        while self.free and self.idle:
            place = draw(self._key, self.dispatches) * len(self.idle) >> 64
            self.dispatches += 1
            self.idle[place], self.idle[-1] = self.idle[-1], self.idle[place]
            client = self.idle.pop()
            there, since = self._presence(client, self.version)
            if since > now:
                absent.append(client)
                back = min(back, since)
                continue
            self.free -= 1
            self.sent += 1
            number = self._start(client, self.version, now + self.costs.down[client], not there)
            if there:
                self.needed[number] = None
            self.clock.push(self.jobs[number].end + self.costs.up[client], ARRIVAL, "arrival", number)
        self.idle += absent
        if self.free and now < back < float("inf") and not now < self.alarm <= back:
            self.alarm = back
            self.clock.push(back, SERVER, "dispatch")

    def stalled(self) -> str:
        return (
            f"nobody is at work and nobody can be sent for: clients {some(self.idle)} are away and not known to come "
            f"back; the server has {self.size - self.missing} of {self.size} updates; let clients come back, or lower "
            "the size"
        )
