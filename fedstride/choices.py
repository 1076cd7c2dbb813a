"""Parts of an experiment with choices: their names, their options, and the objects behind them.

Options are those of the function or class behind a name, so there is nothing to keep in step here.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny

from fedstride import (
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
    steps,
)
from fedstride.algorithm import REGISTRY
from fedstride.errors import FedstrideError, unknown

FLEETS: dict[str, Callable[..., Any]] = {
    "least-squares": data.least_squares,
    "synthetic": data.synthetic,
}  # born partitioned
AUTOMATIC = ("seed", "classes")  # filled in from the rest of the experiment, unless given


def _top5(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The share of examples whose class is among the five largest outputs."""
    return float((outputs.topk(min(5, outputs.shape[1]), dim=1).indices == targets[:, None]).any(1).double().mean())


CHOICES: dict[str, dict[str, Callable[..., Any]]] = {
    "data": {**{name: data.load for name in data.files.NAMES}, **FLEETS},
    "partition": {
        kind.__name__: kind
        for kind in (
            partition.iid, partition.dirichlet, partition.classes, partition.shards, partition.fedveca,
            partition.quantity,
        )
    },
    "model": models.BUILDERS,
    "method": REGISTRY,  # type: ignore[dict-item]
    "loss": {
        name: getattr(losses, name)
        for name in ("cross_entropy", "least_squares", "least_squares_sum", "squared_hinge", "parity_hinge")
    },
    "steps": {"gaussian": steps.gaussian, "epochs": steps.epochs, "unfinished": steps.unfinished},
    "augment": {"crop-flip": data.crop_flip},
    "participation": {
        "full": participation.full, "uniform": participation.uniform, "weighted": participation.weighted,
        "bernoulli": participation.bernoulli,
    },
    "schedule": {
        "sync": schedule.Sync, "deadline": schedule.Deadline, "buffered": schedule.Buffered,
        "first-arrivals": schedule.FirstArrivals, "send-buffers": schedule.SendBuffers,
    },
    "guard": {"norms": guards.Norms},
    "robust": {"trimmed-mean": robust.TrimmedMean, "median": robust.Median},
    "privacy": {"gaussian": privacy.Gaussian},
    "devices": {
        "seconds": devices.seconds, "slowdown": devices.slowdown, "lognormal": devices.lognormal,
        "flops": devices.flops, "trace": devices.trace,
    },
    "links": {"bandwidth": links.bandwidth},
    "availability": {
        "dropout": availability.dropout, "cycle": availability.cycle, "daytime": availability.daytime,
        "trace": availability.trace,
    },
    "metrics": {"top5": _top5, "sign_accuracy": models.sign_accuracy, "parity_accuracy": models.parity_accuracy},
}  # fmt: skip


class Choice(BaseModel):
    """A name and its options."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """What is given beside the name."""
        return dict(self.model_extra or {})

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


def known_options(slot: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """The options of a choice with their defaults, and those that must be given."""
    if slot in ("loss", "metrics"):
        return {}, []
    if slot == "data" and name not in FLEETS:
        paths = {"path": None, "test": None, "features": None} if name == "svmlight" else {}
        return {"normalise": True} | paths, ["path"] if paths else []
    parameters = inspect.signature(CHOICES[slot][name]).parameters
    allowed = {key: found.default for key, found in parameters.items() if key not in ("dataset", "inputs")}
    automatic = () if slot == "partition" else AUTOMATIC
    needed = [key for key, default in allowed.items() if default is inspect.Parameter.empty and key not in automatic]
    return allowed | ({"seed": 0} if slot == "model" else {}), needed


def shown_options(slot: str, name: str) -> str:
    """The options of a choice as one would write them; those without a value must be given."""
    allowed, needed = known_options(slot, name)
    shown = [key if key in needed else f"{key}={default}" for key, default in allowed.items() if key not in AUTOMATIC]
    return ", ".join(shown)


def choice(slot: str) -> Any:
    """A field whose value is one of the choices of a slot."""

    def check(value: Any) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if isinstance(value, Choice):
            value = value.model_dump()
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            return value
        name = value["name"]
        if name not in CHOICES[slot]:
            raise ValueError(unknown(slot, name, sorted(CHOICES[slot])))
        allowed, needed = known_options(slot, name)
        for key, given in value.items():
            if key == "name":
                continue
            if key not in allowed:
                nothing = f"{slot} {name!r} has no options, but {key!r} is given"
                raise ValueError(unknown(f"option of {slot} {name!r}:", key, list(allowed)) if allowed else nothing)
            if isinstance(allowed[key], (int, float)):
                switch = isinstance(allowed[key], bool)
                if switch != isinstance(given, bool) or isinstance(given, str):
                    right = "true or false" if switch else "a number"
                    raise ValueError(f"{key} of {slot} {name!r} must be {right}, not {given!r}")
        for key in needed:
            if key not in value:
                raise ValueError(f"{slot} {name!r} needs {key}")
        return value

    return Annotated[SerializeAsAny[Choice], BeforeValidator(check)]


def build(slot: str, value: Any) -> Any:
    """An object from a choice; numbers are taken as they are."""
    if not isinstance(value, Choice):
        return list(value) if isinstance(value, tuple) else value
    try:
        return CHOICES[slot][value.name](**value.options)
    except (TypeError, ValueError) as error:
        if isinstance(error, FedstrideError):
            raise
        raise FedstrideError(f"{slot} {value.name!r} cannot take {value.options}: {error}") from None
