"""The command line: run, compare, sweep, reproduce, report, deploy, list, bench.

Exit codes: 0 done, 2 bad input, 3 every run diverged, 130 Ctrl-C.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedstride import __version__, runs, statistics
from fedstride.errors import FedstrideError, unknown
from fedstride.experiment import CHOICES, Experiment, known_options, read_toml
from fedstride.statistics import Run
from fedstride.study import Planned, Study, override, parse_override

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
err = Console(stderr=True, highlight=False, markup=False)

Items = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.toml] [KEY=VALUE]...", help="A description, and fields to change: lr=0.05 method.mu=1"
    ),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the results; runs that are there stay.")]
Seeds = Annotated[str | None, typer.Option(help="How many seeds, or which: 3, or 0,5,7")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with unfinished runs.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Track = Annotated[str | None, typer.Option(help="Also write to tensorboard or mlflow.")]


@app.command()
def run(
    items: Items = None, out: Out = None, seeds: Seeds = None, resume: Resume = False, json_: Json = False,
    track: Track = None,
) -> None:  # fmt: skip
    """Run one experiment, on one seed or several."""
    _exit(_study(_description(items, seeds), "run", items, out, resume, json_, track)[1])


@app.command()
def compare(
    items: Items = None,
    methods: Annotated[
        str | None, typer.Option("--methods", "-m", help="Names, with options if need be: fedavg,fedprox:mu=0.1")
    ] = None,
    out: Out = None, seeds: Seeds = None, resume: Resume = False, json_: Json = False, track: Track = None,
) -> None:  # fmt: skip
    """Compare methods on the same clients, batches, starting weights and world, seed by seed, and write a report."""
    description = _description(items, seeds)
    if methods is not None:
        description["methods"] = [_method(text) for text in methods.split(",")]
    listed = description.get("methods", [])
    if not isinstance(listed, list) or len(listed) < 2:
        raise FedstrideError("compare needs at least two methods, such as --methods fedavg,scaffold")
    folder, results = _study(description, "compare", items, out, resume, json_, track)
    _report(folder, None, quiet=json_)
    _exit(results)


@app.command()
def sweep(
    items: Items = None,
    over: Annotated[
        list[str] | None, typer.Option("--over", help="A field and its values: lr=0.01,0.1. Several make a grid.")
    ] = None,
    by: Annotated[str, typer.Option(help="The metric that decides which point is best.")] = "accuracy",
    out: Out = None, seeds: Seeds = None, resume: Resume = False, json_: Json = False, track: Track = None,
) -> None:  # fmt: skip
    """Try every point of a grid over any fields and name the best by a metric."""
    description = _description(items, seeds)
    for text in over or []:
        path, values = text.partition("=")[::2]
        description.setdefault("grid", {})[path] = [parse_override(f"v={value}")[1] for value in values.split(",")]
    grid = description.get("grid")
    if not isinstance(grid, dict) or not grid:
        raise FedstrideError("sweep needs a grid, such as --over lr=0.01,0.1")
    if "method.name" in grid:
        description.pop("methods", None)  # the grid says which methods
    _exit(_study(description, "sweep", items, out, resume, json_, track, by)[1])


@app.command()
def reproduce(
    what: Annotated[str | None, typer.Argument(metavar="PAPER[/ITEM]", help="Such as dlsgd, or dlsgd/table2.")] = None,
    scale: Annotated[
        str, typer.Option(help="smoke: seconds; cpu: a stated reduction; full: the paper's setting.")
    ] = "cpu",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds; by default what the item asks for.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs under way.")] = Path("runs/reproduce"),
    list_: Annotated[bool, typer.Option("--list", help="Show items, what they cost, and what is done.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="How many runs side by side.")] = 1,
    yes: Annotated[bool, typer.Option("--yes", help="Run the full scale even without a GPU.")] = False,
) -> None:
    """Run what is missing of the five papers' tables and figures, and put ours beside the printed numbers."""
    from fedstride.reproduce import command

    if list_:
        command.show(what)
        return
    if what is None:
        raise FedstrideError("say which paper, or which of its items; `fedstride reproduce --list` shows them")
    try:
        command.run(what, scale, seeds, out, jobs, yes, err)
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


deploy = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(deploy, name="deploy", help="The same experiment over a network, on Flower.")


Home = Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")]
Half = Annotated[bool, typer.Option("--half", help="Send vectors as float16.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which a silent client is given up.")]
Keys = Annotated[Path | None, typer.Option(help="Folder with certificates and keys, from `fedstride deploy keys`.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Send in the clear, also to other machines.")]


