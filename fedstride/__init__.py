"""Federated optimisation in which every client keeps its own stride."""

from fedstride import (
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
from fedstride.clients import Clients
from fedstride.errors import FedstrideError
from fedstride.results import Result, Target
from fedstride.simulate import simulate, smoothness
from fedstride.world import World

__version__ = "0.1.0"
__all__ = [
    "Clients",
    "FedstrideError",
    "Result",
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
