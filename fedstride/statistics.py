"""What may be said about several runs of a method: means with intervals, paired comparisons, the way to a target.

Every function takes the runs of one method, one a seed: `[Run(seed, result.rows, result.status), ...]`. A run that
diverged has no value to average, and one that never met its target no time to average; both are counted and named,
never left out in silence. Intervals are Student's, at 95 %, and stand for the spread over seeds alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from fedstride.errors import FedstrideError
from fedstride.keys import generator
from fedstride.results import Target

LEVEL = 0.95
EXACT = 14  # up to so many pairs all 2^n sign flips are tried; beyond, 2^14 of them
COSTS = ("seconds", "steps", "bytes_up", "bytes_down", "rejected", "staleness", "max_staleness")
UNITS = ("rounds", "seconds", "megabytes", "steps")


class Run(NamedTuple):
    """One run of a method, as `fs.simulate` gives it back."""

    seed: int
    rows: list[dict[str, Any]]
    status: str = "finished"  # finished, stopped, diverged


@dataclass(frozen=True)
class Summary:
    """A mean over seeds and the half-width of its interval."""

    mean: float | None  # None: every run diverged
    half: float | None  # None: one run has no interval
    n: int  # runs with a value
    diverged: int = 0  # runs without

    def text(self, scale: float = 1.0) -> str:
        """For people: "92.1 +- 1.3"; a scale of 100 makes percents."""
        if self.mean is None:
            return "diverged" if self.diverged == 1 else f"all {self.diverged} diverged"
        words = _plus_minus(scale * self.mean, None if self.half is None else scale * self.half)
        return words + (f", {self.diverged} of {self.n + self.diverged} diverged" if self.diverged else "")

    __str__ = text


@dataclass(frozen=True)
class Curve:
    """Means over seeds and half-widths at the places of a grid; NaN where not every run has been or where n is 1."""

    at: np.ndarray
    mean: np.ndarray
    half: np.ndarray
    n: int
    diverged: int = 0


@dataclass(frozen=True)
class Comparison:
    """One method against another on the seeds that both ran; differences are the first minus the second."""

    seeds: tuple[int, ...]  # the common ones
    left_out: tuple[int, ...]  # those that only one of them ran
    differences: tuple[float, ...]  # of the seeds where neither diverged
    mean: float | None
    half: float | None
    effect: float | None  # Cohen's d for pairs: the mean difference over its standard deviation
    p_t: float | None  # paired t test, two-sided
    p_flip: float | None  # sign-flip permutation test, two-sided; never below 2 / 2^n
    wins: int  # seeds on which the first is better; a diverged run is worse than any that did not
    losses: int

    def text(self, scale: float = 1.0) -> str:
        """For people, in one sentence."""
        n, common = len(self.differences), len(self.seeds)
        words = ["no difference to give"]
        if self.mean is not None:
            words = [f"difference {_plus_minus(scale * self.mean, None if self.half is None else scale * self.half)}"]
        words.append(f"{self.wins} won and {self.losses} lost of {common} common {_plural('seed', common)}")
        if n < common:
            words.append(f"on {common - n} of them a run diverged")
        if self.left_out:
            words.append(f"left out {_plural('seed', len(self.left_out))} {', '.join(map(str, self.left_out))}")
        if self.p_t is not None:
            tested = f"d = {self.effect:.2g}, p = {self.p_t:.2g} (paired t test)"
            equal = self.effect is not None and math.isinf(self.effect)
            words.append("the same on every seed, of which a t test tells nothing" if equal else tested)
            least = f"at least {2 / 2**n:.2g} for {n} pairs" if n <= EXACT else "sampled"
            words.append(f"p = {self.p_flip:.2g} (sign flips, {least})")
        return "; ".join(words)

    __str__ = text


class Reach(NamedTuple):
    """How one run fared with a target."""

    seed: int
    outcome: str  # reached, not reached, diverged
    at: float  # where it met the target; or where it ended

    def text(self) -> str:
        """For people: "7", "> 200", "diverged at 13"."""
        return {"reached": "", "not reached": "> ", "diverged": "diverged at "}[self.outcome] + _number(self.at)


@dataclass(frozen=True)
class ToTarget:
    """What it took to meet a target. Runs that never met it count as larger than all that did."""

    unit: str
    runs: tuple[Reach, ...]

    def _at(self, outcome: str) -> list[float]:
        return sorted(run.at for run in self.runs if run.outcome == outcome)

    @property
    def n(self) -> int:
        """All runs."""
        return len(self.runs)

    @property
    def reached(self) -> list[float]:
        """Where runs met the target, the first first."""
        return self._at("reached")

    @property
    def mean(self) -> float | None:
        """None unless every run met the target."""
        return float(np.mean(self.reached)) if len(self.reached) == self.n else None

    @property
    def median(self) -> float:
        """Infinite where half of the runs or more never met the target."""
        return float(np.median([*self.reached, *[math.inf] * (self.n - len(self.reached))]))

    def text(self) -> str:
        """For people: "7 (6-9), 2 of 3 reached", "> 200, 0 of 3 reached"; the range is of those that got there."""
        reached, ends, diverged = self.reached, self._at("not reached"), len(self._at("diverged"))
        if math.isfinite(self.median):
            words = _number(self.median)
        else:  # the run in the middle, those that diverged last
            words = f"> {_number(ends[0])}" if self.n // 2 < len(reached) + len(ends) else "diverged"
        if reached and self.n > 1:
            low, high = _number(reached[0]), _number(reached[-1])
            words += f" ({low})" if low == high else f" ({low}-{high})"
        if len(reached) < self.n:
            words += f", {len(reached)} of {self.n} reached"
        return words + (f", {diverged} diverged" if diverged else "")

    __str__ = text


def summarise(runs: Sequence[Run], metric: str = "accuracy", pick: str = "final") -> Summary:
    """Mean and interval of a metric over seeds: its last value in every run, or its best ("final", "best").

    Best is the smallest of losses and costs, the largest of other metrics. Runs that ended early, at a
    target, count with their value there.
    """
    values = [value for value in _values(runs, metric, pick).values() if value is not None]
    mean, half = interval(values)
    return Summary(mean, half, len(values), len(runs) - len(values))


def curve(
    runs: Sequence[Run], metric: str = "accuracy", against: str = "rounds", grid: Sequence[float] | None = None
) -> Curve:
    """The metric against rounds, virtual seconds, megabytes (up and down) or client steps, averaged over seeds.

    Between measurements a run keeps its last value. The grid is all places where a run was measured, from where all
    have been measured once to where the first one ends; on a grid of your own, places outside of that are NaN. Runs
    that diverged or whose metric stopped being finite are left out and counted.
    """
    _check(runs)
    lines = [_measured(run, metric, against) for run in runs if run.status != "diverged"]
    lines = [(where, values) for where, values in lines if np.isfinite(values).all()]
    if not lines:
        raise FedstrideError(f"all {len(runs)} runs diverged, so there is no curve of {metric}")
    first, last = max(where[0] for where, _ in lines), min(where[-1] for where, _ in lines)
    places = np.unique(np.concatenate([where for where, _ in lines]))
    at = places[(places >= first) & (places <= last)] if grid is None else np.asarray(grid, dtype=np.float64)
    table = np.stack([values[np.searchsorted(where, at, side="right") - 1] for where, values in lines])
    table[:, (at < first) | (at > last)] = np.nan
    n = len(lines)
    spread = table.std(0, ddof=1) if n > 1 else np.full(len(at), np.nan)
    return Curve(at, table.mean(0), _quantile(n) * spread / math.sqrt(n), n, len(runs) - n)


def compare(one: Sequence[Run], two: Sequence[Run], metric: str = "accuracy", pick: str = "final") -> Comparison:
    """One method against another, seed by seed, on the seeds that both ran; final or best values as in `summarise`."""
    first, second = _values(one, metric, pick), _values(two, metric, pick)
    seeds = tuple(sorted(first.keys() & second.keys()))
    if not seeds:
        raise FedstrideError(f"the methods have no seed in common: {sorted(first)} and {sorted(second)}")
    sign = -1 if lower_is_better(metric) else 1
    differences, wins, losses = [], 0, 0
    for seed in seeds:
        a, b = first[seed], second[seed]
        if a is not None and b is not None:
            differences.append(a - b)
        gain = sign * (a - b) if a is not None and b is not None else (a is not None) - (b is not None)
        wins, losses = wins + (gain > 0), losses + (gain < 0)
    mean, half = interval(differences)
    effect = p_t = p_flip = None
    if mean is not None and len(differences) > 1:
        deviation = float(np.std(differences, ddof=1))
        if deviation <= 1e-12 * abs(mean):  # equal but for rounding
            effect = math.copysign(math.inf, mean) if mean else 0.0
        else:
            effect = mean / deviation
        p_t, p_flip = student(effect * math.sqrt(len(differences)), len(differences) - 1), sign_flip(differences)
    left_out = tuple(sorted(first.keys() ^ second.keys()))
    return Comparison(seeds, left_out, tuple(differences), mean, half, effect, p_t, p_flip, wins, losses)


def to_target(runs: Sequence[Run], target: Target, unit: str = "rounds") -> ToTarget:
    """Rounds, virtual seconds, megabytes (up and down) or client steps until the first row that meets the target."""
    _check(runs)
    if not isinstance(target, Target):
        raise FedstrideError(f"target must be a Target, such as fs.Target(accuracy=0.8), not {target!r}")
    found = []
    for run in runs:
        for field in fields(target):
            if getattr(target, field.name) is not None:
                _measured(run, field.name, unit)  # never measured is not the same as not reached
        places = _places(run, unit).tolist()
        hit = next((place for place, row in zip(places, run.rows) if target(row)), None)
        outcome = "reached" if hit is not None else "diverged" if run.status == "diverged" else "not reached"
        found.append(Reach(run.seed, outcome, places[-1] if hit is None else hit))
    return ToTarget(unit, tuple(found))


def student(t: float, df: int) -> float:
    """P(|T| >= |t|) for Student's t with df degrees of freedom."""
    if math.isinf(t):
        return 0.0
    square = t * t
    return _beta(df / (df + square), square / (df + square), df / 2, 0.5)


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p value of the mean difference if every sign were a coin: exact up to 14 pairs, sampled beyond."""
    d = np.asarray(differences, dtype=np.float64)
    if len(d) <= EXACT:
        flips = (np.arange(2 ** len(d))[:, None] >> np.arange(len(d))) & 1
    else:
        flips = generator("sign flips").integers(0, 2, (2**EXACT, len(d)))
        flips[0] = 0  # what was seen is one of the possibilities
    sums = np.abs((1 - 2 * flips) @ d)
    return float((sums >= abs(d.sum()) - 1e-12 * np.abs(d).sum()).mean())  # ties must not be lost to rounding


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and half-width of its interval."""
    n = len(values)
    if n < 2:
        return (values[0] if n else None), None
    return float(np.mean(values)), _quantile(n) * float(np.std(values, ddof=1)) / math.sqrt(n)


