"""The report on a comparison: one HTML page that opens offline, the same figures as files, and a table of all rows."""

from pathlib import Path

from fedstride.checkpoint import write_whole
from fedstride.errors import FedstrideError
from fedstride.report import figures, tables
from fedstride.report.data import collect
from fedstride.report.findings import find
from fedstride.report.page import render
from fedstride.results import Target
from fedstride.runs import load, text


def write(folder: str | Path, target: float | Target | None = None) -> Path:
    """Write report.html, table.csv, table.parquet and figures/ into the folder of a comparison; return the page.

    target: an accuracy (or a Target) to which the table counts rounds, seconds, megabytes and steps; without one, the
    largest round accuracy that at least half of the runs reach.
    """
    folder = Path(folder)
    records = load(folder)
    findings = find(records, target)
    data = collect(records, findings)
    columns, lines = tables.tidy(records)
    made = {"table.csv": tables.as_csv(columns, lines)}
    parquet = tables.as_parquet(columns, lines)
    if parquet is not None:
        made["table.parquet"] = parquet
    drawn = figures.draw(data, findings)
    said = f"Beside this page: {', '.join(made)}, all rows of all runs" + ("; " if drawn else ".")
    said += f"figures/, the figures as PNG and SVG: {', '.join(drawn)}." if drawn else ""
    if parquet is None:
        said += " There is no table.parquet because pyarrow is not installed."
    for name, (png, svg) in drawn.items():
        made |= {f"figures/{name}.png": png, f"figures/{name}.svg": svg}
    title = folder.resolve().name
    made["report.html"] = render(title, findings, data, records, text(folder / "study.toml"), said).encode()
    try:
        (folder / "figures").mkdir(exist_ok=True)
        for name, content in made.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise FedstrideError(f"cannot write the report into {folder}: {error.strerror}") from None
    return folder / "report.html"