@deploy.command()
def local(items: Items = None, out: Home = Path("runs/deploy"), half: Half = False, timeout: Timeout = 600.0) -> None:
    """Server and clients on this machine, one process each, as many as the partition has clients."""
    command = _deployment()
    _deployed(command.local(Experiment.parse(_description(items, None)), out, half, timeout, err))


@deploy.command()
def server(
    clients: Annotated[int, typer.Option(min=1, help="How many clients to wait for.")],
    items: Items = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9092,
    keys: Keys = None, insecure: Insecure = False, out: Home = Path("runs/deploy"), half: Half = False,
    timeout: Timeout = 600.0,
) -> None:  # fmt: skip
    """The server of a federation; started again in the same folder, it goes on."""
    command, experiment = _deployment(), Experiment.parse(_description(items, None))
    _deployed(command.server(experiment, out, clients, host, port, keys, insecure, half, timeout, err))


@deploy.command()
def client(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    number: Annotated[int, typer.Option(min=0, help="This client's number, from 0.")],
    data: Annotated[Path | None, typer.Option(help="An .npz file with the arrays inputs and targets.")] = None,
    memory: Annotated[Path, typer.Option(help="Folder for what this client remembers.")] = Path("memory"),
    keys: Keys = None, insecure: Insecure = False,
) -> None:  # fmt: skip
    """A client of a federation, until it is stopped. Without --data it takes its part of the experiment's data set."""
    raise typer.Exit(_deployment().client(server, number, data, memory, keys, insecure))


@deploy.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    clients: Annotated[int, typer.Option(min=1, help="How many clients get a key.")],
    host: Annotated[list[str], typer.Option(help="Names and addresses by which clients reach the server.")],
) -> None:
    """Certificates for the server and a key for every client."""
    _deployment()
    from fedstride.deploy.keys import write

    write(folder, clients, [*host, "127.0.0.1", "localhost"])
    typer.echo(f"{folder}: a client gets ca.crt and its node-K; everything else stays with the server")


def _deployment() -> Any:
    try:
        from fedstride.deploy import command
    except ImportError:
        raise FedstrideError("deployment needs Flower: pip install 'fedstride[deploy]'") from None
    return command


def _deployed(folder: Path) -> None:
    results = {folder.parent.name: [runs.read(folder.parent.name, 0, folder).run]}
    _print(results, None, folder)
    _exit(results)


@app.command("list")
def list_(what: Annotated[str | None, typer.Argument(help=f"One of {', '.join(CHOICES)}.")] = None) -> None:
    """What can be chosen: methods, data, partitions, models, schedules, ..."""
    if what is not None and what.rstrip("s") not in CHOICES and what not in CHOICES:
        raise FedstrideError(unknown("list", what, list(CHOICES)))
    console = Console(highlight=False, markup=False)
    for slot, choices in CHOICES.items():
        if what is not None and slot not in (what, what.rstrip("s")):
            continue
        table = Table("name", "", title=slot, title_justify="left", box=None, show_header=False)
        for name, kind in sorted(choices.items()):
            text = (kind.__doc__ or "").strip().splitlines() if callable(kind) else []
            table.add_row(name, text[0] if text and slot not in ("data", "loss") else "")
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


def _description(items: list[str] | None, seeds: str | None) -> dict[str, Any]:
    """Files first, then settings, in the order given."""
    description: dict[str, Any] = {}
    defaults = Experiment.parse({}).dump()
    settings = []
    for item in items or []:
        if _is_file(item):
            description |= read_toml(item)
        else:
            settings.append(parse_override(item))
    for path, value in settings:
        head, dot, rest = path.partition(".")
        if head == "method":
            description.pop("methods", None)  # said on the command line, it is the one that is meant
        if dot and head not in description and head in defaults:
            description[head] = defaults[head]  # partition.clients=5 changes the default partition
            if rest == "name" and value in CHOICES.get(head, {}):
                allowed = known_options(head, value)[0]
                description[head] = {key: given for key, given in defaults[head].items() if key in allowed}
        description = override(description, path, value)
    if seeds is not None:
        values = parse_override(f"seeds=[{seeds}]")[1]
        if not isinstance(values, list):
            raise FedstrideError(f"seeds must be a number or a list such as 0,5,7, not {seeds!r}")
        description["seeds"] = values[0] if len(values) == 1 else values
    return description


def _is_file(item: str) -> bool:
    try:
        return item.endswith(".toml") or Path(item).is_file()
    except OSError:  # a setting longer than a file name may be
        return False


