"""How fast devices are: seconds for one local step, one number a client."""

import csv
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstride.errors import FedstrideError
from fedstride.keys import generator


class Devices:
    """A rule for speeds, drawn once a client."""

    def seconds(self, count: int, seed: int) -> np.ndarray:
        """[N]: seconds per local step."""
        raise NotImplementedError


@dataclass(frozen=True)
class Given(Devices):
    """The same for all, or one number a client."""

    values: tuple[float, ...]

    def seconds(self, count: int, seed: int) -> np.ndarray:
        if len(self.values) not in (1, count):
            raise FedstrideError(
                f"devices lists {len(self.values)} numbers for {count} clients; give one, or one a client"
            )
        return np.broadcast_to(np.array(self.values, dtype=np.float64), (count,))


@dataclass(frozen=True)
class Drawn(Devices):
    """The fastest device's seconds times a factor that is drawn once a client, by key."""

    base: float
    kind: str  # the method of numpy's generator
    arguments: tuple[float, ...]

    def seconds(self, count: int, seed: int) -> np.ndarray:
        draws = [getattr(generator(seed, "device", client), self.kind)(*self.arguments) for client in range(count)]
        return self.base * np.array(draws)


@dataclass(frozen=True)
class Own(Devices):
    """The user's own function of the client."""

    function: Callable[[int], float]

    def seconds(self, count: int, seed: int) -> np.ndarray:
        found = [self.function(client) for client in range(count)]
        try:
            return np.array(found, dtype=np.float64)
        except (TypeError, ValueError):
            raise FedstrideError(f"devices: the function must give a number of seconds, not {found[0]!r}") from None


def seconds(values: float | Sequence[float]) -> Devices:
    """Seconds per local step: a number, or one number a client."""
    try:
        return Given(tuple(float(value) for value in np.atleast_1d(np.asarray(values, dtype=np.float64))))
    except (TypeError, ValueError):
        raise FedstrideError(
            f"devices must come from fs.devices, be numbers, or a function of the client, not {values!r}"
        ) from None


def slowdown(base: float, low: float = 1.0, high: float = 5.0) -> Devices:
    """`base` seconds times a factor uniform in [low, high], drawn once a client (DLSGD takes 1 to 5)."""
    if not _positive("low", low) <= _positive("high", high):
        raise FedstrideError(f"slowdown needs 0 < low <= high, not {low!r}, {high!r}")
    return Drawn(_positive("base", base), "uniform", (low, high))


def lognormal(median: float, sigma: float) -> Devices:
    """Seconds per step with a given median and a log-normal spread."""
    if not isinstance(sigma, numbers.Real) or not sigma >= 0:
        raise FedstrideError(f"lognormal needs sigma >= 0, not {sigma!r}")
    return Drawn(_positive("median", median), "lognormal", (0.0, sigma))


def flops(per_step: float, speed: float | Sequence[float]) -> Devices:
    """Floating-point operations of one local step, divided by the devices' operations per second."""
    speeds = speed if isinstance(speed, (Sequence, np.ndarray)) and not isinstance(speed, str) else [speed]
    return seconds([_positive("per_step", per_step) / _positive("speed", one) for one in speeds])


def measured_flops(model: nn.Module, inputs: Any) -> float:
    """Floating-point operations of one forward and backward pass of a model on these inputs."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        given = torch.as_tensor(inputs)
        dtype = next(model.parameters()).dtype if given.is_floating_point() else None
        outputs: Tensor = model(given.to(dtype=dtype))
        outputs.sum().backward()
    model.zero_grad()
    return float(counter.get_total_flops())


def trace(path: str | Path) -> Devices:
    """A CSV file with the columns `client` and `seconds` (per local step), one row a client."""
    try:
        with open(path, newline="") as file:
            found = sorted((int(row["client"]), float(row["seconds"])) for row in csv.DictReader(file))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise FedstrideError(f"{path} is not a table with the columns client, seconds: {error}") from None
    if not found or [client for client, _ in found] != list(range(len(found))):
        raise FedstrideError(f"{path} must have one row for each client, counted from 0")
    return Given(tuple(seconds for _, seconds in found))


def resolve(value: Any, count: int, seed: int) -> np.ndarray:
    """[N]: seconds per local step from what a user may pass for `devices`; None: no time at all."""
    if value is None:
        return np.zeros(count)
    if callable(value):
        value = Own(value)
    elif not isinstance(value, Devices):
        value = seconds(value)
    found = value.seconds(count, seed)
    if not np.isfinite(found).all() or (found < 0).any():
        bad = int(np.flatnonzero(~np.isfinite(found) | (found < 0))[0])
        raise FedstrideError(
            f"client {bad} would need {found[bad]} seconds per step; seconds must be finite and not negative"
        )
    return found


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) or not 0 < float(value) < float("inf"):
        raise FedstrideError(f"{name} must be a positive number, not {value!r}")
    return float(value)
