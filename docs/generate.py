"""Write the pages that are made of docstrings (docs/methods.md, one page a method) and of results
(docs/reproduction.md and its pictures). `--check` only compares."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import torch

from fedstride.algorithm import REGISTRY, Algorithm
from fedstride.inputs import unfit
from fedstride.reproduce import page as reproduction
from fedstride.reproduce import pictures
from fedstride.schedule import Buffered

HERE = Path(__file__).parent


def paragraphs(cls: type[Algorithm]) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(cls.__doc__ or "").split("\n\n")]


def options(cls: type[Algorithm]) -> list[str]:
    """One row a field, with the comment that stands beside it in the source."""
    source = inspect.getsource(cls)
    rows = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        comment = re.search(rf"^    {field.name}: [^#\n]*#\s*(.*)$", source, re.MULTILINE)
        rows.append(f"| `{field.name}` | `{field.default!r}` | {comment.group(1) if comment else ''} |")
    return rows


def fits(method: Algorithm) -> bool:
    """Whether it runs on Buffered."""
    return not unfit(method, Buffered(), bool(method.init_client(torch.zeros(3))))


def needs(method: Algorithm) -> list[str]:
    """What the class declares."""
    down, up = method.traffic
    exchanges = len(method.exchanges)
    facts = [
        f"Model-size vectors a round and participant: {down} down, {up} up; exchanges a round: {exchanges}.",
        f"Own weights: {'by data size' if method.weights == 'data' else 'uniform'}.",
        "Participation: everyone in every round." if method.full_only else "Participation: any.",
        f"Exact gradients and a fixed step lead to the optimum: {'yes' if method.exact else 'no'}"
        + (f"; with part of the fleet: {'yes' if method.exact_partial else 'no'}." if method.exact else "."),
        f"Own schedule: `{method.schedule!r}`; on `Buffered`: {'yes' if fits(method) else 'no'}.",
        f"Local options it allows: {', '.join(sorted(method.local_options)) or 'none'}.",
    ]
    if method.prologue:
        facts.append("Before the first round it asks the whole fleet once (row 0).")
    if method.assigns:
        facts.append("It decides the clients' steps itself; the run's `steps` is ignored.")
    if method.local_steps is not None:
        facts.append(f"Every job has {method.local_steps} step(s); the run's `steps` is ignored.")
    if method.needs_rows:
        facts.append("The server keeps every reply of a round until it is over, not only their sum.")
    if method.pooled:
        facts = ["Not federated: one client holds all data, nothing travels, it cannot be deployed."]
    return [f"* {fact}" for fact in facts]


def page(cls: type[Algorithm]) -> str:
    method = cls()
    title, *rest = paragraphs(cls)
    body = []
    for part in rest:
        head, _, text = part.partition(": ")
        body.append(f"**{head}.** {text[:1].upper() + text[1:]}" if text and head.replace(" ", "").isalpha() else part)
    module = cls.__module__.replace(".", "/")
    lines = [
        f"# {cls.__name__}",
        "",
        title,
        "",
        *("\n\n".join(body).splitlines()),
        "",
        "## What it needs",
        "",
        *needs(method),
    ]
    rows = options(cls)
    if rows:
        lines += ["", "## Options", "", "| option | default | |", "|---|---|---|", *rows]
    lines += ["", f'`fs.algorithms.{cls.__name__}(...)` or `"{cls.name}"`; source: `{module}.py`.']
    return "\n".join(lines) + "\n"


def index() -> str:
    lines = [
        "# Methods",
        "",
        "Exact: with exact gradients and a fixed step the method ends at the optimum of the weighted objective,",
        "whatever the clients' numbers of steps; a test checks it to 1e-10. Vectors: model-size vectors a participant",
        "receives and sends a round; methods on `FirstArrivals` and `SendBuffers` send every model to the whole fleet.",
        "Schedule: the method's own; synchronous methods marked * also run on `Buffered`, with stale replies.",
        "",
        "| name | what it does | exact | part of the fleet | vectors down / up | schedule |",
        "|---|---|---|---|---|---|",
    ]
    for name, cls in sorted(REGISTRY.items()):
        method = cls()
        partial = "-" if method.full_only or method.pooled else ("exact" if method.exact_partial else "yes")
        down, up = method.traffic
        cells = (f"[`{name}`](methods/{name}.md)", paragraphs(cls)[0], "yes" if method.exact else "no", partial)
        schedule = type(method.schedule).__name__ + (" *" if fits(method) and not method.schedule.asynchronous else "")
        lines.append(f"| {' | '.join(cells)} | {down} / {up} | {'-' if method.pooled else schedule} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    return {
        HERE / "methods.md": index(),
        HERE / "reproduction.md": reproduction.text(),
        **{HERE / "methods" / f"{name}.md": page(cls) for name, cls in REGISTRY.items()},
    }


def main() -> None:
    written = pages()
    stale = [path for path, text in written.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit(f"out of date, run make docs: {', '.join(str(path) for path in stale)}" if stale else 0)
    (HERE / "methods").mkdir(exist_ok=True)
    for path in stale:
        path.write_text(written[path])
    pictures.figures(HERE / "reproduction")


if __name__ == "__main__":
    main()