def _method(text: str) -> dict[str, Any]:
    """`fedprox:mu=0.1:...` as a name and options."""
    name, *options = text.strip().split(":")
    return {"name": name, **dict(parse_override(option) for option in options)}


def _study(
    description: dict[str, Any], command: str, items: list[str] | None, out: Path | None, resume: bool, json_: bool,
    track: str | None, by: str = "accuracy",
) -> tuple[Path, dict[str, list[Run]]]:  # fmt: skip
    """Run a study, show it, and return its folder and results."""
    from fedstride.track import tracker

    study = Study.parse(description)
    stem = next((Path(item).stem for item in items or [] if item.endswith(".toml")), study.base.data.name)
    folder = out or Path("runs") / f"{command}-{stem}"
    with _live(study, json_) as (watch, done), tracker(track, folder) as follow:

        def both(plan: Planned, row: dict[str, Any]) -> None:
            watch(plan, row)
            follow(plan, row)

        def over(plan: Planned, run: Run) -> None:
            if command == "sweep":
                _metric({plan.label: [run]}, by)  # a misspelt metric comes out after the first run, not the last
            done(plan, run)

        try:
            results = study.play(folder, resume, both, over)
        except KeyboardInterrupt:
            err.print("interrupted; the same command with --resume goes on from the last checkpoint")
            raise typer.Exit(130) from None
    wanted = by if command == "sweep" else None
    if json_:
        best = {"best": _ranked(results, by)[0]} if wanted else {}
        typer.echo(json.dumps({"folder": str(folder), "runs": _summary(results)} | best))
    else:
        _print(results, wanted, folder)
    return folder, results


def _exit(results: dict[str, list[Run]]) -> None:
    if all(run.status == "diverged" for runs in results.values() for run in runs):
        raise typer.Exit(3)


@contextmanager
def _live(study: Study, quiet: bool) -> Iterator[tuple]:
    """Progress on the terminal: runs done, the round, accuracy, virtual time, time left."""
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, disable=quiet or not err.is_terminal) as bars:
        everything = bars.add_task("all runs", total=len(study.plans), numbers=f"0/{len(study.plans)}")
        current = bars.add_task("", total=1.0, numbers="")

        def watch(plan: Planned, row: dict[str, Any]) -> None:
            share = row["round"] / plan.experiment.rounds
            if plan.experiment.seconds:
                share = max(share, row["seconds"] / plan.experiment.seconds)
            numbers = [f"round {row['round']}"]
            numbers += [f"accuracy {row['accuracy']:.3f}"] if "accuracy" in row else []
            numbers += [f"{row['seconds']:.1f} s"] if row["seconds"] else []
            bars.update(current, description=str(plan), completed=min(1.0, share), numbers=", ".join(numbers))

        def done(plan: Planned, run: Run) -> None:
            bars.advance(everything)
            bars.update(everything, numbers=f"{int(bars.tasks[0].completed)}/{len(study.plans)}")
            if bars.disable and not quiet:
                last = run.rows[-1] if run.rows else {}
                accuracy = f", accuracy {last['accuracy']:.3f}" if "accuracy" in last else ""
                err.print(f"{plan}: {run.status} after {last.get('round', 0)} rounds{accuracy}")

        yield watch, done


def _metric(results: dict[str, list[Run]], wanted: str | None) -> str:
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


def _ranked(results: dict[str, list[Run]], metric: str) -> list[str]:
    """Labels, the best first; those whose runs all diverged last."""
    means = {label: statistics.summarise(runs, metric).mean for label, runs in results.items()}
    sign = 1 if statistics.lower_is_better(metric) else -1
    return sorted(means, key=lambda label: (means[label] is None, sign * (means[label] or 0)))


def _summary(results: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """One entry a run, for machines."""
    return [
        {"label": label, "seed": run.seed, "status": run.status, "last": run.rows[-1] if run.rows else {}}
        for label, runs in results.items()
        for run in runs
    ]


def _print(results: dict[str, list[Run]], by: str | None, folder: Path) -> None:
    """The table a person wants to read; with `by`, the best first."""
    metric = _metric(results, by)
    scale = 100.0 if metric == "accuracy" else 1.0
    console = Console(highlight=False, markup=False)
    table = Table(
        "method", f"{metric}{' %' if scale == 100 else ''}", "best", "client steps", "MB", "virtual s", box=None
    )
    rows = {label: statistics.summarise(runs, metric) for label, runs in results.items()}
    order = _ranked(results, metric) if by else list(rows)
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
