"""The contract of a method, and the registry.

A method is one frozen dataclass in one file: what travels, what a client does, how the server combines. State goes in
and comes out as NamedTuples; nothing is kept on `self`. Client code sees a cohort at once: `[C, d]` matrices with a
row a client, `[C, 1]` columns for per-client scalars, `[1, d]` for what all share.
"""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from fedstride.clients import Fleet
from fedstride.errors import FedstrideError, unknown
from fedstride.replies import Header, Replies
from fedstride.sampling import Jobs
from fedstride.schedule import Schedule, Sync
from fedstride.train import Work

LOCAL_OPTIONS = frozenset({"momentum", "weight_decay", "clip"})


class Params(NamedTuple):
    """State or message of a method that knows nothing but the model."""

    x: Tensor


class Delta(NamedTuple):
    """Upload of a method that sends nothing but its displacement, local minus server."""

    dx: Tensor


class Exchange(NamedTuple):
    """One message down and one reply up; a round is one or more of them with the same cohort."""

    message: Callable[[Any], Any]
    client: Callable[[Work, Any, Any], tuple[Any, Any]]
    server: Callable[[Any, Replies], Any]
    name: str = "train"  # part of the key of every random draw
    audience: Callable[[Any, Jobs], np.ndarray] | None = None  # which of the cohort are asked; None: all
    insist: bool = False  # asked until everybody has answered: prologues, which nobody may miss


class Algorithm:
    """What every method gives. Fields of the dataclass are its hyper-parameters; the rest is declared here."""

    name: ClassVar[str] = ""  # set by `register`
    weights: ClassVar[str] = "data"  # the method's own fleet weights
    full_only: ClassVar[bool] = False  # needs everyone in every round
    assigns: ClassVar[bool] = False  # decides the clients' steps itself, by `assign`
    common_lr: ClassVar[bool] = False  # needs the same learning rate for all clients
    pooled: ClassVar[bool] = False  # not federated: one client holds all data and nothing travels
    displacements: ClassVar[bool] = False  # clients send their displacement, nothing else, and remember nothing of it
    local_options: ClassVar[frozenset[str]] = LOCAL_OPTIONS  # which local-optimiser options leave the method itself

    def __new__(cls, *_: Any, **options: Any) -> "Algorithm":
        """Refuse unknown options in words."""
        if not dataclasses.is_dataclass(cls):
            raise FedstrideError(f"{cls.__name__} is not registered; put @register('its-name') above the class")
        known = [field.name for field in dataclasses.fields(cls)]
        for option in options:
            if option not in known:
                raise FedstrideError(f"{cls.name} has no option {option!r}; it has {', '.join(known) or 'none'}")
        return super().__new__(cls)

    @property
    def exact(self) -> bool:
        """Whether exact gradients and a fixed step lead to the optimum of the weighted objective."""
        return False

    @property
    def exact_partial(self) -> bool:
        """Whether that holds with part of the fleet in a round, too."""
        return self.exact and not self.full_only

    @property
    def schedule(self) -> Schedule:
        """When clients start and the server acts, unless a run says otherwise."""
        return Sync()

    @property
    def fixed_fleet(self) -> bool:
        """Whether the server's vectors stand for a fleet known from the start, so that nobody can join later."""
        return self.full_only or bool(self.prologue)

    @property
    def local_steps(self) -> int | None:
        """Steps of every job, where the method fixes them once and for all; then the run's `steps` are not used."""
        return None

    @property
    def full_gradients(self) -> int:
        """Gradients over all local data that `client` takes besides its steps: a deadline must leave time for them."""
        return 0

    @property
    def needs_rows(self) -> bool:
        """Whether `server` needs every client's own vectors, not only their weighted sums."""
        return False

    @property
    def inspects(self) -> bool:
        """Whether `server` looks at single uploads, by `rows` or by `each`, and not only at means and totals."""
        return self.needs_rows

    @property
    def traffic(self) -> tuple[int, int]:
        """Vectors of model size a participant receives and sends in a round."""
        return (1, 1)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of one round."""
        return (Exchange(self.message, self.client, self.server),)

    @property
    def prologue(self) -> tuple[Exchange, ...]:
        """Exchanges with the whole fleet before the first round."""
        return ()

    def place(self, exchange: Exchange) -> int:
        """Which of the exchanges it is: what travels instead of the exchange itself."""
        names = [one.name for one in (self.prologue if exchange.insist else self.exchanges)]
        return names.index(exchange.name)

    def init(self, x: Tensor, fleet: Fleet) -> Any:
        """Server state for the starting point; a NamedTuple with a field `x`."""
        return Params(x)

    def init_client(self, x: Tensor) -> Any:
        """What one client remembers before its first job; `()` for nothing."""
        return ()

    def message(self, state: Any) -> Any:
        """What travels down."""
        return Params(state.x)

    def client(self, work: Work, msg: Any, memory: Any) -> tuple[Any, Any]:
        """Local work of a cohort; returns the upload and the memory that counts once the upload was used."""
        raise FedstrideError(f"{self.name} has no client(self, work, msg, memory)")

    def server(self, state: Any, replies: Replies) -> Any:
        """The next server state."""
        raise FedstrideError(f"{self.name} has no server(self, state, replies)")

    def factor(self, reply: Header) -> Tensor | None:
        """[R]: by how much every reply counts in `replies.mean`, such as a discount for staleness; None: 1."""
        return None

    def assign(self, state: Any, clients: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Steps for these clients, where the method `assigns` them."""
        raise NotImplementedError

    def model(self, state: Any) -> Tensor:
        """The global model to evaluate and to hand out."""
        return state.x

    def report(self, state: Any) -> dict[str, Any]:
        """Diagnostics for this round's row."""
        return {}


