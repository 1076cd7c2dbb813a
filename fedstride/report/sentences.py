"""The words of the report: names, numbers and sentences that say no more than the runs do."""

import math
import re
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fedstride.errors import FedstrideError
from fedstride.results import Target
from fedstride.runs import Record
from fedstride.statistics import Comparison, Run, Summary, ToTarget, lower_is_better, to_target

SURE = 0.05
COMMON = ("data", "partition", "model", "loss", "rounds", "seconds", "world")  # what a comparison should not change


class Cell(NamedTuple):
    """One cell of the table: what is read at once, what is read beside it, and what it is sorted by."""

    text: str
    note: str = ""
    value: float | str = math.inf
    title: str = ""


def scale(metric: str) -> float:
    """Accuracies are read as percents."""
    return 100.0 if metric == "accuracy" else 1.0


def words(metric: str) -> str:
    """A metric's name for people."""
    return metric.replace("_", " ")


def goal_words(target: Target) -> str:
    """A target for people."""
    parts = [f"{100 * target.accuracy:g} % accuracy"] if target.accuracy is not None else []
    parts += [
        f"{words(name)} {goal:g}" for name in ("loss", "train_loss") if (goal := getattr(target, name)) is not None
    ]
    return " and ".join(parts)


def reach(runs: list[Run], goal: Target, unit: str) -> ToTarget | None:
    """None where the unit or the metric was never measured."""
    try:
        return to_target(runs, goal, unit)
    except FedstrideError:
        return None


def testable(found: Comparison) -> bool:
    """Whether the differences have a spread; equal ones make p zero, which says nothing about certainty."""
    return found.effect is not None and math.isfinite(found.effect)


def amount(found: Comparison, factor: float) -> str:
    """The mean difference and its interval."""
    return split(Summary(found.mean, found.half, len(found.differences)).text(factor)).text


def split(said: str, value: float = math.inf) -> Cell:
    """What comes before the first comma or bracket is the number; the rest stands beside it."""
    text, *rest = re.split(r" \(|, ", pretty(said), maxsplit=1)
    note = rest[0].replace("(", "").replace(")", "") if rest else ""
    if " reached" in note:  # how many did matters more than where they did
        note = note[re.search(r"\d+ of ", note).start() :]  # type: ignore[union-attr]
    return Cell(text, note, value, pretty(said) if rest else "")


def pretty(said: str) -> str:
    """Statistics speak ASCII."""
    said = re.sub(r"(?<=\d)-(?=\d)", "\N{EN DASH}", said.replace("+-", "\N{PLUS-MINUS SIGN}"))
    return re.sub(r"(?<![\w-])-(?=\d)", "\N{MINUS SIGN}", said)


def notices(groups: dict[str, list[Record]]) -> list[str]:
    """Runs that did not end as asked, and what makes them hard to compare, one sentence each."""
    said = [*_unlike(groups)]
    for status, what in (("diverged", "has no final value and is not averaged"),
                         ("unfinished", "is left out of all means; go on with it to have it counted")):  # fmt: skip
        for label, group in groups.items():
            for record in group:
                if record.status == status:
                    verb = "diverged" if status == "diverged" else "is unfinished"
                    said.append(f"{label}, seed {record.seed}, {verb} at round {record.round}: it {what}.")
    return said


def _unlike(groups: dict[str, list[Record]]) -> Iterator[str]:
    """What should be the same for all and is not, but for what the labels tell: grids."""
    fields = {label: [_fields(record) for record in group] for label, group in groups.items()}
    for name in COMMON:
        if any(f" {name}{mark}" in label for label in groups for mark in "=."):
            continue
        found: dict[str, list[str]] = {}
        for label, experiments in fields.items():
            for value in dict.fromkeys(str(one.get(name, "not set")) for one in experiments):
                found.setdefault(value, []).append(label)
        if len(found) > 1:
            values = "; ".join(f"{value}: {', '.join(labels)}" for value, labels in found.items())
            yield f"These runs differ in more than their methods, in {name} ({values})."


def _fields(record: Record) -> dict[str, Any]:
    try:
        return tomllib.loads(record.experiment)
    except tomllib.TOMLDecodeError:
        return {}


