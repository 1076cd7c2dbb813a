"""The world a fleet lives in: devices, links, availability; and what a job costs in it. Nothing ever sleeps."""

from dataclasses import dataclass
from typing import Any

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
        """[C]: how many whole steps fit."""
        per_step = self._per_step[jobs.clients]
        room = np.floor(np.maximum(seconds, 0) / np.where(per_step > 0, per_step, 1) + 1e-9)
        return np.where(per_step > 0, room, np.iinfo(np.int64).max >> 1).astype(np.int64)
