"""What all asynchronous schedules share: jobs, the clock, and which results the server is going to need."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from fedstride.clock import Clock
from fedstride.world import Costs

Work = Callable[[int, int], tuple[int, int, float]]  # client, version -> steps asked for, steps done, learning rate


STATE = ("version", "missing", "sent", "started", "taken", "repeats")  # what a checkpoint holds of every course


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
        self.missing = 0  # replies the server still waits for
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
        return self.missing <= 0

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
                self.missing -= 1
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
        """So many of the results were not usable: the server goes on waiting for others."""
        self.missing += count

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
        names = (*STATE, *self.state)
        return {name: _plain(getattr(self, name)) for name in names} | {
            "clock": self.clock.dump(),
            "jobs": [[number, *job] for number, job in self.jobs.items()],
            "needed": list(self.needed),
        }

    def load(self, stored: dict[str, Any]) -> None:
        """Undo `dump`."""
        for name in (*STATE, *self.state):
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


def some(clients: list[int]) -> str:
    """A few of them, and how many more."""
    return f"{clients[:8]}" if len(clients) <= 8 else f"{clients[:8]} and {len(clients) - 8} more"