def headline(
    rivals: list[str], finals: dict[str, Summary], rated: dict[str, Comparison], metric: str, steady: bool
) -> str:
    """Which method is best, by how much, and how sure that is."""
    if not rivals:
        return "All runs diverged" if finals else "No run has finished yet"
    name, factor = words(metric), scale(metric)
    unit, gap_unit = (" %", " points") if factor == 100 else ("", "")
    winner, level = rivals[0], split(finals[rivals[0]].text(factor)).text
    what = f"{level}{unit} {name}" if unit else f"{name} {level}"
    if len(rivals) == 1:
        return f"{winner} ends at {what}"
    if not rated:
        return f"{winner} ends best, at {what}, on seeds of its own: it shares none with the others"
    near = next(iter(rated))
    gap = f"{split(Summary(abs(rated[near].mean or 0), rated[near].half, 1).text(factor)).text}{gap_unit}"
    side = "below" if lower_is_better(metric) else "above"
    if rated[near].p_t is None:
        lead = f"{winner} leads on the only common seed with {what}, {gap} {side} {near}"
        return f"{lead}; one seed cannot say how sure that is"
    seeds = len(rated[near].differences)
    if not testable(rated[near]):
        lead = f"{winner} leads with {what}, {gap} {side} {near} on each of {seeds} seeds"
        return f"{lead}; differences without any spread say nothing on how sure that is"
    sign = -1 if side == "below" else 1  # on the common seeds alone, the other may be ahead
    unsure = [
        label
        for label, found in rated.items()
        if found.p_t is None or found.p_t >= SURE or sign * (found.mean or 0) <= 0
    ]
    if near in unsure:
        rest = _list(unsure if len(unsure) <= 4 else [*unsure[:3], f"{len(unsure) - 3} others"], "or")
        return f"{winner} leads with {what}, but {seeds} seeds cannot tell it from {rest}"
    sure = f"p = {rated[near].p_t:.2g} over {seeds} seeds" + (f", {len(rated)} comparisons" if len(rated) > 1 else "")
    verb = "wins" if steady else "ends ahead"
    return f"{winner} {verb} with {what}, {gap} {side} {near}, the next best ({sure})"


def scope(groups: dict[str, list[Record]]) -> str:
    """What was compared."""
    seeds = {record.seed for group in groups.values() for record in group}
    runs = sum(len(group) for group in groups.values())
    return f"{_count(len(groups), 'method')}, {_count(len(seeds), 'seed')}, {_count(runs, 'run')}."


def moving(rivals: list[str], ended: dict[str, list[Run]], rated: dict[str, Comparison], metric: str) -> list[str]:
    """A warning where the winner moves by more than its lead while it ends: the last row is then a draw of luck."""
    if not rated:
        return []
    tails = []
    for run in ended[rivals[0]]:
        values = [row[metric] for row in run.rows if metric in row and math.isfinite(row[metric])]
        if run.status != "diverged" and values:
            tails.append(values[-max(3, len(values) // 10) :])
    range_ = float(np.mean([max(tail) - min(tail) for tail in tails])) if tails else 0.0
    if range_ <= abs(next(iter(rated.values())).mean or 0.0):
        return []
    factor, unit = scale(metric), " %" if scale(metric) == 100 else ""
    low, high = (factor * pick(pick(tail) for tail in tails) for pick in (min, max))
    return [
        f"{rivals[0]} still moves by more than its lead: over its last rounds between {low:.3g} and "
        f"{high:.3g}{unit}, so its final value depends on when it was stopped."
    ]


def costs(
    rivals: list[str], ended: dict[str, list[Run]], goal: Target | None, units: list[str], clock: str
) -> list[str]:
    """Who meets the target with least."""
    if goal is None or not rivals:
        return []
    wanted = {"seconds": f"least {clock} time", "megabytes": "fewest megabytes", "steps": "fewest client steps"}
    best: dict[str, list[str]] = {}
    for unit, most in wanted.items():
        ways = {
            label: way for label in rivals if (way := reach(ended[label], goal, unit)) and math.isfinite(way.median)
        }
        if unit in units and ways:
            label = min(ways, key=lambda name: ways[name].median)
            amount = split(ways[label].text()).text + (" s" if unit == "seconds" else "")
            best.setdefault(label, []).append(f"the {most} ({amount})")
    if not best:
        return [f"No method reaches {goal_words(goal)} on more than half of its seeds."]
    needs = "; ".join(f"{label} needs {_list(amounts)}" for label, amounts in best.items())
    return [f"To reach {goal_words(goal)}, {needs}; medians over seeds."]


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _list(names: list[str], last: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"
