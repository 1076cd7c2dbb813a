"""Ours beside the paper's: ratios, orderings, claims."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedstride import statistics
from fedstride.reproduce.items import Cell, Measure
from fedstride.reproduce.store import Found


@dataclass(frozen=True)
class Ordering:
    """Two columns of a row that the paper puts in an order."""

    row: str
    measure: Measure
    better: str
    worse: str
    outcome: str  # agrees, disagrees, tied, or not run
    sure: bool = False  # the interval of the difference over seeds leaves zero out


@dataclass(frozen=True)
class Verdict:
    """What the runs say about an item."""

    done: int  # cells with a run
    cells: int
    orderings: tuple[Ordering, ...]
    claims: tuple[tuple[str, bool | None], ...]
    held: int  # claims of the paper that hold
    told: int  # claims of the paper that could be judged

    def count(self, outcome: str) -> int:
        """Orderings with this outcome."""
        return sum(ordering.outcome == outcome for ordering in self.orderings)

    @property
    def sure(self) -> int:
        """Orderings that agree beyond the spread over seeds."""
        return sum(ordering.sure and ordering.outcome == "agrees" for ordering in self.orderings)

    def text(self) -> str:
        """In one sentence."""
        words = [f"{self.done} of {self.cells} cells run"]
        if self.orderings:
            known = len(self.orderings) - self.count("not run")
            words.append(
                f"{self.count('agrees')} of {known} orderings as printed ({self.sure} beyond the spread over seeds), "
                f"{self.count('disagrees')} reversed, {self.count('tied')} tied"
            )
        if self.told:
            words.append(f"{self.held} of {self.told} claims of the paper hold")
        return "; ".join(words)


def judge(found: Found) -> Verdict:
    """Everything the paper prints or says, against what was run."""
    item = found.item
    answers = [_ask(claim.holds, found) for claim in item.claims]
    claims = tuple((f"{'(ours) ' * claim.ours}{claim.text}", holds) for claim, holds in zip(item.claims, answers))
    papers = [holds for claim, holds in zip(item.claims, answers) if holds is not None and not claim.ours]
    return Verdict(found.done, len(item.cells), tuple(_orderings(found)), claims, sum(papers), len(papers))


def ratio(found: Found, cell: Cell, measure: Measure) -> float | None:
    """Ours over the printed number, where both are numbers."""
    printed, values = cell.printed.get(measure.name), list(found.values(cell.row, cell.column, measure).values())
    if printed is None or not math.isfinite(printed) or not printed or not values:
        return None
    ours = _typical(values)
    return ours / printed if math.isfinite(ours) else None


def shown(found: Found, cell: Cell, measure: Measure) -> str:
    """Ours for a table: the mean and its interval, or, where runs failed, the median and how many did not."""
    values = list(found.values(cell.row, cell.column, measure).values())
    if not values:
        return ""
    good = [value for value in values if math.isfinite(value)]
    typical = _typical(values)
    if len(good) < len(values):
        runs = found.best(cell)
        diverged = sum(run["status"] == "diverged" for run in runs)
        late = [run for run in runs if run["values"][measure.name] is None and run["status"] != "diverged"]
        if math.isfinite(typical):
            text = measure.text(typical)
        elif measure.unit and late:  # where those ended that did not reach the target
            text = f"> {np.median([run[measure.unit] for run in late]):,.0f}"
        else:
            text = measure.text(float(np.median(good))) if good else "diverged" if diverged else "none"
        notes = [f"{len(good)} of {len(values)} runs" if good else f"{len(values)} runs"]
        notes += [f"{diverged} diverged"] if diverged and text != "diverged" else []
        return text if len(values) == 1 else f"{text} ({', '.join(notes)})"
    half = statistics.interval(good)[1]
    return measure.text(typical) + (f" ± {measure.text(half)}" if half is not None else "")


def _typical(values: list[float]) -> float:
    """The mean, or, where runs failed, the median."""
    return float(np.mean(values)) if all(map(math.isfinite, values)) else float(np.median(values))


def _ask(holds, found: Found) -> bool | None:
    """A claim about runs that are not there cannot be judged."""
    if not found.runs:
        return None
    answer = holds(found)
    return None if answer is None else bool(answer)


def _orderings(found: Found) -> Iterator[Ordering]:
    item = found.item
    for order in item.orders:
        yield _compare(found, order.row, item.measures[0], order.better, order.worse)
    for row in item.rows:
        cells = [cell for cell in item.cells if cell.row == row]
        for measure in (measure for measure in item.measures if measure.ordered):
            printed = [(cell.column, cell.printed[measure.name]) for cell in cells if measure.name in cell.printed]
            for i, (one, first) in enumerate(printed):
                for two, second in printed[i + 1 :]:
                    if first == second:
                        continue  # the paper prints a tie
                    ahead = (first < second) == measure.lower
                    yield _compare(found, row, measure, *((one, two) if ahead else (two, one)))


def _compare(found: Found, row: str, measure: Measure, better: str, worse: str) -> Ordering:
    """Seed by seed; a run that failed counts as if it had needed twice the longest, or had half the least."""
    first, second = (found.values(row, column, measure) for column in (better, worse))
    common = sorted(first.keys() & second.keys())
    if not common:
        return Ordering(row, measure, better, worse, "not run")
    finite = [value for values in (first, second) for value in values.values() if math.isfinite(value)]
    failed = (2 * max(finite) + 1 if measure.lower else min(finite) / 2 - 1) if finite else 0.0
    sign = 1 if measure.lower else -1
    gains = [sign * ((_or(second[seed], failed)) - _or(first[seed], failed)) for seed in common]
    mean, half = statistics.interval(gains)
    assert mean is not None
    sure = bool(half) and abs(mean) > half  # type: ignore[operator]  # equal differences on a few seeds prove nothing
    return Ordering(row, measure, better, worse, "agrees" if mean > 0 else "disagrees" if mean < 0 else "tied", sure)


def _or(value: float, instead: float) -> float:
    return value if math.isfinite(value) else instead
