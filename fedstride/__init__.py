"""Federated optimisation in which every client keeps its own stride."""

import os
from typing import TYPE_CHECKING, Any

# Threads that wait for work should sleep: those that spin slow down whatever else runs on the machine, and are slowed
# down by it, several times over. Torch reads this when it is first loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fedstride import (  # noqa: E402
    algorithms,
    availability,
    data,
    devices,
    links,
    losses,
    models,
    participation,
    partition,
    schedule,
    statistics,
    steps,
)
from fedstride.clients import Clients  # noqa: E402
from fedstride.errors import FedstrideError  # noqa: E402
from fedstride.results import Result, Target  # noqa: E402
from fedstride.simulate import simulate, smoothness  # noqa: E402
from fedstride.world import World  # noqa: E402

if TYPE_CHECKING:
    from fedstride.experiment import Experiment
    from fedstride.study import Study

__version__ = "0.1.0"
__all__ = [
    "Clients",
    "Experiment",
    "FedstrideError",
    "Result",
    "Study",
    "Target",
    "World",
    "algorithms",
    "availability",
    "data",
    "devices",
    "links",
    "losses",
    "models",
    "participation",
    "partition",
    "schedule",
    "simulate",
    "smoothness",
    "statistics",
    "steps",
]


def __getattr__(name: str) -> Any:
    """Descriptions of experiments need pydantic; nothing else does, so they are loaded when asked for."""
    if name == "Experiment":
        from fedstride.experiment import Experiment

        return Experiment
    if name == "Study":
        from fedstride.study import Study

        return Study
    raise AttributeError(f"module 'fedstride' has no attribute {name!r}")
