"""How fast links are: bandwidth each way in bits per second, latency in seconds, one of each a client or for all."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstride.errors import FedstrideError

Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Links:
    """Constant bandwidth and latency; no contention."""

    up: tuple[float, ...]  # bits per second
    down: tuple[float, ...]
    latency: tuple[float, ...]  # seconds, each way

    def check(self, count: int) -> None:
        """Refuse links that do not fit the fleet or never deliver."""
        for name, values in (("up", self.up), ("down", self.down), ("latency", self.latency)):
            if len(values) not in (1, count):
                raise FedstrideError(f"links: {name} lists {len(values)} numbers for {count} clients")
            low = min(values)
            if not np.isfinite(values).all() or low < 0 or (name != "latency" and low == 0):
                right = "finite and not negative" if name == "latency" else "finite and positive"
                raise FedstrideError(f"links: {name} must be {right}, not {list(values)[:6]}")

    def seconds(self, clients: np.ndarray, bytes_: float, direction: str) -> np.ndarray:
        """[C]: how long a transfer takes."""
        speed, latency = np.array(getattr(self, direction)), np.array(self.latency)
        speed = speed[clients] if len(speed) > 1 else speed
        latency = latency[clients] if len(latency) > 1 else latency
        return np.broadcast_to(8 * bytes_ / speed + latency, clients.shape)


def bandwidth(up: Numbers, down: Numbers | None = None, latency: Numbers = 0.0) -> Links:
    """Bits per second each way (`down` as `up` unless given) and latency in seconds."""
    try:
        columns = (np.atleast_1d(np.asarray(v, dtype=np.float64)) for v in (up, up if down is None else down, latency))
        return Links(*(tuple(map(float, column)) for column in columns))
    except (TypeError, ValueError):
        raise FedstrideError(f"bandwidth needs numbers, not {up!r}, {down!r}, {latency!r}") from None
