"""The pictures of docs/reproduction.md: every seed as it went, and their mean."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from fedstride.reproduce import items, store
from fedstride.reproduce.items import Item
from fedstride.reproduce.store import Found

STRETCHED = 10  # a run that is so many times as long as most would leave the others no room


def figures(folder: Path) -> None:
    """One picture an item and scale."""
    folder.mkdir(parents=True, exist_ok=True)
    for paper, name in items.select(None):
        for scale in dict.fromkeys(items.own_scale(paper, name, scale) for scale in ("full", "cpu")):
            found = Found(items.item(paper, name, scale), store.path(paper, name, scale))
            if found.done:
                picture(found).savefig(folder / f"{paper}-{name}-{scale}.png", dpi=80)


def picture(found: Found) -> Any:
    """A panel a row, a colour a column."""
    from matplotlib.figure import Figure

    item = found.item
    metric, against = item.curve
    metrics = [metric, *item.beside]
    lines = [(column, one) for column in item.columns for one in metrics]
    rows = [row for row in item.rows if any(found.curves(row, column, one, against) for column, one in lines)]
    across = 2 if len(rows) == 4 else min(3, max(1, len(rows)))
    down = max(1, math.ceil(len(rows) / across))
    figure = Figure(figsize=(3.6 * across + 2.2, 2.7 * down + 0.5), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    level = item.level if item.level is not None else _target(item, metric)
    for row, axis in zip(rows, axes):
        ends = []
        for number, (column, one) in enumerate(lines):
            style = {"color": f"C{number % 10}", "linestyle": "--" if number > 9 else "-"}
            curves = found.curves(row, column, one, against)
            _draw(axis, curves, found.diverged(row, column), one if item.beside else column, style)
            ends += [where[-1] for where, _ in curves.values()]
        if level is not None:
            axis.axhline(level, color="0.5", linestyle=":", linewidth=1)
        if max(ends) > STRETCHED * np.median(ends):
            axis.set_xscale("log")
        axis.set_title(row, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.25)
        if item.log:
            axis.set_yscale("log")
    for axis in axes[len(rows) :]:
        axis.set_visible(False)
    figure.supxlabel(against, fontsize=9)
    figure.supylabel(", ".join(metrics), fontsize=9)
    labels: dict[str, Any] = {}
    for axis in figure.axes:
        labels |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    if labels:
        figure.legend(list(labels.values()), list(labels), loc="outside right upper", fontsize=7, frameon=False)
    return figure


def _target(item: Item, metric: str) -> float | None:
    """Where the runs stop, if all of them stop at the same value of the metric."""
    targets = {getattr(cell.experiment.stop, metric, None) for cell in item.cells}
    return next(iter(targets)) if len(targets) == 1 else None


def _draw(
    axis: Any, curves: dict[int, tuple[list, list]], diverged: set[int], label: str, style: dict[str, str]
) -> None:  # fmt: skip
    """Seeds that were measured at other places are brought to those of the first one for their mean."""
    lines = {}
    for seed, points in curves.items():
        where, values = (np.array(numbers, float) for numbers in points)
        later = where > 0  # only methods that ask everybody before the first round are measured there
        lines[seed] = where[later], values[later]
    for seed, (where, values) in lines.items():
        if len(lines) > 1:
            axis.plot(where, values, linewidth=0.5, alpha=0.6, **style)
        if seed in diverged:
            axis.plot(where[-1:], values[-1:], marker="x", markersize=5, linestyle="", color=style["color"])
    if not lines:
        return
    first = next(iter(lines.values()))[0]
    at = first[first <= min(where[-1] for where, _ in lines.values())]
    mean = np.mean([np.interp(at, where, values) for where, values in lines.values()], axis=0)
    axis.plot(at, mean, label=label, linewidth=1.5, **style)
