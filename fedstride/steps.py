"""How many local steps every client does."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstride.errors import FedstrideError
from fedstride.keys import generator
from fedstride.participation import Participation
from fedstride.sampling import Sampler


class Steps:
    """A rule for step counts."""

    @property
    def single(self) -> bool:
        """Whether a client's steps can be drawn without the rest of its cohort, and are never zero."""
        return True

    def check(self, count: int, rounds: int) -> None:
        """Refuse what cannot work with this fleet."""

    def draw(self, clients: np.ndarray, round: int, epoch: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Steps asked for and steps really done, one of each a client; `epoch` is the steps in one local pass."""
        raise NotImplementedError


def _same(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return steps, steps


def _check_steps(steps: np.ndarray, what: str, lowest: int = 1) -> None:
    good = np.issubdtype(steps.dtype, np.number) and bool(np.isfinite(steps).all())
    if not good or (steps != np.floor(steps)).any() or (steps < lowest).any():
        raise FedstrideError(f"{what} must be whole numbers from {lowest}, not {steps.ravel()[:8].tolist()}")


@dataclass(frozen=True)
class Fixed(Steps):
    """The same numbers every round: one for all, or one a client."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", np.array(self.counts, dtype=np.int64))

    def check(self, count: int, rounds: int) -> None:
        _check_steps(np.array(self.counts), "steps")
        if len(self.counts) not in (1, count):
            raise FedstrideError(
                f"steps lists {len(self.counts)} numbers for {count} clients; give one, or one a client"
            )

    def draw(self, clients: np.ndarray, round: int, epoch: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        counts: np.ndarray = self._table  # type: ignore[attr-defined]
        return _same(np.full(len(clients), counts[0]) if len(counts) == 1 else counts[clients])


class Listed(Steps):
    """Somebody else's step counts, rounds x clients; 0 means the client did not answer that round."""

    def __init__(self, table: np.ndarray):
        self.table = table

    def __repr__(self) -> str:
        return f"Listed({self.table.tolist()})"

    @property
    def single(self) -> bool:
        return bool((self.table > 0).all())

    def check(self, count: int, rounds: int) -> None:
        _check_steps(self.table, "steps", lowest=0)
        if self.table.shape[0] < rounds or self.table.shape[1] != count:
            raise FedstrideError(
                f"steps is a table of {self.table.shape}; needed are {rounds} rounds x {count} clients"
            )

    def draw(self, clients: np.ndarray, round: int, epoch: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        return _same(self.table[round - 1, clients].astype(np.int64))


@dataclass(frozen=True)
class Gaussian(Steps):
    """|Normal(mean, variance)| cut to a whole number, at least 1; drawn once a client, or anew every round."""

    mean: float
    variance: float
    redraw: bool = False

    def check(self, count: int, rounds: int) -> None:
        if not all(isinstance(value, numbers.Real) for value in (self.mean, self.variance)) or not (
            0 < self.mean < math.inf and 0 <= self.variance < math.inf
        ):
            raise FedstrideError(
                f"gaussian steps need mean > 0 and variance >= 0, not {self.mean!r}, {self.variance!r}"
            )

    def draw(self, clients: np.ndarray, round: int, epoch: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        when = round if self.redraw else 0
        draws = [
            generator(seed, "steps", int(client), when).normal(self.mean, math.sqrt(self.variance))
            for client in clients
        ]
        return _same(np.maximum(1, np.abs(np.array(draws)).astype(np.int64)))


@dataclass(frozen=True)
class Epochs(Steps):
    """Passes over the local data: E ceil(n_i / batch size) steps."""

    count: int

    def check(self, count: int, rounds: int) -> None:
        if not isinstance(self.count, numbers.Integral):
            raise FedstrideError(f"epochs must be a whole number from 1, not {self.count!r}")
        _check_steps(np.array([self.count]), "epochs")

    def draw(self, clients: np.ndarray, round: int, epoch: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        return _same(self.count * epoch)


@dataclass(frozen=True)
class Unfinished(Steps):
    """FedLGA's devices that do not finish: round(rho K) of the K at work do E - tau + 1 of E epochs, tau in 1..tau_max.

    tau = 1 is complete, as the paper draws it. `unit` "step" reads an epoch as a single batch (the paper's Eq. 2).
    """

    rho: float
    tau_max: int
    epochs: int = 5
    unit: str = "epoch"

    @property
    def single(self) -> bool:
        return False

    def check(self, count: int, rounds: int) -> None:
        whole = all(isinstance(value, numbers.Integral) for value in (self.tau_max, self.epochs))
        share = isinstance(self.rho, numbers.Real) and 0 <= self.rho <= 1
        if not whole or not share or not 1 <= self.tau_max <= self.epochs:
            raise FedstrideError(
                f"unfinished needs rho in [0, 1] and tau_max from 1 to epochs = {self.epochs}, "
                f"not rho={self.rho!r}, tau_max={self.tau_max!r}"
            )
        if self.unit not in ("epoch", "step"):
            raise FedstrideError(f"unit must be 'epoch' or 'step', not {self.unit!r}")

    def draw(self, clients: np.ndarray, round: int, epoch: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = generator(seed, "unfinished", round)
        done = np.full(len(clients), self.epochs)
        slow = rng.choice(len(clients), int(np.rint(self.rho * len(clients))), replace=False)
        done[slow] = self.epochs - rng.integers(1, self.tau_max + 1, len(slow)) + 1
        unit = epoch if self.unit == "epoch" else np.ones(len(clients), dtype=np.int64)
        return self.epochs * unit, done * unit


class Pooled(Steps):
    """The sum of a cohort's steps, for one client that holds all the data."""

    def __init__(self, steps: Steps, who: Participation, sampler: Sampler, weights: np.ndarray):
        self.steps, self.who, self.sampler, self.weights = steps, who, sampler, weights

    def __repr__(self) -> str:
        return f"Pooled({self.steps!r}, {self.who!r})"

    def draw(self, clients: np.ndarray, round: int, epoch: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        cohort = self.who.draw(generator(seed, "cohort", round), self.weights, round).clients
        _, done = self.steps.draw(cohort, round, self.sampler.steps_per_epoch(cohort), seed)
        return _same(np.array([done.sum()]))


def gaussian(mean: float, variance: float, redraw: bool = False) -> Steps:
    """Normally distributed step counts; `variance`, not standard deviation."""
    return Gaussian(mean, variance, redraw)


def epochs(count: int) -> Steps:
    """Whole passes over the local data."""
    return Epochs(count)


def unfinished(rho: float, tau_max: int, epochs: int = 5, unit: str = "epoch") -> Steps:
    """A share rho of the cohort leaves up to tau_max - 1 of its epochs undone."""
    return Unfinished(rho, tau_max, epochs, unit)


def resolve(value: Steps | int | Sequence[int] | Any) -> Steps:
    """What a user may pass for `steps`."""
    if isinstance(value, Steps):
        return value
    try:
        table = np.asarray(value)
        if table.ndim < 2:
            _check_steps(table, "steps")
            return Fixed(tuple(int(count) for count in table.ravel()))
    except (TypeError, ValueError) as error:
        if isinstance(error, FedstrideError):
            raise
        raise FedstrideError(
            "steps must be a number, one number a client, a rounds x clients table, or come from fs.steps "
            f"(gaussian, epochs, unfinished), not {value!r}"
        ) from None
    if table.ndim != 2:
        raise FedstrideError(f"steps as a table must be rounds x clients, not of shape {table.shape}")
    return Listed(table)
