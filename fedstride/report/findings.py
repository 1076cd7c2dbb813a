"""What the runs of a comparison say, in words and as a table; every number over seeds is from `fedstride.statistics`.

Unfinished runs are named and left out of all means. A method on whose way nothing travelled (a centralised reference)
is shown beside the others and cannot win; nor can a method with diverged runs, unless all have some.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from fedstride import statistics
from fedstride.errors import FedstrideError
from fedstride.report.runs import Record
from fedstride.results import Target
from fedstride.statistics import UNITS, Comparison, Run, Summary, compare, summarise, to_target

COUNTERS = "round seconds clients steps bytes_up bytes_down rejected staleness max_staleness".split()
FIRST = ("accuracy", "loss", "train_loss", "local_loss")  # metrics in the order in which people ask for them
ROUND = (0.99, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.4, 0.3, 0.2, 0.1)  # targets, if none is given
SURE = 0.05


class Cell(NamedTuple):
    """One cell of the table: what is read at once, what is read beside it, and what it is sorted by."""

    text: str
    note: str = ""
    value: float | str = math.inf
    title: str = ""


@dataclass(frozen=True)
class Findings:
    """Everything the head of the page says."""

    metric: str  # the one that decides
    metrics: list[str]
    target: Target | None
    ranking: list[str]  # labels, the best first; those without a value last
    references: list[str]
    headline: str
    details: list[str]
    notices: list[str]
    columns: list[str]
    table: dict[str, list[Cell]]


def scale(metric: str) -> float:
    """Accuracies are read as percents."""
    return 100.0 if metric == "accuracy" else 1.0


def grouped(records: list[Record]) -> dict[str, list[Record]]:
    """The runs of every method."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.label, []).append(record)
    return groups


def find(records: list[Record], target: float | Target | None = None) -> Findings:
    """Rank the methods and say what may be said."""
    groups = grouped(records)
    metrics = _metrics(groups)
    metric = metrics[0] if metrics else "accuracy"
    ended = {label: [r.run for r in group if r.ended and (r.status == "diverged" or _has(r, metric))]
             for label, group in groups.items()}  # fmt: skip
    still = [label for label, runs in ended.items() if runs and not _travels(runs)]
    references = still if len(still) < len([label for label in ended if ended[label]]) else []
    finals = {label: summarise(runs, metric) for label, runs in ended.items() if runs}
    sign = 1 if metric.endswith("loss") else -1

    def place(label: str) -> tuple:
        final = finals.get(label)
        if final is None or final.mean is None:
            return (label in references, 2, final is None, label)
        return (label in references, bool(final.diverged), sign * final.mean, label)

    ranking = sorted(groups, key=place)
    rivals = [label for label in ranking if label not in references and label in finals]
    rivals = [label for label in rivals if finals[label].mean is not None]
    rated = {label: compare(ended[rivals[0]], ended[label], metric) for label in rivals[1:]
             if _common(ended[rivals[0]], ended[label])}  # fmt: skip
    goal = Target(accuracy=target) if isinstance(target, (int, float)) else target
    if goal is None and metric == "accuracy":
        goal = _default_target([run for label in rivals for run in ended[label]])
    units = [unit for unit in UNITS if goal and any(_reach(runs, goal, unit) for runs in ended.values())]
    table = {}
    for label in ranking:
        final, best, *ways, gap = _cells(label, ended[label], rivals[:1], ended, metric, goal, units)
        name = Cell(label, "reference, not federated" if label in references else "", label)
        table[label] = [name, final, best, *ways, gap, _status(groups[label])]
    units_said = {"rounds": "rounds", "seconds": "virtual seconds", "megabytes": "megabytes", "steps": "client steps"}
    against = f"against {rivals[0]}" if rivals else "difference"
    columns = ["method", "final", "best", *(units_said[unit] for unit in units), against, "runs"]
    details = _details(groups, rivals, ended, goal, units)
    headline = _headline(rivals, finals, rated, metric)
    return Findings(metric, metrics, goal, ranking, references, headline, details, _notices(groups), columns, table)


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


