"""The terminal: progress while runs go on, the table at their end."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedstride import statistics
from fedstride.errors import FedstrideError, unknown
from fedstride.statistics import Run
from fedstride.study import Planned, Study

err = Console(stderr=True, highlight=False, markup=False)


@contextmanager
def live(study: Study, quiet: bool) -> Iterator[tuple]:
    """Progress on the terminal: runs done, the round, accuracy, virtual time, time left."""
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, disable=quiet or not err.is_terminal) as bars:
        everything = bars.add_task("all runs", total=len(study.plans), numbers=f"0/{len(study.plans)}")
        current = bars.add_task("", total=1.0, numbers="")
        under_way: dict[str, tuple[float, str]] = {}  # how far each run is
        over = 0

        def show() -> None:
            shares = [share for share, _ in under_way.values()]
            mean = sum(shares) / len(shares) if shares else 1.0
            numbers = min(under_way.values())[1] if shares else ""  # of several runs, the one that is the furthest back
            name = next(iter(under_way), "") if len(shares) < 2 else f"{len(shares)} side by side"
            bars.update(current, description=name, completed=mean, numbers=numbers)
            bars.update(everything, completed=over + sum(shares), numbers=f"{over}/{len(study.plans)}")

        def watch(plan: Planned, row: dict[str, Any]) -> None:
            share = row["round"] / plan.experiment.rounds
            if plan.experiment.seconds:
                share = max(share, row["seconds"] / plan.experiment.seconds)
            numbers = [f"round {row['round']}"]
            numbers += [f"accuracy {row['accuracy']:.3f}"] if "accuracy" in row else []
            numbers += [f"{row['seconds']:.1f} s"] if row["seconds"] else []
            under_way[str(plan)] = min(1.0, share), ", ".join(numbers)
            show()

        def done(plan: Planned, run: Run) -> None:
            nonlocal over
            under_way.pop(str(plan), None)
            over += 1
            show()
            if bars.disable and not quiet:
                last = run.rows[-1] if run.rows else {}
                accuracy = f", accuracy {last['accuracy']:.3f}" if "accuracy" in last else ""
                err.print(f"{plan}: {run.status} after {last.get('round', 0)} rounds{accuracy}")

        yield watch, done


def shown_metric(results: dict[str, list[Run]], wanted: str | None) -> str:
    """The metric to show: the one asked for, or the first of accuracy and the losses that all runs have."""
    finished = [run for runs in results.values() for run in runs if run.status != "diverged"]
    common = [
        name
        for name in (finished[0].rows[-1] if finished else {})
        if isinstance(finished[0].rows[-1][name], (int, float))
    ]
    common = [name for name in common if all(any(name in row for row in run.rows) for run in finished)]
    if wanted is not None:
        if finished and wanted not in common:
            raise FedstrideError(unknown("metric", wanted, common))
        return wanted
    return next((name for name in ("accuracy", "loss", "train_loss", "local_loss") if name in common), "accuracy")


def ranked(results: dict[str, list[Run]], metric: str) -> list[str]:
    """Labels, the best first; after them those with diverged runs, and last those of which all diverged."""
    found = {label: statistics.summarise(runs, metric) for label, runs in results.items()}
    sign = 1 if statistics.lower_is_better(metric) else -1

    def place(label: str) -> tuple[bool, bool, float]:
        mean = found[label].mean
        return mean is None, bool(found[label].diverged), sign * (mean or 0)

    return sorted(found, key=place)


def summary(results: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """One entry a run, for machines; what is no finite number is null, as JSON knows no other."""

    def last(run: Run) -> dict[str, Any]:
        row = run.rows[-1] if run.rows else {}
        return {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in row.items()}

    return [
        {"label": label, "seed": run.seed, "status": run.status, "last": last(run)}
        for label, runs in results.items()
        for run in runs
    ]


def show(results: dict[str, list[Run]], by: str | None, folder: Path, clock: str = "virtual") -> None:
    """The table a person wants to read; with `by`, the best first."""
    metric = shown_metric(results, by)
    scale = 100.0 if metric == "accuracy" else 1.0
    console = Console(highlight=False, markup=False)
    table = Table(
        "method", f"{metric}{' %' if scale == 100 else ''}", "best", "client steps", "MB", f"{clock} s", box=None
    )
    rows = {label: statistics.summarise(runs, metric) for label, runs in results.items()}
    order = ranked(results, metric) if by else list(rows)
    for label in order:
        runs = results[label]
        best = statistics.summarise(runs, metric, "best")
        steps, traffic, seconds = (_mean(runs, name) for name in ("steps", "bytes", "seconds"))
        table.add_row(
            label,
            _short(rows[label], scale),
            _short(best, scale),
            f"{steps:,.0f}",
            f"{traffic / 1e6:,.2f}",
            f"{seconds:,.2f}",
        )
    console.print(table)
    if by and rows[order[0]].mean is not None:
        console.print(f"best by {metric}: {order[0]}")
    several = any(len(runs) > 1 for runs in results.values())
    console.print(f"{'mean and 95 % interval over seeds; ' if several else ''}results in {folder}")


def _short(summary: statistics.Summary, scale: float) -> str:
    if summary.mean is None or summary.n > 1:
        return summary.text(scale)
    return f"{scale * summary.mean:.2f}" if scale == 100 else f"{summary.mean:.4g}"


def _mean(runs: list[Run], name: str) -> float:
    """A total of the runs, averaged over seeds."""
    if name == "seconds":
        return sum(run.rows[-1]["seconds"] if run.rows else 0 for run in runs) / len(runs)
    names = ("bytes_up", "bytes_down") if name == "bytes" else (name,)
    return sum(row[key] for run in runs for row in run.rows for key in names) / len(runs)


def end(results: dict[str, list[Run]]) -> None:
    """Leave with the code for runs that all diverged, if they did."""
    if all(run.status == "diverged" for runs in results.values() for run in runs):
        raise typer.Exit(3)
