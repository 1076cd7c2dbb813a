"""One experiment as data: everything a run needs, validated before anything is loaded; TOML in and out.

A part with choices (data, partition, model, method, schedule, ...) is a name and its options:
`{name = "dirichlet", clients = 20, alpha = 0.3}`, or the name alone: see fedstride/choices.py.
"""

import inspect
import json
import os
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from torch import nn

from fedstride import data, inputs, losses, models, oracle, steps
from fedstride.algorithm import REGISTRY, Algorithm
from fedstride.algorithms import FedAvg
from fedstride.checkpoint import write_whole
from fedstride.choices import CHOICES, FLEETS, Choice, build, choice
from fedstride.clients import Clients
from fedstride.errors import FedstrideError, unknown
from fedstride.losses import LossFunction
from fedstride.results import Result, Target
from fedstride.scale import Pool
from fedstride.simulate import simulate
from fedstride.together import Together, able
from fedstride.world import Pace, World


class Surroundings(BaseModel):
    """`fs.World` as data."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    devices: float | tuple[float, ...] | choice("devices") | None = None  # type: ignore[valid-type]
    links: choice("links") | None = None  # type: ignore[valid-type]
    availability: choice("availability") | None = None  # type: ignore[valid-type]


class Goal(BaseModel):
    """`fs.Target` as data."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    accuracy: float | None = Field(None, ge=0, le=1)
    loss: float | None = None
    train_loss: float | None = None


