"""What a command line says: files, settings, methods with options."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedstride.choices import CHOICES, known_options
from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment, read_toml
from fedstride.study import override, parse_override

Items = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.toml] [KEY=VALUE]...", help="A description, and fields to change: lr=0.05 method.mu=1"
    ),
]


def description(items: list[str] | None, seeds: str | None) -> dict[str, Any]:
    """Files first, then settings, in the order given."""
    found: dict[str, Any] = {}
    defaults = Experiment.parse({}).dump()
    settings = []
    for item in items or []:
        if _is_file(item):
            found |= read_toml(item)
        else:
            settings.append(parse_override(item))
    for path, value in settings:
        head, dot, rest = path.partition(".")
        if head == "method":
            found.pop("methods", None)  # said on the command line, it is the one that is meant
        if dot and head not in found and head in defaults:
            found[head] = defaults[head]  # partition.clients=5 changes the default partition
            if rest == "name":
                allowed = known_options(head, value)[0] if value in CHOICES.get(head, {}) else ()
                fields = defaults[head] if isinstance(defaults[head], dict) else {}
                found[head] = {key: given for key, given in fields.items() if key in allowed}
        found = override(found, path, value)
    if seeds is not None:
        values = parse_override(f"seeds=[{seeds}]")[1]
        if not isinstance(values, list):
            raise FedstrideError(f"seeds must be a number or a list such as 0,5,7, not {seeds!r}")
        found["seeds"] = values[0] if len(values) == 1 else values
    return found


def _is_file(item: str) -> bool:
    try:
        return item.endswith(".toml") or Path(item).is_file()
    except OSError:  # a setting longer than a file name may be
        return False


def method(text: str) -> dict[str, Any]:
    """`fedprox:mu=0.1:...` as a name and options."""
    name, *options = text.strip().split(":")
    return {"name": name, **dict(parse_override(option) for option in options)}
