"""The command line: run, compare, sweep, reproduce, report, deploy, list, bench.

Exit codes: 0 done, 2 bad input, 3 every run diverged, 130 Ctrl-C.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedstride import __version__
from fedstride.arguments import Items, description, method
from fedstride.choices import CHOICES, shown_options
from fedstride.deploy import cli as deploy
from fedstride.errors import FedstrideError, unknown
from fedstride.scale import Pool
from fedstride.statistics import Run
from fedstride.study import Planned, Study, listed
from fedstride.terminal import end, err, live, ranked, show, shown_metric, summary

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(deploy.app, name="deploy", help="The same experiment over a network, on Flower.")

Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the results; runs that are there stay.")]
Seeds = Annotated[str | None, typer.Option(help="How many seeds, or which: 3, or 0,5,7")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with unfinished runs.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Train in so many processes, on Ray: docs/scale.md.")]
RayAddress = Annotated[
    str | None, typer.Option("--ray", help="A Ray cluster to take the workers from: auto, or its address.")
]
Track = Annotated[str | None, typer.Option(help="Also write to tensorboard or mlflow.")]


@app.command()
def run(
    items: Items = None, out: Out = None, seeds: Seeds = None, resume: Resume = False, json_: Json = False,
    track: Track = None, workers: Workers = None, ray: RayAddress = None,
) -> None:  # fmt: skip
    """Run an experiment, on one seed or several; of a file with several methods, each of them."""
    end(_study(description(items, seeds), "run", items, out, resume, json_, track, _pool(workers, ray))[1])


@app.command()
def compare(
    items: Items = None,
    methods: Annotated[
        str | None, typer.Option("--methods", "-m", help="Names, with options if need be: fedavg,fedprox:mu=0.1")
    ] = None,
    out: Out = None, seeds: Seeds = None, resume: Resume = False, json_: Json = False, track: Track = None,
    workers: Workers = None, ray: RayAddress = None,
) -> None:  # fmt: skip
    """Compare methods on the same clients, batches, starting weights and world, seed by seed, and write a report."""
    given = description(items, seeds)
    if methods is not None:
        given["methods"] = [method(text) for text in methods.split(",")]
    methods = given.get("methods", [])
    if not isinstance(methods, list) or len(methods) < 2:
        raise FedstrideError("compare needs at least two methods, such as --methods fedavg,scaffold")
    folder, results = _study(given, "compare", items, out, resume, json_, track, _pool(workers, ray))
    _report(folder, None, quiet=json_)
    end(results)


@app.command()
def sweep(
    items: Items = None,
    over: Annotated[
        list[str] | None, typer.Option("--over", help="A field and its values: lr=0.01,0.1. Several make a grid.")
    ] = None,
    by: Annotated[str, typer.Option(help="The metric that decides which point is best.")] = "accuracy",
    out: Out = None, seeds: Seeds = None, resume: Resume = False, json_: Json = False, track: Track = None,
    workers: Workers = None, ray: RayAddress = None,
) -> None:  # fmt: skip
    """Try every point of a grid over any fields and name the best by a metric."""
    given = description(items, seeds)
    for text in over or []:
        path, equals, values = text.partition("=")
        if not equals:
            raise FedstrideError(f"--over needs a field and its values, such as lr=0.01,0.1, not {text!r}")
        given.setdefault("grid", {})[path] = listed(values)
    grid = given.get("grid")
    if not isinstance(grid, dict) or not grid:
        raise FedstrideError("sweep needs a grid, such as --over lr=0.01,0.1")
    if "method.name" in grid:
        given.pop("methods", None)  # the grid says which methods
    end(_study(given, "sweep", items, out, resume, json_, track, _pool(workers, ray), by)[1])


@app.command()
def reproduce(
    what: Annotated[str | None, typer.Argument(metavar="PAPER[/ITEM]", help="Such as o1t, or o1t/figure2.")] = None,
    scale: Annotated[
        str, typer.Option(help="smoke: seconds; cpu: a stated reduction; full: the paper's setting.")
    ] = "cpu",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds; by default what the item asks for.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs under way.")] = Path("runs/reproduce"),
    list_: Annotated[bool, typer.Option("--list", help="Show items, what they cost, and what is done.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side: a batch or processes; 1: in turn.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Run the full scale even without a GPU.")] = False,
    workers: Workers = None,
    ray: RayAddress = None,
) -> None:
    """Run what is missing of the five papers' tables and figures, and put ours beside the printed numbers."""
    from fedstride.reproduce import command

    if list_:
        command.show(what)
        return
    if what is None:
        raise FedstrideError("say which paper, or which of its items; `fedstride reproduce --list` shows them")
    pool = _pool(workers, ray)
    if pool is not None and jobs is not None:
        raise FedstrideError("--jobs and --workers both say how many runs go side by side; give one of them")
    try:
        command.run(what, scale, seeds, out, jobs, yes, err, pool)
    except KeyboardInterrupt:
        err.print("interrupted; the same command goes on from the last checkpoint")
        raise typer.Exit(130) from None


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder that run, compare or sweep has written.")],
    target: Annotated[float | None, typer.Option(help="The accuracy to count rounds, seconds and bytes to.")] = None,
) -> None:
    """Write one HTML page with tables and figures, the figures as PNG and SVG, and a table of all rows."""
    if target is not None and not 0 < target <= 1:
        raise FedstrideError(f"the target is an accuracy from 0 to 1, such as 0.9, not {target:g}")
    _report(folder, target)