class Experiment(BaseModel):
    """A run: what `fs.simulate` takes, as data, and where the data come from."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    data: choice("data") = Choice(name="digits")  # type: ignore[valid-type]
    partition: choice("partition") | None = Choice(name="dirichlet", clients=20, alpha=0.3)  # type: ignore[valid-type, call-arg]
    model: choice("model") = Choice(name="mlp")  # type: ignore[valid-type]
    loss: choice("loss") | None = None  # type: ignore[valid-type]  # None: by the kind of targets
    method: choice("method") = Choice(name=FedAvg.name)  # type: ignore[valid-type, attr-defined]
    rounds: int = Field(20, ge=1)
    seconds: float | None = Field(None, gt=0)
    lr: float | tuple[float, ...] = 0.1
    steps: int | tuple[int, ...] | choice("steps") = 10  # type: ignore[valid-type]
    batch_size: int | Literal["all"] = 10
    sampling: Literal["replacement", "shuffle"] = "replacement"
    augment: choice("augment") | None = None  # type: ignore[valid-type]
    participation: choice("participation") | None = None  # type: ignore[valid-type]
    schedule: choice("schedule") | None = None  # type: ignore[valid-type]
    world: Surroundings | None = None
    weights: Literal["data", "uniform"] | None = None
    wire: Literal["float16"] | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    guard: choice("guard") | None = None  # type: ignore[valid-type]
    robust: choice("robust") | None = None  # type: ignore[valid-type]
    privacy: choice("privacy") | None = None  # type: ignore[valid-type]
    every: int = Field(1, ge=1)
    metrics: tuple[choice("metrics"), ...] = ()  # type: ignore[valid-type]
    train_loss: bool = False
    stop: Goal | None = None
    seed: int = Field(0, ge=0, lt=2**62)
    device: str = "auto"
    backend: str = "auto"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    chunk: int | None = Field(None, ge=1)
    memory: float | None = Field(None, ge=0)
    timeline: bool = True

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"must not be {str(value).lower()}")
        return value

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise FedstrideError(_sentence(error)) from None

    @classmethod
    def parse(cls, description: Any) -> "Experiment":
        """From a nested dict; a mistake is one sentence that says where it is and what would be right."""
        if not isinstance(description, dict) or not all(isinstance(key, str) for key in description):
            raise FedstrideError(f"the description must be a table of fields, not {str(description)[:80]!r}")
        if several := [name for name in ("methods", "seeds", "grid") if name in description]:
            raise FedstrideError(f"a description with {' and '.join(several)} is a study: fs.Study reads and plays it")
        if isinstance(description.get("metrics"), str):
            description = description | {"metrics": [description["metrics"]]}
        return cls(**description)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Experiment":
        """From a TOML file."""
        return cls.parse(read_toml(path))

    def dump(self) -> dict[str, Any]:
        """A nested dict of what is set, which `parse` reads."""
        return json.loads(self.model_dump_json(exclude_none=True))

    def save(self, path: str | os.PathLike) -> None:
        """To a TOML file."""
        write_whole(Path(path), tomli_w.dumps(self.dump()).encode())

    def prepare(self, real: bool = False) -> "Prepared":
        """Build every part and refuse what cannot go together; data are loaded last.

        real: seconds are those of a clock on the wall, so nothing need be said about the world.
        """
        method = self.make_method()
        protection = {slot: build(slot, getattr(self, slot)) for slot in ("guard", "robust", "privacy")}
        built = {slot: build(slot, getattr(self, slot)) for slot in ("augment", "participation", "schedule")}
        rule = build("steps", self.steps)
        world = (
            None
            if self.world is None
            else World(
                **{slot: build(slot, getattr(self.world, slot)) for slot in ("devices", "links", "availability")}
            )
        )
        stop = None if self.stop is None else Target(**self.stop.model_dump())
        plan = built["schedule"] or method.schedule
        who, resolved = inputs.participation(method, built["participation"], plan), steps.resolve(rule)
        count = self.count
        if count is not None and not method.pooled:
            who.check(count, self.rounds)
            resolved.check(count, self.rounds)
            remembers = bool(method.init_client(torch.zeros(1)))
            inputs.check_schedule(method, plan, resolved, count, self.rounds, remembers)
            inputs.check_protection(method, plan, who, count, self.rounds, **protection)
            if not real:
                inputs.check_time(method, world, plan, Pace(world, count, self.seed))
            inputs.rate(self.lr, count)
        if not real:
            inputs.budget(self.seconds, world, method)
        inputs.local(method, self.momentum, self.weight_decay, self.clip)
        oracle.check(self.backend, inputs.device(self.device))
        batch_size = None if self.batch_size == "all" else inputs.whole("batch_size", self.batch_size)
        clients, test, classes = self.fleet()
        inputs.goal(stop, test, self.train_loss)
        model = self.make_model(tuple(clients.inputs.shape[1:]), len(classes))
        loss = self.make_loss(bool(classes))
        settings = dict(
            loss=loss, rounds=self.rounds, seconds=self.seconds, lr=self.lr, steps=rule, sampling=self.sampling,
            world=world, test=test,
            batch_size=batch_size, weights=self.weights, wire=self.wire,
            stop=stop, momentum=self.momentum, weight_decay=self.weight_decay, clip=self.clip, every=self.every,
            seed=self.seed,
            metrics={choice.name: CHOICES["metrics"][choice.name] for choice in self.metrics} if test else None,
            train_loss=self.train_loss, device=self.device, backend=self.backend, dtype=getattr(torch, self.dtype),
            chunk=self.chunk, memory=self.memory, timeline=self.timeline, **built, **protection,
        )  # fmt: skip
        return Prepared(method, model, clients, classes, settings)

    def make_method(self) -> Algorithm:
        """The method with its options."""
        return REGISTRY[self.method.name](**self.method.options)

    def make_model(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The model for examples of this shape; what its options say goes first."""
        return models.make(self.model.name, **self._model_options(shape, classes))

    def make_loss(self, labels: bool) -> LossFunction:
        """The loss, by the kind of targets unless it is named."""
        named = CHOICES["loss"][self.loss.name] if self.loss else None
        return named or (losses.cross_entropy if labels else losses.least_squares)

    def settled(self, classes: int) -> "Experiment":
        """The same with the number of classes and the seed in the model's options, for who has not all the data."""
        options = {name: value for name, value in self._model_options((1,), classes).items() if name != "inputs"}
        return Experiment.parse(self.dump() | {"model": {"name": self.model.name, **options}})

    def run(
        self,
        folder: str | os.PathLike | None = None,
        resume: bool = False,
        progress: Any = False,
        together: Together | None = None,
        workers: Pool | None = None,
    ) -> Result:
        """Simulate it, alone or, where it gains by that, with other runs."""
        method, model, clients, _, settings = self.prepare()
        if together is not None and able(self):
            settings["backend"] = together
        settings |= dict(folder=folder, resume=resume, progress=progress, workers=workers)
        return simulate(method, model, clients, **settings)

    def fleet(self) -> tuple[Clients, tuple | None, tuple[str, ...]]:
        """Clients, test data and names of classes."""
        seed = self.seed
        own = {key: value for key, value in self.data.options.items() if key != "seed"}
        if self.data.name in FLEETS:
            if self.partition is not None and self.partition != Experiment.model_fields["partition"].default:
                raise FedstrideError(f"data {self.data.name!r} comes as clients already; leave partition out")
            make = FLEETS[self.data.name]
            made = make(**own, seed=self.data.options.get("seed", seed))
            if isinstance(made, Clients):
                return made, None, ()
            clients, test = made
            classes = own.get("classes", inspect.signature(make).parameters["classes"].default)
            return clients, test, tuple(str(label) for label in range(classes))
        if self.partition is None:
            raise FedstrideError("a partition is needed, such as {name = 'iid', clients = 20}")
        try:
            dataset = _dataset(self.data.name, json.dumps(own, sort_keys=True))
        except TypeError as error:
            raise FedstrideError(f"data {self.data.name!r} cannot take {own}: {error}") from None
        options = {"seed": seed} | self.partition.options
        return CHOICES["partition"][self.partition.name](dataset, **options), dataset.test, dataset.classes

    @property
    def count(self) -> int | None:
        """How many clients there will be, where that is known beforehand."""
        part = self.data if self.data.name in FLEETS else self.partition
        count = None if part is None else part.options.get("clients")
        return None if count is None else inputs.whole("clients", count)

    @property
    def reads_data(self) -> bool:
        """Whether the examples are read, so that other runs have the same, not drawn for this run."""
        return self.data.name not in FLEETS

    @property
    def cohort(self) -> int | None:
        """How many clients train at a time, where that is known beforehand."""
        drawn = self.participation.options.get("n") if self.participation else None
        return self.count if drawn is None else inputs.whole("n", drawn)

    def _model_options(self, shape: tuple[int, ...], classes: int) -> dict[str, Any]:
        """The model's own options, the seed of the run, and what the data say about shapes."""
        known = inspect.signature(models.BUILDERS[self.model.name]).parameters
        found: dict[str, Any] = {"seed": self.seed, "inputs": shape}
        if "classes" in known:
            found["classes"] = classes or 1
        return found | self.model.options