def _metrics(groups: dict[str, list[Record]]) -> list[str]:
    """Numbers that every method measured."""
    names: list[set[str]] = []
    for group in groups.values():
        rows = [row for record in group for row in record.rows]
        if rows:
            names.append({name for row in rows for name, value in row.items() if isinstance(value, float | int)})
    common = sorted(set.intersection(*names) - set(COUNTERS)) if names else []
    return [name for name in FIRST if name in common] + [name for name in common if name not in FIRST]


def _has(record: Record, metric: str) -> bool:
    return any(metric in row for row in record.rows)


def _travels(runs: list[Run]) -> bool:
    return any(row["bytes_up"] + row["bytes_down"] for run in runs for row in run.rows)


def _common(one: list[Run], two: list[Run]) -> set[int]:
    return {run.seed for run in one} & {run.seed for run in two}


def _default_target(runs: list[Run]) -> Target | None:
    """The largest round accuracy that at least half of the runs reach."""
    tops = [max((row["accuracy"] for row in run.rows if "accuracy" in row), default=0.0) for run in runs]
    for goal in ROUND:
        if tops and 2 * sum(top >= goal for top in tops) >= len(tops):
            return Target(accuracy=goal)
    return None


def _reach(runs: list[Run], goal: Target, unit: str) -> statistics.ToTarget | None:
    """None where the unit or the metric was never measured."""
    try:
        return to_target(runs, goal, unit)
    except FedstrideError:
        return None


def _cells(
    label: str, runs: list[Run], winner: list[str], ended: dict[str, list[Run]], metric: str, goal: Target | None,
    units: list[str],
) -> list[Cell]:  # fmt: skip
    nothing = Cell("\N{EN DASH}")
    if not runs:
        return [nothing] * (3 + len(units))
    cells, factor = [], scale(metric)
    sign = 1 if metric.endswith("loss") else -1
    for pick in ("final", "best"):
        value = summarise(runs, metric, pick)
        cells.append(_split(value.text(factor), sign * value.mean if value.mean is not None else math.inf))
    for unit in units:
        way = _reach(runs, goal, unit) if goal else None
        cells.append(_split(way.text(), way.median) if way else nothing)
    if winner == [label]:
        return [*cells, Cell("best", value=-math.inf)]
    if not winner or not _common(runs, ended[winner[0]]):
        return [*cells, Cell("\N{EN DASH}", "no common seed" if winner else "")]
    found = compare(runs, ended[winner[0]], metric)
    if found.mean is None:
        return [*cells, Cell("diverged", value=math.inf, title=_pretty(found.text(factor)))]
    note = "one seed" if found.p_t is None else f"p = {found.p_t:.2g}" if _testable(found) else "the same on all"
    return [*cells, Cell(_amount(found, factor), note, sign * found.mean, _pretty(found.text(factor)))]


def _testable(found: Comparison) -> bool:
    """Whether the differences have a spread; equal ones make p zero, which says nothing about certainty."""
    return found.effect is not None and math.isfinite(found.effect)


def _amount(found: Comparison, factor: float) -> str:
    """The mean difference and its interval."""
    return _split(Summary(found.mean, found.half, len(found.differences)).text(factor)).text


def _split(said: str, value: float = math.inf) -> Cell:
    """What comes before the first comma or bracket is the number; the rest stands beside it."""
    text, *rest = re.split(r" \(|, ", _pretty(said), maxsplit=1)
    note = rest[0].replace("(", "").replace(")", "") if rest else ""
    if " reached" in note:  # how many did matters more than where they did
        note = note[re.search(r"\d+ of ", note).start() :]  # type: ignore[union-attr]
    return Cell(text, note, value, _pretty(said) if rest else "")


def _pretty(said: str) -> str:
    """Statistics speak ASCII."""
    said = re.sub(r"(?<=\d)-(?=\d)", "\N{EN DASH}", said.replace("+-", "\N{PLUS-MINUS SIGN}"))
    return re.sub(r"(?<![\w-])-(?=\d)", "\N{MINUS SIGN}", said)