def _quantile(n: int) -> float:
    """How many standard errors the interval of n values reaches to either side."""
    if n < 2:
        return math.nan
    low, high = 0.0, 1.0
    while student(high, n - 1) > 1 - LEVEL:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, n - 1) > 1 - LEVEL else (low, middle)
    return high


def _beta(x: float, rest: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), with rest = 1 - x; a continued fraction by Lentz's method."""
    if x == 0 or rest == 0:
        return float(rest == 0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges quickly on the other side only
        return 1 - _beta(rest, x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + term * d), 1 + term / c
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction / a


def _check(runs: Sequence[Run]) -> None:
    if not runs:
        raise FedstrideError("there are no runs; give at least one Run(seed, rows, status)")
    seeds = [run.seed for run in runs]
    for run in runs:
        if run.status not in ("finished", "stopped", "diverged"):
            raise FedstrideError(
                f"the run with seed {run.seed} has status {run.status!r}; known are finished, stopped and diverged"
            )
        if not run.rows:
            raise FedstrideError(f"the run with seed {run.seed} has no rows")
        if seeds.count(run.seed) > 1:
            raise FedstrideError(f"seed {run.seed} appears {seeds.count(run.seed)} times; give one run a seed")


def _places(run: Run, unit: str) -> np.ndarray:
    """How far the run had come at the end of every row."""
    if unit not in UNITS:
        raise FedstrideError(f"unknown unit {unit!r}; choose from {', '.join(UNITS)}")
    if unit == "rounds":
        return np.array([row["round"] for row in run.rows], dtype=np.float64)
    if unit == "seconds":
        if not run.rows[-1]["seconds"] and run.status != "diverged":
            raise FedstrideError(
                f"the run with seed {run.seed} took no virtual time; simulate it with world=fs.World(...)"
            )
        return np.array([row["seconds"] for row in run.rows])
    if unit == "steps":
        return np.cumsum([row["steps"] for row in run.rows], dtype=np.float64)
    return np.cumsum([row["bytes_up"] + row["bytes_down"] for row in run.rows], dtype=np.float64) / 1e6


def _measured(run: Run, metric: str, unit: str = "rounds") -> tuple[np.ndarray, np.ndarray]:
    """Where a metric was measured, and its values; a diverged run may have none."""
    places = _places(run, unit)
    pairs = [(place, row[metric]) for place, row in zip(places, run.rows) if metric in row]
    if not pairs and run.status != "diverged":
        known = sorted({name for row in run.rows for name in row})
        raise FedstrideError(f"the run with seed {run.seed} has no {metric!r}; its rows have {', '.join(known)}")
    where, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return where, values


def _values(runs: Sequence[Run], metric: str, pick: str) -> dict[int, float | None]:
    """The final or best value of every seed; None where the run diverged or the value is not finite."""
    if pick not in ("final", "best"):
        raise FedstrideError(f"pick must be 'final' or 'best', not {pick!r}")
    _check(runs)
    found: dict[int, float | None] = {}
    for run in runs:
        _, values = _measured(run, metric)
        if pick == "best":
            values = np.sort(values[~np.isnan(values)])[:: -1 if lower_is_better(metric) else 1]
        good = run.status != "diverged" and len(values) and math.isfinite(values[-1])
        found[run.seed] = float(values[-1]) if good else None
    return found


def lower_is_better(metric: str) -> bool:
    """Losses, errors and costs are better when they are small; everything else when it is large."""
    return metric.endswith(("loss", "penalty", "objective", "error")) or metric in COSTS


def _plus_minus(mean: float, half: float | None) -> str:
    """A mean to the place of the second digit of its half-width."""
    if half is None:
        return f"{mean:.4g} (n = 1, no interval)"
    if half <= 1e-9 * abs(mean):
        return f"{mean:.4g} +- 0"
    places = max(0, 1 - math.floor(math.log10(half)))
    return f"{mean:.{places}f} +- {half:.{places}f}"


def _number(value: float) -> str:
    if value == round(value):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"