@app.command("list")
def list_(what: Annotated[str | None, typer.Argument(help=f"One of {', '.join(CHOICES)}.")] = None) -> None:
    """What can be chosen, and with which options: methods, data, partitions, models, schedules, ..."""
    if what is not None and what.rstrip("s") not in CHOICES and what not in CHOICES:
        raise FedstrideError(unknown("list", what, list(CHOICES)))
    console = Console(highlight=False, markup=False)
    for slot, choices in CHOICES.items():
        if what is not None and slot not in (what, what.rstrip("s")):
            continue
        table = Table("name", "", title=slot, title_justify="left", box=None, show_header=False)
        for name, kind in sorted(choices.items()):
            text = "" if slot in ("data", "loss") else (kind.__doc__ or "").strip().partition("\n")[0]
            table.add_row(name, "\n".join(filter(None, (text, shown_options(slot, name)))))
        console.print(table)


@app.command()
def bench(json_: Json = False) -> None:
    """Client-steps per second on this machine, by model and backend."""
    from fedstride.bench import measure

    rows = list(measure())
    if json_:
        typer.echo(json.dumps(rows))
        return
    table = Table("model", "clients", "backend", "client-steps/s", box=None)
    for row in rows:
        table.add_row(row["model"], str(row["clients"]), row["backend"], f"{row['rate']:,.0f}")
    Console(highlight=False, markup=False).print(table)


@app.command()
def version() -> None:
    """The version of fedstride."""
    typer.echo(__version__)


def _pool(workers: int | None, ray: str | None) -> Pool | None:
    """Workers that start when they are needed; None if none are asked for."""
    return None if workers is None and ray is None else Pool(workers, ray)


def _study(
    description: dict[str, Any], command: str, items: list[str] | None, out: Path | None, resume: bool, json_: bool,
    track: str | None, workers: Pool | None, by: str = "accuracy",
) -> tuple[Path, dict[str, list[Run]]]:  # fmt: skip
    """Run a study, show it, and return its folder and results."""
    from fedstride.track import tracker

    study = Study.parse(description)
    stem = next((Path(item).stem for item in items or [] if item.endswith(".toml")), study.base.data.name)
    base = Path("runs") / f"{command}-{stem}"
    others = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    folder = out or next(place for place in itertools.chain((base,), others) if study.fits(place, resume))
    with live(study, json_) as (watch, done), tracker(track, folder) as follow:

        def both(plan: Planned, row: dict[str, Any]) -> None:
            if command == "sweep" and {"loss", "train_loss"} & row.keys():  # a misspelt metric comes out at once
                shown_metric({plan.label: [Run(plan.experiment.seed, [row])]}, by)
            watch(plan, row)
            follow(plan, row)

        def over(plan: Planned, run: Run) -> None:
            if command == "sweep":  # or, where nothing is measured, after the first run
                shown_metric({plan.label: [run]}, by)
            done(plan, run)

        try:
            results = study.play(folder, resume, both, over, workers)
        except KeyboardInterrupt:
            err.print("interrupted; the same command with --resume goes on from the last checkpoint")
            raise typer.Exit(130) from None
    wanted = by if command == "sweep" else None
    if json_:
        best = {"best": ranked(results, by)[0]} if wanted else {}
        typer.echo(json.dumps({"folder": str(folder), "runs": summary(results)} | best, allow_nan=False))
    else:
        show(results, wanted, folder)
    return folder, results


def _report(folder: Path, target: float | None, quiet: bool = False) -> None:
    from fedstride.report import write

    page = write(folder, target)
    if not quiet:
        typer.echo(f"report: {page}")


def main() -> None:
    """Entry point: mistakes are one sentence on standard error."""
    try:
        app()
    except FedstrideError as error:
        err.print(f"error: {error}", soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
