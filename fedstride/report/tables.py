"""A tidy table over all runs: one line a row, for spreadsheets and data frames."""

import csv
import io
import json
from typing import Any

from fedstride.runs import Record


def tidy(records: list[Record]) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns, and a line for every row of every run; lists become JSON text."""
    columns = ["label", "seed", "status"]
    lines = []
    for record in records:
        for row in record.rows:
            columns += [name for name in row if name not in columns]
            values = {
                name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in row.items()
            }
            lines.append(values | {"label": record.label, "seed": record.seed, "status": record.status})
    return columns, lines


def as_csv(columns: list[str], lines: list[dict[str, Any]]) -> bytes:
    """Comma-separated values."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue().encode()


def as_parquet(columns: list[str], lines: list[dict[str, Any]]) -> bytes | None:
    """Apache Parquet; None without pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return None
    arrays = {}
    for name in columns:
        values = [line.get(name) for line in lines]
        kinds = {type(value) for value in values if value is not None}
        if kinds > {int} and kinds <= {int, float}:
            values = [None if value is None else float(value) for value in values]
        elif len(kinds) > 1:
            values = [None if value is None else str(value) for value in values]
        arrays[name] = pyarrow.array(values)
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays), out)
    return out.getvalue()
