"""The world a fleet lives in: devices, links, availability; and what a job costs in it. Nothing ever sleeps."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedstride import availability as availabilities
from fedstride import devices as device_rules
from fedstride.errors import FedstrideError
from fedstride.links import Links
from fedstride.sampling import Jobs


@dataclass(frozen=True)
class World:
    """What a user describes: seconds per local step, links, who is there. None: no time, no limit, always."""

    devices: Any = None
    links: Links | None = None
    availability: Any = None


class Costs(NamedTuple):
    """What one client's job costs in an asynchronous run: plain numbers, a list entry a client."""

    down: list[float]  # seconds to receive the model
    up: list[float]  # seconds to send the update
    latency: list[float]  # seconds until the client hears of a request
    step: list[float]  # seconds of one local step
    extra: list[int]  # steps' worth of full gradients beside the local ones
    presence: Callable[[int, int, int, float], tuple[bool, float]]

    @property
    def slowest(self) -> float:
        """Seconds until everybody has received a model."""
        return max(self.down)


class Pace:
    """A world settled for one fleet and seed."""

    def __init__(self, world: World | None, count: int, seed: int):
        if world is not None and not isinstance(world, World):
            raise FedstrideError(f"world must be an fs.World(devices=..., links=..., availability=...), not {world!r}")
        world = world or World()
        if world.links is not None and not isinstance(world.links, Links):
            raise FedstrideError(f"links must come from fs.links.bandwidth(up, down, latency), not {world.links!r}")
        self._per_step = device_rules.resolve(world.devices, count, seed)
        self._links, self._availability, self._seed = world.links, availabilities.resolve(world.availability), seed
        if self._links is not None:
            self._links.check(count)
        if self._availability is not None:
            self._availability.check(count)

        rule = self._availability
        named = getattr(rule.function, "__qualname__", "") if isinstance(rule, availabilities.Own) else repr(rule)
        digest = hashlib.sha256(self._per_step.tobytes() + repr(self._links).encode()).hexdigest()[:16]
        self.identity = f"{digest} {named}"  # what a checkpoint must agree in; functions go by their names

    @property
    def quickest(self) -> float:
        """Seconds the fastest client needs for one step."""
        return float(self._per_step.min())

    @property
    def lossy(self) -> bool:
        """Whether clients can be absent."""
        return self._availability is not None

    def costs(self, bytes_down: float, bytes_up: float, extra: np.ndarray) -> Costs:
        """The same for one client after the other."""
        count = len(self._per_step)
        ids, zeros = np.arange(count), np.zeros(count, dtype=np.int64)
        fleet = Jobs(ids, zeros, zeros, zeros, zeros, zeros, zeros)
        transfers = ((bytes_down, "down"), (bytes_up, "up"), (0.0, "down"))
        down, up, latency = (self.transfer(fleet, *what).tolist() for what in transfers)
        return Costs(down, up, latency, self._per_step.tolist(), extra.tolist(), self._presence)

    def _presence(self, client: int, version: int, repeat: int, now: float) -> tuple[bool, float]:
        """Whether this job will come to something, and from when on the client is there: infinity if nobody knows."""
        if self._availability is None:
            return True, now
        zero = np.zeros(1, dtype=np.int64)
        job = Jobs(zero + client, zero + version, zero + repeat, zero, zero, zero, zero)
        if self.answers(job, now)[0]:
            return True, now
        if self._availability.chance:
            return False, now
        return False, max(self.wake(job, now), float(np.nextafter(now, np.inf)))

    def forsaken(self, now: float) -> bool:
        """Whether nobody of the whole fleet is there or known to come back."""
        ids, zeros = np.arange(len(self._per_step)), np.zeros(len(self._per_step), dtype=np.int64)
        fleet = Jobs(ids, zeros, zeros, zeros, zeros, zeros, zeros)
        return not self.answers(fleet, now).any() and self.wake(fleet, now) == float("inf")

    def answers(self, jobs: Jobs, now: float) -> np.ndarray:
        """[C]: who of those asked will answer."""
        if self._availability is None:
            return np.ones(len(jobs.clients), dtype=bool)
        return self._availability.answers(jobs, now, self._seed)

    def wake(self, jobs: Jobs, now: float) -> float:
        """When, from now on, the first of these clients is there; `now` if absence is a matter of chance."""
        if self._availability is None or not len(jobs.clients):
            return now
        return self._availability.wake(jobs, now, self._seed)

    def transfer(self, jobs: Jobs, bytes_: float, direction: str) -> np.ndarray:
        """[C]: seconds of a transfer, `up` or `down`."""
        if self._links is None:
            return np.zeros(len(jobs.clients))
        return self._links.seconds(jobs.clients, bytes_, direction)

    def compute(self, jobs: Jobs, steps: np.ndarray) -> np.ndarray:
        """[C]: seconds of so many steps."""
        return self._per_step[jobs.clients] * steps

    def steps_within(self, jobs: Jobs, seconds: np.ndarray) -> np.ndarray:
        """[C]: how many whole steps fit, at most those asked for."""
        per_step = self._per_step[jobs.clients]
        fit = np.where(per_step > 0, np.maximum(seconds, 0) / np.maximum(per_step, 1e-300) + 1e-9, np.inf)
        fit = np.where((per_step == 0) & (seconds < 0), 0, fit)
        return np.floor(np.minimum(fit, jobs.steps)).astype(np.int64)
