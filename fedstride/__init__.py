"""Federated optimisation in which every client keeps its own stride."""

from fedstride import algorithms, losses, participation, schedule, steps
from fedstride.clients import Clients
from fedstride.errors import FedstrideError
from fedstride.results import Result, Target
from fedstride.simulate import simulate, smoothness

__version__ = "0.1.0"
__all__ = [
    "Clients",
    "FedstrideError",
    "Result",
    "Target",
    "algorithms",
    "losses",
    "participation",
    "schedule",
    "simulate",
    "smoothness",
    "steps",
]