REGISTRY: dict[str, type[Algorithm]] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: make a frozen dataclass of it and enter it in the registry."""

    def enter(cls: type) -> type:
        old = REGISTRY.get(name)
        if old is not None and (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
            raise FedstrideError(
                f"a method called {name!r} is registered already, by {old.__module__}; choose another name"
            )
        cls = dataclasses.dataclass(frozen=True)(cls)
        cls.name = name  # type: ignore[attr-defined]
        REGISTRY[name] = cls
        return cls

    return enter


def names() -> list[str]:
    """All registered methods."""
    return sorted(REGISTRY)


def make(name: str, **options: Any) -> Algorithm:
    """A method by its registry name."""
    if name not in REGISTRY:
        raise FedstrideError(unknown("method", name, names()))
    return REGISTRY[name](**options)


def check_choice(method: Algorithm, field: str, choices: tuple[str, ...]) -> None:
    """Refuse a field that is not one of the choices."""
    value = getattr(method, field)
    if value not in choices:
        raise FedstrideError(f"{method.name}: {field} must be one of {', '.join(choices)}, not {value!r}")


def check_whole(method: Algorithm, field: str, low: int, high: float = float("inf")) -> None:
    """Refuse what is not a whole number in [low, high]."""
    value = getattr(method, field)
    if not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise FedstrideError(f"{method.name}: {field} must be a whole number from {low} to {high}, not {value!r}")


def check_number(
    method: Algorithm, field: str, low: float = 0.0, high: float = float("inf"), open: bool = False
) -> None:
    """Refuse a number outside [low, high], or outside (low, high) if `open`."""
    value = getattr(method, field)
    inside = isinstance(value, numbers.Real)
    inside = inside and (low < float(value) < high if open else low <= float(value) <= high)
    if not inside:
        bounds = f"({low:g}, {high:g})" if open else f"[{low:g}, {high:g}]"
        raise FedstrideError(f"{method.name}: {field} must be a number in {bounds}, not {value!r}")
