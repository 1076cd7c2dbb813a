"""Who takes part in a round."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar, NamedTuple

import numpy as np

from fedstride.errors import FedstrideError


class Cohort(NamedTuple):
    """Distinct clients of a round in ascending order, and how often each was drawn."""

    clients: np.ndarray
    times: np.ndarray


def _counted(draws: np.ndarray) -> Cohort:
    clients, times = np.unique(draws.astype(np.int64), return_counts=True)
    return Cohort(clients, times)


class Participation:
    """A rule that draws a cohort. `by_weight`: the draw itself carries the weights, so replies count m_i / n."""

    everyone: ClassVar[bool] = False
    by_weight: ClassVar[bool] = False

    def check(self, count: int, rounds: int) -> None:
        """Refuse what cannot work with this fleet."""

    def draw(self, rng: np.random.Generator, weights: np.ndarray, round: int) -> Cohort:
        """The cohort of a round, counted from 1."""
        raise NotImplementedError


def _check_draws(n: int, count: int, limit: int | None) -> None:
    if not isinstance(n, Integral) or n < 1:
        raise FedstrideError(f"participation must draw a whole number of clients, at least one a round, not {n!r}")
    if limit is not None and n > limit:
        raise FedstrideError(f"participation draws {n} different clients a round, but the fleet has {count}")


@dataclass(frozen=True)
class Full(Participation):
    """Everyone, every round."""

    everyone: ClassVar[bool] = True

    def draw(self, rng: np.random.Generator, weights: np.ndarray, round: int) -> Cohort:
        return Cohort(np.arange(len(weights)), np.ones(len(weights), dtype=np.int64))


@dataclass(frozen=True)
class Uniform(Participation):
    """n clients with equal chances, without or with replacement."""

    n: int
    replacement: bool = False

    def check(self, count: int, rounds: int) -> None:
        _check_draws(self.n, count, None if self.replacement else count)

    def draw(self, rng: np.random.Generator, weights: np.ndarray, round: int) -> Cohort:
        n = self.n if self.replacement else min(self.n, len(weights))  # over a network some may have left
        return _counted(rng.choice(len(weights), n, replace=self.replacement))


@dataclass(frozen=True)
class Weighted(Participation):
    """n draws with replacement, chances equal to the weights; a reply counts m_i / n."""

    n: int
    by_weight: ClassVar[bool] = True

    def check(self, count: int, rounds: int) -> None:
        _check_draws(self.n, count, None)

    def draw(self, rng: np.random.Generator, weights: np.ndarray, round: int) -> Cohort:
        return _counted(rng.choice(len(weights), self.n, p=weights / weights.sum()))


@dataclass(frozen=True)
class Bernoulli(Participation):
    """Each client with probability p, drawn again if nobody comes."""

    p: float

    def check(self, count: int, rounds: int) -> None:
        if not isinstance(self.p, Real) or not 0 < self.p <= 1:
            raise FedstrideError(f"bernoulli(p) needs a probability above 0 and up to 1, not {self.p!r}")
        if 1 - (1 - self.p) ** count < 1e-3:
            raise FedstrideError(f"bernoulli({self.p!r}) leaves all {count} clients out of nearly every round")

    def draw(self, rng: np.random.Generator, weights: np.ndarray, round: int) -> Cohort:
        while True:
            present = np.flatnonzero(rng.random(len(weights)) < self.p)
            if len(present):
                return _counted(present)


@dataclass(frozen=True)
class Listed(Participation):
    """Somebody else's cohorts, one a round; a client listed twice counts twice, an empty list is an empty round."""

    cohorts: tuple[tuple[int, ...], ...]

    def check(self, count: int, rounds: int) -> None:
        if len(self.cohorts) < rounds:
            raise FedstrideError(
                f"participation lists {len(self.cohorts)} cohorts for {rounds} rounds; one a round is needed"
            )
        for number, cohort in enumerate(self.cohorts, start=1):
            for client in cohort:
                if not 0 <= client < count:
                    raise FedstrideError(
                        f"the cohort of round {number} names client {client}; clients are 0 to {count - 1}"
                    )

    def draw(self, rng: np.random.Generator, weights: np.ndarray, round: int) -> Cohort:
        return _counted(np.array(self.cohorts[round - 1]))


def full() -> Participation:
    """Everyone, every round."""
    return Full()


def uniform(n: int, replacement: bool = False) -> Participation:
    """n clients a round with equal chances."""
    return Uniform(n, replacement)


def weighted(n: int) -> Participation:
    """n draws a round with replacement, chances equal to the fleet weights."""
    return Weighted(n)


def bernoulli(p: float) -> Participation:
    """Each client takes part with probability p."""
    return Bernoulli(p)


def resolve(value: Participation | Sequence[Sequence[int]] | None) -> Participation:
    """What a user may pass for `participation`."""
    if value is None:
        return Full()
    if isinstance(value, Participation):
        return value
    try:
        return Listed(tuple(tuple(operator.index(client) for client in cohort) for cohort in value))
    except (TypeError, ValueError):
        raise FedstrideError(
            "participation must come from fs.participation (full, uniform, weighted, bernoulli) or be a list of "
            f"cohorts, not {value!r}"
        ) from None
