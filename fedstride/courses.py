"""What happens when in an asynchronous run: clients that start, finish and send, a server that takes what arrives.

A course knows who and when, never what: no vectors pass through it. The simulator asks it for the next reply that
reaches the server and computes the content then, or never, if nobody asks. All of its state is plain data.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from fedstride.clock import ARRIVAL, CLIENT, SERVER, Clock
from fedstride.errors import FedstrideError
from fedstride.keys import draw, generator, key
from fedstride.participation import Uniform
from fedstride.world import Costs

Work = Callable[[int, int], tuple[int, int, float]]  # client, version -> steps asked for, steps done, learning rate


class Job(NamedTuple):
    """One client's training from one version of the model."""

    client: int
    version: int
    repeat: int  # how often the client started from that version before
    target: int  # steps asked for
    steps: int  # steps done
    lr: float
    start: float  # when training begins
    end: float  # when it ends
    lost: bool  # the client drops out on the way: nothing will come of it


class Course:
    """What all asynchronous schedules share: jobs, the clock, and which results the server is going to need."""

    state: ClassVar[tuple[str, ...]] = ()  # further attributes a checkpoint must hold

    def __init__(self, costs: Costs, work: Work, seed: int, now: float = 0.0):
        count = len(costs.step)
        self.costs, self.work, self.seed = costs, work, seed
        self.clock = Clock(now)
        self.version = -1  # newest model
        self.sent = 0  # messages to clients so far
        self.started = 0  # jobs so far; their numbers
        self.jobs: dict[int, Job] = {}  # in training, in a send buffer or on the way
        self.needed: dict[int, None] = {}  # those that will reach the server for certain, in the order this was known
        self.held: set[int] = set()  # those that have reached it and were not handed over yet
        self.taken = [-1] * count  # every client's last version
        self.repeats = [0] * count
        self.gone: list[tuple[Job, str]] = []  # jobs of which nothing came, and why; for the timeline

    def publish(self, version: int) -> None:
        """The server has a new model."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether the server acts now."""
        raise NotImplementedError

    @property
    def versions(self) -> set[int]:
        """Models a client may still start from."""
        return {self.version}

    def times(self, number: int) -> int:
        """How often a reply counts."""
        return 1

    def handle(self, kind: str, subject: Any) -> int | None:
        """Let an event happen; returns the number of a job whose result has reached the server."""
        raise NotImplementedError

    def advance(self) -> int | None:
        """Go on to the next reply that reaches the server; None: nothing will happen until there is a new model."""
        while len(self.clock):
            number = self.handle(*self.clock.pop())
            if number is not None:
                del self.needed[number]
                self.held.add(number)
                return number
        return None

    def stalled(self) -> str:
        """Why nothing can happen any more."""
        raise NotImplementedError

    def release(self, number: int) -> None:
        """The server has taken this result in."""
        self.held.discard(number)
        del self.jobs[number]

    def refuse(self, count: int) -> None:
        """So many of the results were not usable: the server goes on waiting for others, if it waits for a number."""

    def _start(self, client: int, version: int, at: float, lost: bool) -> int:
        """A client begins to train."""
        again = self.taken[client] == version
        self.repeats[client] = self.repeats[client] + 1 if again else 0
        self.taken[client] = version
        target, steps, lr = self.work(client, version)
        end = at + (steps + self.costs.extra[client]) * self.costs.step[client]
        number, self.started = self.started, self.started + 1
        self.jobs[number] = Job(client, version, self.repeats[client], target, steps, lr, at, end, lost)
        return number

    def _presence(self, client: int, version: int) -> tuple[bool, float]:
        """Whether the client's next job will come to something, and when it is there to begin it."""
        repeat = self.repeats[client] + 1 if self.taken[client] == version else 0
        return self.costs.presence(client, version, repeat, self.clock.now)

    def _forget(self, number: int, why: str) -> None:
        self.gone.append((self.jobs.pop(number), why))
        self.needed.pop(number, None)

    def dump(self) -> dict[str, Any]:
        """Everything as plain data."""
        names = ("version", "sent", "started", "taken", "repeats", *self.state)
        return {name: _plain(getattr(self, name)) for name in names} | {
            "clock": self.clock.dump(),
            "jobs": [[number, *job] for number, job in self.jobs.items()],
            "needed": list(self.needed),
        }

    def load(self, stored: dict[str, Any]) -> None:
        """Undo `dump`."""
        for name in ("version", "sent", "started", "taken", "repeats", *self.state):
            old = getattr(self, name)
            pairs = isinstance(old, dict)
            setattr(self, name, {a: b for a, b in stored[name]} if pairs else type(old)(stored[name]))
        self.clock.load(stored["clock"])
        self.jobs = {number: Job(*job) for number, *job in stored["jobs"]}
        self.needed = dict.fromkeys(stored["needed"])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return list(value.items())
    return sorted(value) if isinstance(value, set) else value


