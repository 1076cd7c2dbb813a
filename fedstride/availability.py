"""Who is there: clients that drop out of a job, and clients that come and go."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedstride.errors import FedstrideError
from fedstride.keys import generator
from fedstride.sampling import Jobs


class Availability:
    """A rule for who answers."""

    chance: ClassVar[bool] = False  # absence is bad luck of one job, not being away

    def check(self, count: int) -> None:
        """Refuse a rule under which nobody can ever answer."""

    def answers(self, jobs: Jobs, now: float, seed: int) -> np.ndarray:
        """[C]: who of those asked at this moment will answer."""
        raise NotImplementedError

    def wake(self, jobs: Jobs, now: float, seed: int) -> float:
        """When, from now on, the first of those asked is there; infinity: never, as far as can be known."""
        return float("inf")


@dataclass(frozen=True)
class Dropout(Availability):
    """A client asked in a round is lost for that round with probability p."""

    chance = True
    p: float

    def check(self, count: int) -> None:
        if not isinstance(self.p, Real) or not 0 <= self.p < 1:
            raise FedstrideError(f"availability: a drop-out probability of {self.p!r} must be from 0 to below 1")

    def answers(self, jobs: Jobs, now: float, seed: int) -> np.ndarray:
        keys = zip(jobs.clients.tolist(), jobs.versions.tolist(), jobs.repeats.tolist())
        return np.array([generator(seed, "dropout", *key).random() >= self.p for key in keys], dtype=bool)

    def wake(self, jobs: Jobs, now: float, seed: int) -> float:
        return now  # an unlucky round is a round


@dataclass(frozen=True)
class Cycle(Availability):
    """Clients come and go: `on` seconds there in every `period`, each with a phase of its own (or in step)."""

    on: float
    period: float
    together: bool = False

    def check(self, count: int) -> None:
        if not all(isinstance(v, Real) for v in (self.on, self.period)) or not 0 < self.on <= self.period < np.inf:
            raise FedstrideError(f"availability: needs 0 < on <= period, not on={self.on!r}, period={self.period!r}")

    def answers(self, jobs: Jobs, now: float, seed: int) -> np.ndarray:
        return self._position(jobs, now, seed) < self.on

    def wake(self, jobs: Jobs, now: float, seed: int) -> float:
        # A hair later than the exact moment, which rounding could put before it.
        return now + float((self.period - self._position(jobs, now, seed)).min()) + 1e-9 * self.period

    def _position(self, jobs: Jobs, now: float, seed: int) -> np.ndarray:
        """Where in its period every client is."""
        phases = [0.0 if self.together else generator(seed, "phase", int(client)).random() for client in jobs.clients]
        return (now + np.array(phases) * self.period) % self.period


@dataclass(frozen=True)
class Windows(Availability):
    """Intervals of presence from a file; a client without any is always there."""

    windows: tuple[tuple[int, float, float], ...]  # client, from, to

    def __post_init__(self) -> None:
        mine: dict[int, list[tuple[float, float]]] = {}
        for client, start, end in self.windows:
            mine.setdefault(client, []).append((start, end))
        object.__setattr__(self, "_mine", mine)

    def check(self, count: int) -> None:
        for client, _, _ in self.windows:
            if not 0 <= client < count:
                raise FedstrideError(f"availability: the file names client {client}; clients are 0 to {count - 1}")

    def answers(self, jobs: Jobs, now: float, seed: int) -> np.ndarray:
        return np.array([self._there(client, now) for client in jobs.clients.tolist()], dtype=bool)

    def _there(self, client: int, now: float) -> bool:
        mine = self._mine.get(client)  # type: ignore[attr-defined]
        return mine is None or any(start <= now < end for start, end in mine)

    def wake(self, jobs: Jobs, now: float, seed: int) -> float:
        own = (self._mine.get(client, ()) for client in jobs.clients.tolist())  # type: ignore[attr-defined]
        return min((start for spans in own for start, _ in spans if start > now), default=float("inf"))


@dataclass(frozen=True)
class Own(Availability):
    """The user's own function (client, seconds) -> there or not."""

    function: Callable[[int, float], bool]

    def answers(self, jobs: Jobs, now: float, seed: int) -> np.ndarray:
        return np.array([bool(self.function(int(client), now)) for client in jobs.clients], dtype=bool)


def dropout(p: float) -> Availability:
    """Every job is lost with probability p, by key."""
    return Dropout(p)


def cycle(on: float, period: float) -> Availability:
    """Clients are there for `on` seconds in every `period`, each with its own phase."""
    return Cycle(on, period)


def daytime(hours: float = 12.0) -> Availability:
    """Everyone is there for so many hours of each day, and away for the rest of it."""
    if not isinstance(hours, Real) or not 0 < hours <= 24:
        raise FedstrideError(f"daytime needs hours above 0 and up to 24, not {hours!r}")
    return Cycle(hours * 3600, 24 * 3600.0, together=True)


def trace(path: str | Path) -> Availability:
    """A CSV file with the columns `client`, `from`, `to` (seconds): when clients are there."""
    try:
        with open(path, newline="") as file:
            rows = [(int(row["client"]), float(row["from"]), float(row["to"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise FedstrideError(f"{path} is not a table with the columns client, from, to: {error}") from None
    if not rows:
        raise FedstrideError(f"{path} says of no client when it is there; it needs rows with client, from, to")
    for client, start, end in rows:
        if not start < end:
            raise FedstrideError(
                f"{path}: client {client} would be there from {start} to {end}; from must be before to"
            )
    return Windows(tuple(rows))


def resolve(value: Any) -> Availability | None:
    """What a user may pass for `availability`."""
    if value is None or isinstance(value, Availability):
        return value
    if callable(value):
        return Own(value)
    raise FedstrideError(
        f"availability must come from fs.availability or be a function (client, seconds), not {value!r}"
    )