class Prepared(NamedTuple):
    """What `fs.simulate` takes."""

    method: Any
    model: nn.Module
    clients: Clients
    classes: tuple[str, ...]
    settings: dict[str, Any]


@lru_cache(maxsize=2)
def _dataset(name: str, options: str) -> data.Dataset:
    """A data set stays in memory for the runs that follow."""
    return data.load(name, **json.loads(options))


def read_toml(path: str | os.PathLike) -> dict[str, Any]:
    """A TOML file as a dict."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise FedstrideError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedstrideError(f"{path} is not TOML: {error}") from None


def _sentence(error: ValidationError) -> str:
    """The first mistake, where it is and what would be right."""
    first = min(error.errors(), key=lambda e: e["type"] not in ("value_error", "extra_forbidden"))
    names = [str(part) for part in first["loc"] if not (isinstance(part, str) and _internal(part))]
    where = ".".join(names) or "the description"
    if first["type"] == "extra_forbidden":
        fields = Surroundings if names[:-1] == ["world"] else Goal if names[:-1] == ["stop"] else Experiment
        inside = f" in {'.'.join(names[:-1])}" if names[1:] else ""
        return unknown(f"key{inside}", names[-1], sorted(fields.model_fields))
    message = first["msg"].removeprefix("Value error, ")
    for internal in ("Choice", "Surroundings", "Goal"):
        message = message.replace(f"valid dictionary or instance of {internal}", "table with a name or fields")
    given = "" if first["type"] == "value_error" else f", not {str(first['input'])[:80]!r}"
    return f"{where}: {message[:1].lower() + message[1:]}{given}"


def _internal(part: str) -> bool:
    """Whether a part of an error's place is pydantic's name for a type and not a key of the user's."""
    return "[" in part or part in ("int", "float", "str", "Choice", "bool") or part.startswith(("function-", "literal"))
