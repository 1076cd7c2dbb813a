"""Who is there: clients that drop out of a job, and clients that come and go."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from fedstride.errors import FedstrideError
from fedstride.keys import generator
from fedstride.sampling import Jobs


class Availability:
    """A rule for who answers."""

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
        if not all(isinstance(v, Real) for v in (self.on, self.period)) or not 0 < self.on <= self.period:
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

    def answers(self, jobs: Jobs, now: float, seed: int) -> np.ndarray:
        listed = {client for client, _, _ in self.windows}
        present = {client for client, start, end in self.windows if start <= now < end}
        return np.array([int(client) not in listed or int(client) in present for client in jobs.clients], dtype=bool)

    def wake(self, jobs: Jobs, now: float, seed: int) -> float:
        asked = set(jobs.clients.tolist())
        return min(
            (start for client, start, _ in self.windows if client in asked and start > now), default=float("inf")
        )


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
    return Cycle(hours * 3600, 24 * 3600.0, together=True)


def trace(path: str | Path) -> Availability:
    """A CSV file with the columns `client`, `from`, `to` (seconds): when clients are there."""
    try:
        with open(path, newline="") as file:
            rows = [(int(row["client"]), float(row["from"]), float(row["to"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise FedstrideError(f"{path} is not a table with the columns client, from, to: {error}") from None
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
