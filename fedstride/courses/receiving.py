"""FirstArrivals and SendBuffers: clients with receive buffers, and with send buffers."""

from typing import Any, ClassVar

import numpy as np

from fedstride.clock import ARRIVAL, CLIENT, SERVER
from fedstride.courses.base import Course, Job, Work, some
from fedstride.errors import FedstrideError
from fedstride.keys import generator
from fedstride.participation import Uniform
from fedstride.world import Costs


class _Receiving(Course):
    """Clients with a one-slot receive buffer: every new model is sent to all and overwrites what lies there.

    A client takes its newest model as soon as it is free and clears the buffer; with an empty buffer it is idle. Who
    drops out on the way tries again, from a newer model if there is one.
    """

    state: ClassVar[tuple[str, ...]] = ("waiting", "ready", "retry", "broadcasts")

    def __init__(self, costs: Costs, work: Work, seed: int, now: float):
        super().__init__(costs, work, seed, now)
        self.waiting = list(range(len(costs.step)))  # idle, buffer empty
        self.ready: list[int] = []  # free at this moment
        self.retry: set[int] = set()  # lost their last job
        self.broadcasts: list[list] = []  # versions that may still be taken, and when they were sent

    @property
    def versions(self) -> set[int]:
        return {version for version, _ in self.broadcasts}

    def publish(self, version: int) -> None:
        now, slowest = self.clock.now, self.costs.slowest
        self.version = version
        self.sent += len(self.taken)
        self.broadcasts.append([version, now])
        while len(self.broadcasts) > 1 and self.broadcasts[1][1] + slowest <= now:
            self.broadcasts.pop(0)  # everybody has a newer one
        arrivals: dict[float, list[int]] = {}
        for client in self.waiting:
            arrivals.setdefault(now + self.costs.down[client], []).append(client)
        self.waiting = []
        for time, clients in arrivals.items():
            self.clock.push(time, CLIENT, "model", clients)

    def _free(self, client: int) -> None:
        """The client looks into its receive buffer, after all arrivals of this moment."""
        if not self.ready:
            self.clock.push(self.clock.now, CLIENT, "model")
        self.ready.append(client)

    def _look(self, clients: list[int] | None) -> None:
        """These clients start, if there is a model for them; None: those that have become free."""
        if clients is None:
            clients, self.ready = self.ready, []
        now = self.clock.now
        for client in clients:
            down = self.costs.down[client]
            newest = next((v for v, sent in reversed(self.broadcasts) if sent + down <= now), -1)
            if newest <= self.taken[client] and client not in self.retry:
                self._await_model(client)
                continue
            version = max(newest, self.taken[client])
            there, since = self._presence(client, version)
            if since == float("inf"):
                self._await_model(client)
            elif since > now:
                self.clock.push(since, CLIENT, "model", [client])
            else:
                self.retry.discard(client)
                number = self._start(client, version, now, not there)
                self._started(number, self.jobs[number])

    def _await_model(self, client: int) -> None:
        """The client looks again when the next model comes: one that is on its way, or one not sent yet."""
        down = self.costs.down[client]
        coming = [sent + down for _, sent in self.broadcasts if sent + down > self.clock.now]
        if coming:
            self.clock.push(coming[0], CLIENT, "model", [client])
        else:
            self.waiting.append(client)

    def _started(self, number: int, job: Job) -> None:
        raise NotImplementedError


class FirstArrivalsCourse(_Receiving):
    """DLSGD-homo's: the server acts on the first n arrivals; a client is busy until its update has been sent."""

    def __init__(self, costs: Costs, work: Work, seed: int, now: float, n: int):
        super().__init__(costs, work, seed, now)
        self.n = n

    def publish(self, version: int) -> None:
        self.missing = self.n
        super().publish(version)

    def _started(self, number: int, job: Job) -> None:
        if not job.lost:
            self.needed[number] = None
        self.clock.push(job.end + self.costs.up[job.client], ARRIVAL, "arrival", number)

    def handle(self, kind: str, subject: Any) -> int | None:
        if kind == "model":
            self._look(subject)
            return None
        job = self.jobs[subject]
        self._free(job.client)
        if job.lost:
            self.retry.add(job.client)
            self._forget(subject, "lost")
            return None
        return subject

    def stalled(self) -> str:
        return (
            f"the server has {self.n - self.missing} of {self.n} updates and nobody is at work: clients "
            f"{some(self.waiting)} wait for a newer model or are away and not known to come back; lower n, or let them "
            "come back"
        )


