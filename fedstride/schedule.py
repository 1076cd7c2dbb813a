"""When clients start and when the server acts."""

import hashlib
import json
import numbers
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedstride import courses
from fedstride.errors import FedstrideError
from fedstride.participation import Weighted
from fedstride.world import Costs


class Schedule:
    """Rounds with a cohort each, unless `asynchronous`: then a course says what happens when."""

    asynchronous: ClassVar[bool] = False
    memoryless: ClassVar[bool] = False  # clients train on before the server has seen their last update
    participation: Any = None  # who takes part in a round; None: the run's own

    def check(self, count: int, rounds: int) -> None:
        """Refuse what cannot work with this fleet."""

    def course(self, costs: Costs, work: courses.Work, seed: int, now: float) -> courses.Course:
        """What happens when, for one run."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sync(Schedule):
    """Rounds: a cohort starts together and the server waits for all of it."""

    participation: Any = None


@dataclass(frozen=True)
class Deadline(Schedule):
    """Rounds that end after so many seconds: who is late hands in the steps it has done ("cut") or nothing ("drop").

    Only the training exchange is cut; a cut client's upload comes after the deadline. The seconds count from the moment
    the server sends the model.
    """

    seconds: float
    late: str = "cut"
    participation: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, numbers.Real) or not 0 < float(self.seconds) < float("inf"):
            raise FedstrideError(f"a deadline must be a positive number of seconds, not {self.seconds!r}")
        if self.late not in ("cut", "drop"):
            raise FedstrideError(f"late must be 'cut' or 'drop', not {self.late!r}")


@dataclass(frozen=True)
class Buffered(Schedule):
    """So many clients are always at work; the server acts whenever so many updates have arrived (FedBuff).

    A client that has sent its update is replaced at once by an idle one, drawn with equal chances, which starts from
    the newest model. `concurrency` None: the whole fleet is at work. `size` 1 is FedAsync's rule.
    """

    asynchronous = True
    concurrency: int | None = None
    size: int = 1

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            _check_count("concurrency", self.concurrency)
        _check_count("size", self.size)

    def check(self, count: int, rounds: int) -> None:
        if self.concurrency is not None and self.concurrency > count:
            raise FedstrideError(
                f"a concurrency of {self.concurrency} is more than the fleet, which has {count} clients"
            )
        if self.size > count:
            raise FedstrideError(f"a buffer of {self.size} updates is more than the fleet, which has {count} clients")

    def course(self, costs: Costs, work: courses.Work, seed: int, now: float) -> courses.Course:
        return courses.BufferedCourse(costs, work, seed, now, self.concurrency, self.size)


@dataclass(frozen=True)
class FirstArrivals(Schedule):
    """The server acts on the first n updates and sends the new model to everybody (DLSGD-homo).

    Every client has a one-slot receive buffer. It trains from the newest model there, sends, and goes on with the next;
    with an empty buffer it is idle.
    """

    asynchronous = True
    n: int

    def __post_init__(self) -> None:
        _check_count("n", self.n)

    def check(self, count: int, rounds: int) -> None:
        _check_n(self.n, count)

    def course(self, costs: Costs, work: courses.Work, seed: int, now: float) -> courses.Course:
        return courses.FirstArrivalsCourse(costs, work, seed, now, self.n)


@dataclass(frozen=True)
class SendBuffers(Schedule):
    """The server draws n clients, with replacement, and waits for an update of each of them (DLSGD-hetero).

    Every client has a one-slot receive buffer and a one-slot send buffer: it trains on from the newest model, and a
    newer update overwrites an older one nobody asked for. What was sent is cleared, unless `resend`.
    """

    asynchronous = True
    memoryless = True
    n: int
    resend: bool = False

    def __post_init__(self) -> None:
        _check_count("n", self.n)

    def check(self, count: int, rounds: int) -> None:
        _check_n(self.n, count)

    def course(self, costs: Costs, work: courses.Work, seed: int, now: float) -> courses.Course:
        return courses.SendBuffersCourse(costs, work, seed, now, self.n, self.resend)


@dataclass(frozen=True)
class Replay(Schedule):
    """Follows a trace, `result.timeline.trace()`: who trained from which version, in which order it was used."""

    asynchronous = True
    trace: Iterable[dict[str, Any]] = field(repr=False)
    participation: Any = field(init=False, default=None, repr=False)
    digest: str = field(init=False, default="")

    def __post_init__(self) -> None:
        try:
            updates = tuple(json.loads(json.dumps(list(self.trace))))
            for update in updates:
                _check_trace(update, ("sent", "by_weight"), ("seconds",))
                for job in update["jobs"]:
                    names = ("client", "version", "repeat", "target", "steps", "times")
                    _check_trace(job, names, ("start", "end"))
        except (TypeError, ValueError, KeyError) as error:
            raise FedstrideError(f"this is not a trace, such as result.timeline.trace() gives: {error!r}") from None
        object.__setattr__(self, "trace", updates)
        if any(update["by_weight"] for update in updates):  # the draws carried the weights, so replies count m_i / n
            object.__setattr__(self, "participation", Weighted(1))
        object.__setattr__(self, "digest", hashlib.sha256(json.dumps(updates).encode()).hexdigest()[:16])

    def check(self, count: int, rounds: int) -> None:
        updates = tuple(self.trace)
        if len(updates) < rounds:
            raise FedstrideError(f"the trace has {len(updates)} server updates; {rounds} rounds were asked for")
        newest = [-1] * count
        for number, update in enumerate(updates):
            for job in update["jobs"]:
                if not 0 <= job["client"] < count:
                    raise FedstrideError(f"the trace names client {job['client']}; clients are 0 to {count - 1}")
                if not 0 <= job["version"] <= number:
                    raise FedstrideError(
                        f"update {number + 1} of the trace uses version {job['version']} before it exists"
                    )
                if job["version"] < newest[job["client"]]:
                    raise FedstrideError(
                        f"in update {number + 1} of the trace client {job['client']} goes back to an older model"
                    )
                newest[job["client"]] = job["version"]

    def course(self, costs: Costs, work: courses.Work, seed: int, now: float) -> courses.Course:
        return courses.ReplayCourse(costs, work, seed, now, tuple(self.trace))


def _check_trace(row: dict[str, Any], counts: tuple[str, ...], times: tuple[str, ...]) -> None:
    for name in counts:
        if not isinstance(row[name], int) or row[name] < (name in ("target", "steps", "times")):
            raise ValueError(f"{name} is {row[name]!r}")
    for name in times:
        if not isinstance(row[name], (int, float)) or not row[name] >= 0:
            raise ValueError(f"{name} is {row[name]!r}")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, numbers.Integral) or value < 1:
        raise FedstrideError(f"{name} must be a whole number from 1, not {value!r}")


def _check_n(n: int, count: int) -> None:
    if n > count:
        raise FedstrideError(f"the server would wait for n={n} updates, but the fleet has {count} clients; lower n")