class BufferedCourse(Course):
    """FedBuff's: so many clients at work; who has sent is replaced by an idle one, drawn by key, at once."""

    state = ("idle", "free", "arrived", "dispatches", "alarm", "planned")

    def __init__(self, costs: Costs, work: Work, seed: int, now: float, concurrency: int | None, size: int):
        super().__init__(costs, work, seed, now)
        self.size = size
        self.idle = list(range(len(costs.step)))
        self.free = len(self.idle) if concurrency is None else int(concurrency)
        self.arrived = 0  # since the server acted
        self.dispatches = 0  # draws so far
        self.alarm = -1.0  # when an absent client will be back
        self.planned = -1.0  # the moment of the dispatch that is planned
        self._key = key(seed, "dispatch")

    def publish(self, version: int) -> None:
        self.version, self.arrived = version, 0
        if not len(self.clock):
            self._plan()

    @property
    def closed(self) -> bool:
        return self.arrived >= self.size

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
        self.arrived += 1
        return subject

    def refuse(self, count: int) -> None:
        self.arrived -= count

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
            f"nobody is at work and nobody can be sent for: clients {_some(self.idle)} are away and not known to come "
            f"back; the server has {self.arrived} of {self.size} updates; let clients come back, or lower the size"
        )


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
                coming = [sent + down for v, sent in self.broadcasts if v > self.taken[client]]
                if coming:
                    self.clock.push(coming[0], CLIENT, "model", [client])
                else:
                    self.waiting.append(client)
                continue
            version = max(newest, self.taken[client])
            there, since = self._presence(client, version)
            if since == float("inf"):
                self.waiting.append(client)  # looks again when the next model comes
            elif since > now:
                self.clock.push(since, CLIENT, "model", [client])
            else:
                self.retry.discard(client)
                number = self._start(client, version, now, not there)
                self._started(number, self.jobs[number])

    def _started(self, number: int, job: Job) -> None:
        raise NotImplementedError


class FirstArrivalsCourse(_Receiving):
    """DLSGD-homo's: the server acts on the first n arrivals; a client is busy until its update has been sent."""

    state = (*_Receiving.state, "arrived")

    def __init__(self, costs: Costs, work: Work, seed: int, now: float, n: int):
        super().__init__(costs, work, seed, now)
        self.n = n
        self.arrived = 0

    def publish(self, version: int) -> None:
        self.arrived = 0
        super().publish(version)

    @property
    def closed(self) -> bool:
        return self.arrived >= self.n

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
        self.arrived += 1
        return subject

    def refuse(self, count: int) -> None:
        self.arrived -= count

    def stalled(self) -> str:
        return (
            f"the server has {self.arrived} of {self.n} updates and nobody is at work: clients {_some(self.waiting)} "
            "wait for a newer model or are away and not known to come back; lower n, or let them come back"
        )


class SendBuffersCourse(_Receiving):
    """DLSGD-hetero's: the server asks a multiset of clients, drawn by key, and waits for those with nothing to send.

    A finished update lies in the client's one-slot send buffer until it is asked for or overwritten; uploads do not
    keep a client from training. `resend`: the buffer keeps what was sent, and sends it again if asked.
    """

    state = (*_Receiving.state, "slots", "running", "asked", "draws", "awaited")

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
        self.awaited = 0

    def publish(self, version: int) -> None:
        super().publish(version)
        rng, weights = generator(self.seed, "cohort", version + 1), self.costs.even
        cohort = Uniform(self.n, replacement=True).draw(rng, weights, version + 1)
        self.draws = dict(zip(cohort.clients.tolist(), cohort.times.tolist()))
        self.awaited = len(self.draws)
        requests: dict[float, list[int]] = {}
        for client in self.draws:
            requests.setdefault(self.costs.latency[client], []).append(client)
        for latency, clients in requests.items():
            self.clock.push(self.clock.now + latency, SERVER, "request", clients)

    @property
    def closed(self) -> bool:
        return self.awaited == 0

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
            self.awaited -= 1
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
            f"the server waits for clients {_some(sorted(self.asked))}, which it drew, but they are away and not known "
            "to come back; use an availability that says when, such as cycle or a trace"
        )


class ReplayCourse(Course):
    """Somebody else's run: who trained from which version, and in which order it reached the server."""

    state = ("place", "queues")

    def __init__(self, costs: Costs, work: Work, seed: int, now: float, updates: tuple):
        super().__init__(costs, work, seed, now)
        self.updates = updates
        self.place = 0  # replies of this update so far
        self.queues: dict[int, list[int]] = {}  # client -> its jobs from known models, in order
        self._of_version: dict[int, list[tuple[int, int]]] = {}
        for position, update in enumerate(updates):
            for place, row in enumerate(update["jobs"]):
                self._of_version.setdefault(row["version"], []).append((position, place))
        self._first = [0]  # the number of every update's first job
        for update in updates:
            self._first.append(self._first[-1] + len(update["jobs"]))

    def publish(self, version: int) -> None:
        self.version, self.place = version, 0
        self.sent += self.updates[version]["sent"]
        self.clock.now = self.updates[version]["seconds"]
        for position, place in self._of_version.get(version, ()):
            row, number = self.updates[position]["jobs"][place], self._first[position] + place
            _, _, lr = self.work(row["client"], version)
            self.jobs[number] = Job(
                row["client"], version, row["repeat"], row["target"], row["steps"], lr, row["start"], row["end"], False
            )
            queue = self.queues.setdefault(row["client"], [])
            queue.append(number)
            queue.sort()
        for queue in self.queues.values():
            self.needed.setdefault(queue[0], None)  # a client's next job builds on the memory of the one before

    @property
    def closed(self) -> bool:
        return self.place >= len(self.updates[self.version]["jobs"])

    def times(self, number: int) -> int:
        position = self.version
        return self.updates[position]["jobs"][number - self._first[position]]["times"]

    def advance(self) -> int:
        number = self._first[self.version] + self.place
        self.place += 1
        self.needed.pop(number, None)
        return number

    def release(self, number: int) -> None:
        client = self.jobs[number].client
        super().release(number)
        self.queues[client].remove(number)
        if not self.queues[client]:
            del self.queues[client]
        elif self.queues[client][0] >= self._first[self.version] + self.place:  # it has not reached the server yet
            self.needed[self.queues[client][0]] = None


def _some(clients: list[int]) -> str:
    return f"{clients[:8]}" if len(clients) <= 8 else f"{clients[:8]} and {len(clients) - 8} more"