def _status(group: list[Record]) -> Cell:
    counts = {
        name: [r for r in group if r.status == name] for name in ("finished", "stopped", "diverged", "unfinished")
    }
    said = ", ".join(f"{len(found)} {name}" for name, found in counts.items() if found)
    notes = [f"seed {r.seed} at round {r.round}" for name in ("diverged", "unfinished") for r in counts[name]]
    return Cell(said, ", ".join(notes), len(notes))


def _notices(groups: dict[str, list[Record]]) -> list[str]:
    notices = []
    for status, what in (("diverged", "has no final value and is not averaged"),
                         ("unfinished", "is left out of all means; go on with it to have it counted")):  # fmt: skip
        for label, group in groups.items():
            for record in group:
                if record.status == status:
                    verb = "diverged" if status == "diverged" else "is unfinished"
                    notices.append(f"{label}, seed {record.seed}, {verb} at round {record.round}: it {what}.")
    return notices


def _headline(rivals: list[str], finals: dict[str, Summary], rated: dict[str, Comparison], metric: str) -> str:
    if not rivals:
        return "All runs diverged" if finals else "No run has finished yet"
    name, factor = words(metric), scale(metric)
    unit, gap_unit = (" %", " points") if factor == 100 else ("", "")
    winner, level = rivals[0], _split(finals[rivals[0]].text(factor)).text
    what = f"{level}{unit} {name}" if unit else f"{name} {level}"
    if len(rivals) == 1:
        return f"{winner} ends at {what}"
    if not rated:
        return f"{winner} ends best, at {what}, on seeds of its own: it shares none with the others"
    near = next(iter(rated))
    gap = f"{_split(Summary(abs(rated[near].mean or 0), rated[near].half, 1).text(factor)).text}{gap_unit}"
    side = "below" if metric.endswith("loss") else "above"
    if rated[near].p_t is None:
        lead = f"{winner} leads on the only common seed with {what}, {gap} {side} {near}"
        return f"{lead}; one seed cannot say how sure that is"
    seeds = len(rated[near].differences)
    if not _testable(rated[near]):
        lead = f"{winner} leads with {what}, {gap} {side} {near} on each of {seeds} seeds"
        return f"{lead}; differences without any spread say nothing on how sure that is"
    unsure = [label for label, found in rated.items() if found.p_t is None or found.p_t >= SURE]
    if near in unsure:
        rest = _list(unsure if len(unsure) <= 4 else [*unsure[:3], f"{len(unsure) - 3} others"], "or")
        return f"{winner} leads with {what}, but {seeds} seeds cannot tell it from {rest}"
    return (
        f"{winner} wins with {what}, {gap} {side} {near}, the next best (p = {rated[near].p_t:.2g} over {seeds} seeds)"
    )


def _details(
    groups: dict[str, list[Record]],
    rivals: list[str],
    ended: dict[str, list[Run]],
    goal: Target | None,
    units: list[str],
) -> list[str]:
    seeds = sorted({record.seed for group in groups.values() for record in group})
    runs = sum(len(group) for group in groups.values())
    said = [f"{_count(len(groups), 'method')}, {_count(len(seeds), 'seed')}, {_count(runs, 'run')}."]
    if goal is None or not rivals:
        return said
    best: dict[str, list[str]] = {}
    for unit, most in (
        ("seconds", "least virtual time"),
        ("megabytes", "fewest megabytes"),
        ("steps", "fewest client steps"),
    ):
        ways = {
            label: way for label in rivals if (way := _reach(ended[label], goal, unit)) and math.isfinite(way.median)
        }
        if unit in units and ways:
            label = min(ways, key=lambda name: ways[name].median)
            amount = _split(ways[label].text()).text + (" s" if unit == "seconds" else "")
            best.setdefault(label, []).append(f"the {most} ({amount})")
    if best:
        needs = "; ".join(f"{label} needs {_list(amounts)}" for label, amounts in best.items())
        said.append(f"To reach {goal_words(goal)}, {needs}; medians over seeds.")
    else:
        said.append(f"No method reaches {goal_words(goal)} on more than half of its seeds.")
    return said


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _list(names: list[str], last: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"
