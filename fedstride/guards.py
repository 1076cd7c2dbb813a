"""Which uploads are used: finite ones, and on request only those of a plausible length.

A rejected upload is counted, reported and forgotten, the client's memory stays as it was; over a network a client that
goes on like that is set aside.
"""

import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedstride.errors import FedstrideError
from fedstride.replies import finite, finite_and_losses
from fedstride.schedule import Schedule


@dataclass(frozen=True)
class Norms:
    """Bounds on the Euclidean norm of every vector in an upload.

    bound: longer vectors are rejected. times: so are those that are more than so many times as long as the median of
    the round's vectors in the same field; for that the replies of a round are kept until all are there. Who is asked
    before the first round may not be missed, so only the bound holds there.
    """

    bound: float | None = None
    times: float | None = None

    def __post_init__(self) -> None:
        if self.bound is None and self.times is None:
            raise FedstrideError("the guard Norms needs bound, the longest vector, or times, multiples of the median")
        for name, low in (("bound", 0), ("times", 1)):
            value = getattr(self, name)
            good = value is None or (isinstance(value, numbers.Real) and low < float(value) < float("inf"))
            if not good:
                raise FedstrideError(f"{name} of the guard Norms must be a number above {low}, not {value!r}")

    def check(self, schedule: Schedule) -> None:
        """Refuse a schedule without rounds, where there is no median to compare with."""
        if self.times is not None and schedule.asynchronous:
            raise FedstrideError(
                f"{type(schedule).__name__} has no rounds whose median an upload could be compared with; give the "
                "guard a bound instead of times"
            )


def judged(source: Iterator[Any], guard: Norms | None, d: int, insist: bool) -> Iterator[tuple[Any, np.ndarray]]:
    """Answers as they come, and [C] which of them are used; d is the length of the model's vector."""
    if guard is None or guard.times is None or insist:
        for answers in source:
            used, losses = finite_and_losses(answers.upload, answers.train_loss, len(answers.jobs.clients))
            answers = answers._replace(train_loss=losses)
            if guard is not None and guard.bound is not None:
                used &= _short(_norms(answers.upload, d), guard.bound)
            yield answers, used
        return
    everything = list(source)
    good = [finite(answers.upload, len(answers.jobs.clients)) for answers in everything]
    norms = [_norms(answers.upload, d) for answers in everything]
    limits = {
        name: _limit(guard, np.concatenate([part[name][used] for part, used in zip(norms, good) if name in part]))
        for name in (norms[0] if norms else ())
    }
    for answers, part, used in zip(everything, norms, good):
        for name, limit in limits.items():
            used &= part[name] <= limit
        yield answers, used


def _limit(guard: Norms, norms: np.ndarray) -> float:
    """The longest vector that is used in a field; where the median is zero there is nothing to compare with."""
    median = float(np.median(norms)) if len(norms) else 0.0
    bound = float("inf") if guard.bound is None else guard.bound
    return bound if guard.times is None or not median else min(bound, guard.times * median)


def _short(norms: dict[str, np.ndarray], bound: float) -> Any:
    return np.logical_and.reduce([values <= bound for values in norms.values()]) if norms else True


def _norms(upload: Any, d: int) -> dict[str, np.ndarray]:
    """Vector field -> [C]: its lengths."""
    fields = getattr(upload, "_fields", ())
    return {name: value.norm(dim=1).cpu().numpy() for name, value in zip(fields, upload) if is_vector(value, d)}


def is_vector(value: Tensor, d: int) -> bool:
    """Whether a field of an upload is a vector; those of a model with one parameter look like scalars."""
    return value.shape[1] > 1 or d == 1
