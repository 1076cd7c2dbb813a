"""Differential privacy of clients: their displacements are clipped, the server adds noise, an accountant adds up.

Central and client level: who sees every model of the run learns little about whether any one client's uploads were in
it or zeros in their place. Weights, who could be drawn, and the rows of the run are not protected.
"""

import math
import numbers
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstride.algorithm import Algorithm
from fedstride.errors import FedstrideError
from fedstride.keys import generator
from fedstride.participation import Bernoulli, Full, Participation, Uniform
from fedstride.replies import Header, Reduced, Replies
from fedstride.sampling import Jobs
from fedstride.schedule import Schedule

ORDERS = (*range(2, 33), 40, 48, 64, 96, 128)  # of the Renyi divergences among which the best is taken


@dataclass(frozen=True)
class Gaussian:
    """Clip every displacement to a norm, add Gaussian noise to their weighted sum.

    clip: the norm C. noise: the multiplier z; the noise on every coordinate of `sum w_i D_i` has the standard deviation
    z C max w_i. delta: the one at which epsilon is told. The mean is the noisy sum divided by the share of the fleet
    that is expected to take part, whoever comes, since a client's presence must not show in the divisor.
    """

    clip: float
    noise: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name, high in (("clip", float("inf")), ("noise", float("inf")), ("delta", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or not 0 < float(value) < high:
                raise FedstrideError(f"{name} of privacy must be a number above 0 and below {high:g}, not {value!r}")

    def check(self, method: Algorithm, schedule: Schedule, who: Participation, count: int, rounds: int) -> None:
        """Refuse methods whose uploads the noise would not cover, and draws that the accountant does not know."""
        reason = _uncovered(method)
        if reason:
            raise FedstrideError(f"{method.name} cannot be private: {reason}")
        if schedule.asynchronous:
            raise FedstrideError(
                f"{type(schedule).__name__} lets quick clients take part more often, which the accountant does not "
                "know; privacy needs rounds: schedule=fs.schedule.Sync()"
            )
        known = isinstance(who, (Full, Bernoulli)) or (isinstance(who, Uniform) and not who.replacement)
        if not known:
            raise FedstrideError(
                f"privacy knows how to account for participation full, uniform without replacement and bernoulli, not "
                f"{who}"
            )
        if rounds * _alone(who, count) > self.delta / 2:
            raise FedstrideError(
                f"{who} with {count} clients draws nobody, and then again, too often for delta {self.delta:g}; use "
                "uniform(n), a higher chance, or more clients"
            )
        _library()

    def share(self, who: Participation, count: int) -> float:
        """The part of the fleet that is expected in a round."""
        return who.p if isinstance(who, Bernoulli) else who.n / count if isinstance(who, Uniform) else 1.0

    def spent(self, who: Participation, count: int, rounds: int) -> float:
        """Epsilon after so many rounds, at delta."""
        delta = self.delta - rounds * _alone(who, count)
        return _epsilon(float(self.noise), who, count, rounds, delta)


class PrivateReplies(Replies):
    """Replies of which the server sees noisy sums alone."""

    def __init__(self, rule: Gaussian, share: float, secret: int, dtype: torch.dtype, *settings: Any):
        super().__init__(*settings)
        self._rule, self._share, self._secret, self._dtype = rule, share, secret, dtype

    def reduce(self, jobs: Jobs, upload: Any, used: np.ndarray, size: int) -> Reduced:
        """The used ones of a batch of uploads, clipped."""
        return super().reduce(jobs, type(upload)(*(clipped(value, self._rule.clip) for value in upload)), used, size)

    def each(self, field: str) -> Tensor:
        """[R]: what the server knows of every reply itself."""
        if field not in Header._fields:
            raise FedstrideError(f"the method looks at every client's {field!r}, which would not be private")
        return super().each(field)

    def rows(self, field: str) -> Tensor:
        """Nothing: a single vector is not private."""
        return self.each(field)

    def mean(self, field: str) -> Tensor:
        """The noisy sum over the expected part of the fleet."""
        return super().mean(field) if field in Header._fields else self.total(field) / self._share

    def total(self, field: str) -> Tensor:
        """The noisy sum; the same noise in the same update, however often it is asked for."""
        if field in Header._fields:
            return super().total(field)
        # Of an update without replies there is noise as well: that there were none is nobody's business.
        nothing = torch.zeros(self._d, dtype=self._dtype, device=self._device)
        found = super().total(field) if len(self) else nothing
        rng = generator(self._secret, "noise", field, self._version)
        scale = self._rule.noise * self._rule.clip * float(self._weights.max())
        return found + scale * torch.as_tensor(rng.standard_normal(found.shape), dtype=found.dtype, device=found.device)


def clipped(rows: Tensor, norm: float) -> Tensor:
    """Rows that are longer than a norm, scaled down to it."""
    return rows * (norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)


def _uncovered(method: Algorithm) -> str:
    """What of a method's uploads clipping and noise would not cover; empty if they cover all."""
    if method.displacements:
        return ""
    if method.pooled:
        return "it pools all data in one place"
    if method.prologue or len(method.exchanges) > 1:
        return "it has further exchanges, whose uploads clipping and noise of the displacement do not cover"
    if method.traffic[1] > 1:
        return f"its clients send {method.traffic[1]} vectors, and clipping and noise cover the displacement alone"
    if method.inspects:
        return "its server looks at single uploads, and clipping and noise cover their sum alone"
    return (
        "its class does not declare `displacements`: that clients send their displacement and nothing else, and "
        "remember nothing of it"
    )


def _alone(who: Participation, count: int) -> float:
    """The chance that a client is in a cohort for certain, since all others were not drawn and one is needed."""
    if not isinstance(who, Bernoulli):
        return 0.0
    nobody = (1 - who.p) ** count
    return 0.0 if who.p == 1 else who.p * (1 - who.p) ** (count - 1) / (1 - nobody)


@lru_cache(maxsize=1 << 14)
def _epsilon(noise: float, who: Participation, count: int, rounds: int, delta: float) -> float:
    """The smaller of two bounds: the library's for the draw, and that of a client which is in every round.

    A draw of a fixed size is known to the library for one client in another's place, where the sum moves by 2 C max w.
    """
    dp = _library()
    always = float(dp.get_epsilon_gaussian(noise / math.sqrt(rounds), delta))
    if isinstance(who, Bernoulli):
        relation = dp.NeighboringRelation.REPLACE_SPECIAL
        event = dp.PoissonSampledDpEvent(float(who.p), dp.GaussianDpEvent(noise))
    elif isinstance(who, Uniform):
        relation = dp.NeighboringRelation.REPLACE_ONE
        event = dp.SampledWithoutReplacementDpEvent(count, int(who.n), dp.GaussianDpEvent(noise / 2))
    else:
        return always
    accountant = dp.rdp.RdpAccountant(list(ORDERS), relation)
    accountant.compose(event, rounds)
    return min(always, float(accountant.get_epsilon(delta)))


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise FedstrideError("privacy needs the package dp-accounting: pip install 'fedstride[privacy]'") from None
    return dp_accounting
