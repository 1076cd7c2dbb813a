"""A table or figure of a paper as data: its experiments, the numbers printed for them, and what the paper claims.

A paper is a module in `papers/` with TITLE, ITEMS and perhaps OMITTED, the names of what is printed and has no item; an
item is a function of the scale ("cpu", "full") that returns an `Item`. "smoke" is the cpu item shrunk to seconds by
`fedstride.reproduce.smoke`.
"""

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedstride import statistics
from fedstride.errors import FedstrideError, unknown
from fedstride.experiment import Experiment
from fedstride.results import Target
from fedstride.statistics import Run

if TYPE_CHECKING:
    from fedstride.reproduce.store import Found

SCALES = ("smoke", "cpu", "full")


@dataclass(frozen=True)
class Measure:
    """One number of a run. A target that was not reached and a run that diverged give the worst number there is."""

    name: str  # such as "rounds to 80 %": the head of a table
    value: Callable[[Run], float]
    lower: bool = True  # less is better
    places: int | None = 0  # decimals in tables; None: three digits, wherever they stand
    unit: str = ""  # of the way to a target: rounds or seconds
    ordered: bool = True  # whether printed numbers put methods in an order that runs can show

    @property
    def worst(self) -> float:
        """What a run has that failed."""
        return math.inf if self.lower else -math.inf

    def text(self, value: float) -> str:
        """For tables."""
        return f"{value:.3g}" if self.places is None else f"{value:,.{self.places}f}"

    def of(self, run: Run) -> float:
        """The number of one run."""
        value = math.nan if run.status == "diverged" else self.value(run)
        return value if math.isfinite(value) else self.worst


def rounds_to(accuracy: float) -> Measure:
    """Rounds until the test accuracy is reached."""
    return Measure(f"rounds to {100 * accuracy:g} %", lambda run: _reach(run, accuracy, "rounds"), unit="rounds")


def seconds_to(accuracy: float) -> Measure:
    """Virtual seconds until the test accuracy is reached."""
    name = f"seconds to {100 * accuracy:g} %"
    return Measure(name, lambda run: _reach(run, accuracy, "seconds"), places=1, unit="seconds")


def final(metric: str = "accuracy", last: int = 1, scale: float = 100.0, places: int = 2) -> Measure:
    """A metric at the end: the mean over the last rows that have it."""

    def value(run: Run) -> float:
        values = [row[metric] for row in run.rows if metric in row][-last:]
        return scale * sum(values) / len(values)

    name = f"{metric.replace('_', ' ')}{' %' if 'accuracy' in metric and scale == 100 else ''}"
    name += f" x {scale:g}" if scale not in (1, 100) or (scale == 100 and "accuracy" not in metric) else ""
    return Measure(name, value, statistics.lower_is_better(metric), places)


def best(metric: str = "accuracy", scale: float = 100.0, places: int = 2) -> Measure:
    """The best value of a metric."""
    lower = statistics.lower_is_better(metric)

    def value(run: Run) -> float:
        values = [row[metric] for row in run.rows if metric in row]
        return scale * (min if lower else max)(values, default=math.nan)

    return Measure(f"best {metric}{' %' if scale == 100 else ''}", value, lower, places)


def _reach(run: Run, accuracy: float, unit: str) -> float:
    reach = statistics.to_target([run], Target(accuracy=accuracy), unit).runs[0]
    return reach.at if reach.outcome == "reached" else math.inf


@dataclass(frozen=True)
class Cell:
    """One place of a table: the experiment, and what the paper prints there."""

    row: str  # cells of one row are compared with each other
    column: str  # mostly the method
    experiment: Experiment
    printed: Mapping[str, float] = field(default_factory=dict)  # by measure; math.inf: "not reached"
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # tuned over on the first seed, best result taken
    # What is known only once the seed is: adapt(experiment, client steps of the run in column `after` of the same row).
    adapt: Callable[[Experiment, int], Experiment] | None = None
    after: str = ""


@dataclass(frozen=True)
class Order:
    """The paper says, without a number, that one is better than the other."""

    row: str
    better: str
    worse: str


@dataclass(frozen=True)
class Claim:
    """Something else the paper says that runs can show; None while that cannot be said."""

    text: str
    holds: Callable[["Found"], bool | None]
    ours: bool = False  # the paper does not say it


@dataclass(frozen=True)
class Item:
    """A table or figure."""

    title: str  # as in the paper, such as "Table 2"
    claim: str  # the paper's, in one sentence
    cells: tuple[Cell, ...]
    measures: tuple[Measure, ...]  # the first one decides tuning and explicit orders
    seeds: int = 3
    choices: tuple[str, ...] = ()  # what the paper leaves open, and what was taken
    reduced: str = ""  # what the cpu scale leaves out
    orders: tuple[Order, ...] = ()
    claims: tuple[Claim, ...] = ()
    derive: Callable[[dict[str, Any], Experiment], dict[str, float]] | None = (
        None  # more numbers for every row of a run
    )
    curve: tuple[str, str] = ("accuracy", "rounds")  # metric and axis of the picture
    beside: tuple[str, ...] = ()  # more metrics in the picture
    level: float | None = None  # a line across the picture; by default the target at which runs stop
    keep: tuple[str, ...] = ()  # more metrics to keep
    log: bool = False  # logarithmic metric axis
    ours: bool = False  # not in the paper

    def __post_init__(self) -> None:
        places = [(cell.row, cell.column) for cell in self.cells]
        if len(set(places)) < len(places):
            raise FedstrideError(f"{self.title} has two cells in one place")

    @property
    def rows(self) -> list[str]:
        """In the order of the cells."""
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        """In the order of the cells."""
        return list(dict.fromkeys(cell.column for cell in self.cells))


def papers() -> dict[str, ModuleType]:
    """All papers by name."""
    try:
        root = importlib.import_module("papers")
    except ImportError:
        raise FedstrideError(
            "the papers' experiments are not installed; run this in a clone of the repository"
        ) from None
    names = [found.name for found in pkgutil.iter_modules(root.__path__)]
    modules = {name: importlib.import_module(f"papers.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "ITEMS")}


def select(what: str | None) -> list[tuple[str, str]]:
    """(paper, item) pairs for "dlsgd", "dlsgd/table2", or everything."""
    known = {name: list(module.ITEMS) for name, module in papers().items()}
    if what is None:
        return [(paper, name) for paper, names in known.items() for name in names]
    paper, slash, name = what.partition("/")
    if paper not in known:
        raise FedstrideError(unknown("paper", paper, list(known)))
    if slash and name not in known[paper]:
        raise FedstrideError(unknown(f"item of {paper}", name, known[paper]))
    return [(paper, name)] if slash else [(paper, name) for name in known[paper]]


def own_scale(paper: str, name: str, scale: str) -> str:
    """Where nothing had to be reduced, "cpu" is "full": the same runs, stored once."""
    if scale != "cpu":
        return scale
    places = [
        [(cell.row, cell.column, cell.experiment, cell.grid) for cell in item(paper, name, one).cells]
        for one in ("cpu", "full")
    ]
    return "full" if places[0] == places[1] else "cpu"


def item(paper: str, name: str, scale: str) -> Item:
    """An item at a scale."""
    from fedstride.reproduce.smoke import shrink

    if scale not in SCALES:
        raise FedstrideError(unknown("scale", scale, SCALES))
    make = papers()[paper].ITEMS[name]
    return shrink(make("cpu")) if scale == "smoke" else make(scale)