class SendBuffersCourse(_Receiving):
    """DLSGD-hetero's: the server asks a multiset of clients, drawn by key, and waits for those with nothing to send.

    A finished update lies in the client's one-slot send buffer until it is asked for or overwritten; uploads do not
    keep a client from training. `resend`: the buffer keeps what was sent, and sends it again if asked.
    """

    state = (*_Receiving.state, "slots", "running", "asked", "draws")

    def __init__(self, costs: Costs, work: Work, seed: int, now: float, n: int, resend: bool):
        super().__init__(costs, work, seed, now)
        self.n, self.resend = n, resend
        if resend and max(costs.step) > 0 and max(costs.up) == max(costs.latency) == 0:
            raise FedstrideError(
                "resend needs links that take time: otherwise the server acts on the same updates for ever while the "
                "clock stands still; give the world links, such as fs.links.bandwidth(1e9, latency=0.01)"
            )
        self.slots: dict[int, int] = {}  # client -> finished job
        self.running: dict[int, int] = {}  # client -> job in training
        self.asked: set[int] = set()  # clients whose next update goes straight to the server
        self.draws: dict[int, int] = {}  # client -> how often the server drew it

    def publish(self, version: int) -> None:
        super().publish(version)
        self.asked.clear()  # who was away is left when all others' updates were refused: the server goes on without it
        rng, everybody = generator(self.seed, "cohort", version + 1), np.ones(len(self.taken))
        cohort = Uniform(self.n, replacement=True).draw(rng, everybody, version + 1)
        self.draws = dict(zip(cohort.clients.tolist(), cohort.times.tolist()))
        self.missing = len(self.draws)
        requests: dict[float, list[int]] = {}
        for client in self.draws:
            requests.setdefault(self.costs.latency[client], []).append(client)
        for latency, clients in requests.items():
            self.clock.push(self.clock.now + latency, SERVER, "request", clients)

    def refuse(self, count: int) -> None:
        """The server asked these clients by name and does not ask again."""

    def times(self, number: int) -> int:
        return self.draws[self.jobs[number].client]

    def release(self, number: int) -> None:
        self.held.discard(number)
        if self.slots.get(self.jobs[number].client) != number and number not in self.needed:
            super().release(number)

    def _started(self, number: int, job: Job) -> None:
        self.running[job.client] = number
        if job.client in self.asked and not job.lost:
            self.needed[number] = None
        self.clock.push(job.end, CLIENT, "finish", number)

    def handle(self, kind: str, subject: Any) -> int | None:
        if kind == "model":
            self._look(subject)
        elif kind == "finish":
            self._finish(subject)
        elif kind == "request":
            for client in subject:
                self._request(client)
        else:
            return subject
        return None

    def _finish(self, number: int) -> None:
        job = self.jobs[number]
        del self.running[job.client]
        self._free(job.client)
        if job.lost:
            self.retry.add(job.client)
            self._forget(number, "lost")
            return
        wanted = job.client in self.asked
        if wanted:
            self.asked.discard(job.client)
            self._send(number)
        if not wanted or self.resend:
            old = self.slots.get(job.client)
            self.slots[job.client] = number
            if old is not None and old not in self.needed and old not in self.held:
                self._forget(old, "overwritten")

    def _request(self, client: int) -> None:
        if client in self.slots:
            self._send(self.slots[client] if self.resend else self.slots.pop(client))
            return
        self.asked.add(client)
        number = self.running.get(client)
        if number is not None and not self.jobs[number].lost:
            self.needed[number] = None

    def _send(self, number: int) -> None:
        self.needed[number] = None
        self.clock.push(self.clock.now + self.costs.up[self.jobs[number].client], ARRIVAL, "arrival", number)

    def stalled(self) -> str:
        return (
            f"the server waits for clients {some(sorted(self.asked))}, which it drew, but they are away and not known "
            "to come back; use an availability that says when, such as cycle or a trace"
        )
