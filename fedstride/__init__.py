"""Federated optimisation in which every client keeps its own stride."""

from typing import TYPE_CHECKING, Any

from fedstride import (
    algorithms,
    availability,
    data,
    devices,
    guards,
    links,
    losses,
    models,
    participation,
    partition,
    privacy,
    robust,
    schedule,
    statistics,
    steps,
)
from fedstride.clients import Clients
from fedstride.errors import FedstrideError
from fedstride.results import Result, Target
from fedstride.scale import Pool
from fedstride.simulate import simulate, smoothness
from fedstride.together import Together
from fedstride.world import World

if TYPE_CHECKING:
    from fedstride.experiment import Experiment
    from fedstride.study import Study

__version__ = "0.1.0"
__all__ = [
    "Clients",
    "Experiment",
    "FedstrideError",
    "Pool",
    "Result",
    "Study",
    "Target",
    "Together",
    "World",
    "algorithms",
    "availability",
    "data",
    "devices",
    "guards",
    "links",
    "losses",
    "models",
    "participation",
    "partition",
    "privacy",
    "robust",
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
