"""`fedstride reproduce`: progress while it runs, tables at the end."""

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment
from fedstride.reproduce import costs, items, judge, play, store
from fedstride.reproduce.items import SCALES, Item
from fedstride.reproduce.store import Found
from fedstride.scale import Pool


def show(what: str | None) -> None:
    """All items, what they cost, and what is done."""
    kind = _kind()
    table = Table("item", "cpu: done", "about", "full: done", f"about, {kind}", box=None)
    table.columns[0].no_wrap = True
    table.columns[0].min_width = 32
    for paper, name in items.select(what):
        places = []
        for scale in SCALES[1:]:
            item = items.item(paper, name, items.own_scale(paper, name, scale))
            found = Found(item, store.path(paper, name, scale))
            where = "cpu" if scale == "cpu" else kind
            places += [f"{found.done} of {len(item.cells)}", duration(costs.seconds(item, item.seeds, where))]
        table.add_row(f"{paper}/{name}", *places)
    Console(highlight=False, markup=False).print(table)


def run(
    what: str, scale: str, seeds: int | None, out: Path, jobs: int | None, yes: bool, err: Console, workers: Pool | None
) -> None:
    """Run what is missing and print the tables."""
    chosen = [(paper, name, items.item(paper, name, scale)) for paper, name in items.select(what)]
    cost = 0.0
    for paper, name, item in chosen:
        count = seeds or item.seeds
        left = 1.0 if scale == "smoke" else Found(item, store.path(paper, name, scale)).left(count)
        cost += left * costs.seconds(item, count, "cpu")
    if scale == "full" and _kind() == "cpu" and not yes and cost > 1800:
        raise FedstrideError(
            f"{what} at full scale would take about {duration(cost)} without a GPU; add --yes to run it all the same, "
            "or take --scale cpu"
        )
    for paper, name, item in chosen:
        path = out / "smoke.json" if scale == "smoke" else store.path(paper, name, scale)
        if scale == "smoke":
            path.unlink(missing_ok=True)
        place = out / f"{paper}-{name}-{scale}"
        found = play.play(item, path, place, seeds or item.seeds, _watch(err), jobs, workers)
        err.print()
        tell(f"{paper}/{name}", item, found)


def tell(name: str, item: Item, found: Found) -> None:
    """The tables of an item and what they say."""
    console = Console(highlight=False, markup=False)
    console.print(f"{name}: {item.title}. {item.claim}")
    for measure in item.measures:
        printed = any(measure.name in cell.printed for cell in item.cells)
        head = f"{measure.name}: ours{' / printed' if printed else ''}"
        wide = len(item.columns) <= len(item.rows)  # the longer list goes down the page
        across, down = (item.columns, item.rows) if wide else (item.rows, item.columns)
        table = Table("", *across, title=head, title_justify="left", box=None)
        for one in down:
            places = [(one, other) if wide else (other, one) for other in across]
            table.add_row(one, *(entry(found, *place, measure) for place in places))
        console.print(table)
    verdict = judge.judge(found)
    for text, holds in verdict.claims:
        console.print(f"{'cannot be said yet' if holds is None else 'holds' if holds else 'does not hold'}: {text}")
    console.print(verdict.text())
    if item.reduced:
        console.print(f"reduced: {item.reduced}")


def entry(found: Found, row: str, column: str, measure: items.Measure) -> str:
    """One place of a table: ours / printed."""
    cell = found.cell(row, column)
    if cell is None:
        return ""
    ours, printed = judge.shown(found, cell, measure) or "-", cell.printed.get(measure.name)
    if printed is None:
        return ours
    ratio = judge.ratio(found, cell, measure) if measure.unit else None
    times = "" if ratio is None else f" (×{ratio:.2g})"
    return f"{ours} / {measure.text(printed) if printed < float('inf') else 'not reached'}{times}"


def duration(seconds: float) -> str:
    """For people."""
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, seconds):.0f} seconds"


def _kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _watch(err: Console):
    """One line that keeps changing on a terminal, one line a run elsewhere."""
    named: set[str] = set()  # runs side by side send their rows in turns
    last = 0.0

    def watch(name: str, experiment: Experiment, row: dict[str, Any]) -> None:
        nonlocal last
        if name not in named and not err.is_terminal:
            err.print(f"{name} ...")
        named.add(name)
        now = time.monotonic()
        if err.is_terminal and now - last > 0.2:
            numbers = "".join(f"  {key} {row[key]:.4g}" for key in ("accuracy", "loss", "train_loss") if key in row)
            virtual = f"  {row['seconds']:.1f} s" if row["seconds"] else ""
            err.file.write(f"\r{name}  round {row['round']}/{experiment.rounds}{virtual}{numbers}\x1b[K")
            err.file.flush()
            last = now

    return watch
