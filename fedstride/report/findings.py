"""What the runs of a comparison say, in words and as a table; every number over seeds is from `fedstride.statistics`.

Unfinished runs are named and left out of all means. A method on whose way nothing travelled (a centralised reference)
is shown beside the others and cannot win; nor can a method with diverged runs, unless all have some.
"""

import math
from dataclasses import dataclass

from fedstride.report import sentences
from fedstride.report.sentences import Cell, amount, pretty, reach, scale, split, testable
from fedstride.results import COUNTERS, Target
from fedstride.runs import Record
from fedstride.statistics import UNITS, Run, compare, lower_is_better, summarise

FIRST = ("accuracy", "loss", "train_loss", "local_loss")  # metrics in the order in which people ask for them
ROUND = (0.99, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.4, 0.3, 0.2, 0.1)  # targets, if none is given


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
    clock: str  # what kind of seconds


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
    sign = 1 if lower_is_better(metric) else -1

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
    told = [runs for runs in ended.values() if any(run.status != "diverged" for run in runs)]
    units = [unit for unit in UNITS if goal and any(reach(runs, goal, unit) for runs in told)]
    table = {}
    for label in ranking:
        final, best, *ways, gap = _cells(label, ended[label], rivals[:1], ended, metric, goal, units)
        name = Cell(label, "reference, not federated" if label in references else "", label)
        table[label] = [name, final, best, *ways, gap, _status(groups[label])]
    clock = " or ".join(sorted({record.clock for record in records}))
    units_said = {"rounds": "rounds", "seconds": f"{clock} seconds", "megabytes": "megabytes", "steps": "client steps"}
    against = f"against {rivals[0]}" if rivals else "difference"
    columns = ["method", "final", "best", *(units_said[unit] for unit in units), against, "runs"]
    moving = sentences.moving(rivals, ended, rated, metric)
    headline = sentences.headline(rivals, finals, rated, metric, steady=not moving)
    details = [sentences.scope(groups), *moving, *sentences.costs(rivals, ended, goal, units, clock)]
    notices = sentences.notices(groups)
    return Findings(metric, metrics, goal, ranking, references, headline, details, notices, columns, table, clock)


def _metrics(groups: dict[str, list[Record]]) -> list[str]:
    """Numbers that every method measured, but for those of which no run came to an end, if others did."""
    names: list[set[str]] = []
    over = [group for group in groups.values() if any(record.status in ("finished", "stopped") for record in group)]
    for group in over or groups.values():
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


def _cells(
    label: str, runs: list[Run], winner: list[str], ended: dict[str, list[Run]], metric: str, goal: Target | None,
    units: list[str],
) -> list[Cell]:  # fmt: skip
    nothing = Cell("\N{EN DASH}")
    if not runs:
        return [nothing] * (3 + len(units))
    cells, factor = [], scale(metric)
    sign = 1 if lower_is_better(metric) else -1
    for pick in ("final", "best"):
        value = summarise(runs, metric, pick)
        cells.append(split(value.text(factor), sign * value.mean if value.mean is not None else math.inf))
    for unit in units:
        way = reach(runs, goal, unit) if goal else None
        cells.append(split(way.text(), way.median) if way else nothing)
    if winner == [label]:
        return [*cells, Cell("best", value=-math.inf)]
    if not winner or not _common(runs, ended[winner[0]]):
        return [*cells, Cell("\N{EN DASH}", "no common seed" if winner else "")]
    found = compare(runs, ended[winner[0]], metric)
    if found.mean is None:
        return [*cells, Cell("diverged", value=math.inf, title=pretty(found.text(factor)))]
    note = "one seed" if found.p_t is None else f"p = {found.p_t:.2g}" if testable(found) else "the same on all"
    return [*cells, Cell(amount(found, factor), note, sign * found.mean, pretty(found.text(factor)))]


def _status(group: list[Record]) -> Cell:
    counts = {
        name: [r for r in group if r.status == name] for name in ("finished", "stopped", "diverged", "unfinished")
    }
    said = ", ".join(f"{len(found)} {name}" for name, found in counts.items() if found)
    notes = [f"seed {r.seed} at round {r.round}" for name in ("diverged", "unfinished") for r in counts[name]]
    return Cell(said, ", ".join(notes), len(notes))
