"""Averages that a few liars cannot move: `fs.simulate(..., robust=fs.robust.TrimmedMean(share=0.2))`.

Every mean and total that a method takes of uploads becomes a robust one, coordinate by coordinate. Weights keep their
meaning: they say how much of the fleet a value stands for, and it is weight that is cut off, not heads.
"""

import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstride.algorithm import Algorithm
from fedstride.errors import FedstrideError
from fedstride.participation import Bernoulli, Full, Listed, Participation
from fedstride.replies import Header, Replies
from fedstride.schedule import Schedule

BLOCK = 1 << 22  # numbers sorted at once
ROUNDING = 1e-12  # weights add up to one only so far
FEWEST = 3  # replies among which one can be told from the others


class Robust:
    """Abstract: which share of the weight is cut off at either end of every coordinate."""

    share: float

    def check(self, method: Algorithm, schedule: Schedule, who: Participation, count: int) -> None:
        """Refuse methods that look at single uploads, and updates of too few replies."""
        if method.pooled:
            raise FedstrideError(f"{method.name} pools all data; there are no uploads among which to choose")
        if method.inspects:
            raise FedstrideError(
                f"{method.name} cannot be robust: its server looks at single uploads and not only at their means and "
                "totals, so one liar would get through"
            )
        replies = _expected(schedule, who, count)
        if replies is not None and replies < FEWEST:
            raise FedstrideError(
                f"robust aggregation needs at least {FEWEST} replies a server update, and here it has {replies:g}"
            )


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """The mean of what is left when a share of the weight is cut off at the low and at the high end.

    Liars that together have at most this share of the round's weight cannot move a coordinate out of the range of the
    honest values. 0 is the plain mean.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.share, numbers.Real) or not 0 <= self.share < 0.5:
            raise FedstrideError(f"share of the trimmed mean must be a number from 0 to below 0.5, not {self.share!r}")


@dataclass(frozen=True)
class Median(Robust):
    """The value with half of the weight on either side; liars with less than half of it cannot move it far."""

    share = 0.5


class RobustReplies(Replies):
    """Replies whose means and totals are robust.

    * `mean(f)`: with the weights of the plain mean (aggregation factor times the method's own, such as a discount for
      staleness), the sum of the weights times their trimmed mean.
    * `total(f)`: with the fleet weights of the reporters, the sum of the weights times their trimmed mean.
    """

    def __init__(self, rule: Robust, *settings: Any):
        weights, d, by_weight, _, *rest = settings
        super().__init__(weights, d, by_weight, True, *rest)
        self._rule = rule

    def each(self, field: str) -> Tensor:
        """[R]: what the server knows of every reply itself."""
        if field not in Header._fields:
            raise FedstrideError(
                f"the method looks at every client's {field!r}, which robust aggregation does not cover; its class "
                "must declare `inspects`"
            )
        return super().each(field)

    def rows(self, field: str) -> Tensor:
        """Nothing: a single vector is nobody's mean."""
        return self.each(field)

    def mean(self, field: str) -> Tensor:
        """Robust mean of a field by aggregation factors."""
        if field in Header._fields:
            return super().mean(field)
        return self._centre(field, self._there(self.shares * self.discounts))

    def total(self, field: str) -> Tensor:
        """Robust sum of a field by fleet weights."""
        return super().total(field) if field in Header._fields else self._centre(field, self.weights)

    def _centre(self, field: str, weights: Tensor) -> Tensor:
        scalar = field not in self._rows
        values = super().each(field)[:, None] if scalar else super().rows(field)
        found = float(weights.sum()) * centre(values, weights / weights.sum(), self._rule.share)
        return found[0] if scalar else found


def centre(values: Tensor, weights: Tensor, share: float) -> Tensor:
    """[d]: of every column of [R, d] the weighted mean without `share` of the weight at either end; 1/2: the median."""
    width = max(1, BLOCK // len(values))
    return torch.cat([_centre(block, weights, share) for block in values.split(width, dim=1)])


def _centre(values: Tensor, weights: Tensor, share: float) -> Tensor:
    ordered, order = values.sort(dim=0)
    own = weights[order]
    upper = own.cumsum(0)
    if share == 0.5:
        below = (upper < 0.5 - ROUNDING).sum(0, keepdim=True)
        above = (upper <= 0.5 + ROUNDING).sum(0, keepdim=True).clamp(max=len(values) - 1)
        return (ordered.gather(0, below)[0] + ordered.gather(0, above)[0]) / 2
    kept = upper.clamp(max=1 - share) - (upper - own).clamp(min=share)
    kept = torch.where(kept > ROUNDING, kept, 0)  # or a liar's 1e300 would come in with the rounding
    return ((kept / kept.sum(0)).to(values.dtype) * ordered).sum(0)


def _expected(schedule: Schedule, who: Participation, count: int) -> float | None:
    """Replies of a server update, where that is known beforehand."""
    if schedule.asynchronous:
        return getattr(schedule, "size", getattr(schedule, "n", None))
    if isinstance(who, Full):
        return count
    if isinstance(who, Listed):
        return min((len(set(cohort)) for cohort in who.cohorts if cohort), default=None)
    return who.p * count if isinstance(who, Bernoulli) else getattr(who, "n", None)
