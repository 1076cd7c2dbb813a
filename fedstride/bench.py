"""How fast this machine trains cohorts: client-steps per second by model, cohort and backend."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedstride import models
from fedstride.algorithms import FedAvg
from fedstride.clients import Clients
from fedstride.simulate import simulate

CASES = {
    "logistic": ((1, 28, 28), 20),
    "mlp-fedlga": ((1, 28, 28), 5),
    "cnn-dlsgd": ((1, 28, 28), 2),
}  # name: inputs, steps


def measure() -> Iterator[dict[str, Any]]:
    """One row for every model, number of clients and backend; batches of 10, random data."""
    rng = np.random.default_rng(0)
    for name, (shape, steps) in CASES.items():
        for count in (10, 100):
            data = [(rng.normal(size=(20, *shape)).astype(np.float32), rng.integers(0, 10, 20)) for _ in range(count)]
            clients = Clients.from_arrays(data)
            for backend in ("sequential", "vmap"):
                times: list[float] = []
                simulate(
                    FedAvg(), models.make(name, inputs=shape), clients, rounds=4, steps=steps, backend=backend,
                    progress=lambda row, times=times: times.append(time.perf_counter()),  # type: ignore[misc]
                )  # fmt: skip
                seconds = min(b - a for a, b in zip(times, times[1:]))  # the first round warms up
                yield {"model": name, "clients": count, "backend": backend, "rate": count * steps / seconds}
