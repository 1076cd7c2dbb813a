"""docs/reproduction.md, made from the stored results alone."""

import re
from collections.abc import Iterator
from typing import Any

from fedstride.reproduce import costs, items, store
from fedstride.reproduce.command import duration, entry
from fedstride.reproduce.judge import Verdict, judge
from fedstride.reproduce.play import BESIDE
from fedstride.reproduce.store import Found

HEAD = """# Reproduction

Tables and figures of the five papers, run by this project on the papers' real data, the printed numbers beside ours.
This page is generated from `papers/results/`; `fedstride reproduce PAPER/ITEM` runs what is missing, and `make docs`
writes the page anew. In tables stands *ours / printed*: mean and 95 % interval over seeds, or where runs failed the
median and, in brackets, how many runs did not fail (or, where none succeeded, how many there are); for a way to a
target also the ratio to the printed number. Scale "full" is the paper's setting, "cpu" a reduction that is stated; the
first table counts every item at the largest scale that ran. An ordering is a pair of methods in one row that the paper
puts in an order, by its numbers or its words (where losses and accuracies are printed, one for each); *sure* means that
the interval of the difference over seeds leaves zero out, which a single seed cannot show; a run that did not arrive or
diverged counts there as if it had needed twice the longest of the others, or had half the least. Claims that compare
numbers compare medians, claims that a method reaches a target or does not ask it of every seed; claims about curves are
judged at the sixty or so rounds that are kept. Items and claims marked *(ours)* are not in the papers and stand outside
the first table. *Whole* means that every cell has a run at full scale; seeds that are missing are listed at the end. In
pictures a thin line is a seed, ending where its run ended (at the target, after the last round, or with a cross where
it diverged); the thick line is the mean as long as all seeds run, a dotted one the target.
"""


def text(pictures: str = "reproduction") -> str:
    """The whole page; pictures are looked for in a folder beside it."""
    body, rows, waiting = [], [], []
    for paper, module in items.papers().items():
        if getattr(module, "OURS", False) is True:
            continue
        sections = []
        total = Sum()
        for name in module.ITEMS:
            scales = dict.fromkeys(items.own_scale(paper, name, scale) for scale in ("full", "cpu"))
            found = {scale: Found(items.item(paper, name, scale), store.path(paper, name, scale)) for scale in scales}
            run = {scale: one for scale, one in found.items() if one.done}
            item = found["full"].item
            if not item.ours:
                total.add(run)
            if run:
                sections += _section(paper, name, run, pictures)
            share = found["full"].left(item.seeds)
            if share:
                gpu, cpu = (duration(share * costs.seconds(item, item.seeds, kind)) for kind in ("cuda", "cpu"))
                waiting.append(f"| {paper}/{name} | {found['full'].done} of {len(item.cells)} | {gpu} | {cpu} |")
        omitted = getattr(module, "OMITTED", ())
        rows.append(f"| {module.TITLE} | {total.run} / {total.printed + len(omitted)} | {total.text()} |")
        body += [f"# {module.TITLE}", "", *([f"Not here: {'; '.join(omitted)}.", ""] if omitted else []), *sections]
    summary = [
        "| paper | items run / printed | of these at full scale: whole, in part | orderings that agree / known (sure) "
        "| reversed | claims that hold / known |",
        "|---|---|---|---|---|---|", *rows,
    ]  # fmt: skip
    rest = [
        "# Missing at full scale", "",
        "Cells that have not run at all, or not with all seeds: estimated time of what is missing, on one H200 and on "
        "two cores; good to a factor of a few.", "",
        "| item | cells run at full scale | one GPU | two cores |", "|---|---|---|---|", *waiting,
    ]  # fmt: skip
    return "\n".join([HEAD, *summary, "", *body, *rest]) + "\n"


class Sum:
    """Counts over the items of a paper; of an item, the largest scale that ran counts."""

    def __init__(self) -> None:
        self.printed = self.run = self.whole = self.part = 0
        self.agree = self.known = self.sure = self.reversed = self.held = self.told = 0

    def add(self, found: dict[str, Found]) -> None:
        """One item, by scale, the largest first."""
        self.printed += 1
        if not found:
            return
        scale, largest = next(iter(found.items()))
        verdict = judge(largest)
        self.run += 1
        self.whole += scale == "full" and largest.complete
        self.part += scale == "full" and not largest.complete
        self.agree += verdict.count("agrees")
        self.known += len(verdict.orderings) - verdict.count("not run")
        self.sure += verdict.sure
        self.reversed += verdict.count("disagrees")
        self.held, self.told = self.held + verdict.held, self.told + verdict.told

    def text(self) -> str:
        """Four places of a table."""
        orderings = f"{self.agree} / {self.known} ({self.sure}) | {self.reversed}"
        return f"{self.whole}, {self.part} | {orderings} | {self.held} / {self.told}"


def _section(paper: str, name: str, run: dict[str, Found], pictures: str) -> list[str]:
    first = next(iter(run.values())).item
    lines = [f"## {first.title}", "", f"`{paper}/{name}`. Claim: {first.claim}", ""]
    for scale, found in run.items():
        if len(run) > 1 or scale == "cpu":
            lines += [f"Scale {scale}." + (f" {found.item.reduced}" if found.item.reduced else ""), ""]
        elif found.item.reduced:
            lines += [found.item.reduced, ""]
        lines += _tables(found)
        lines += _verdict(judge(found))
        lines += [f"![{first.title}, {scale}]({pictures}/{paper}-{name}-{scale}.png)", ""]
        lines += [_made(found), ""]
    lines += _findings().get(f"{paper}/{name}", [])
    return lines + ["What the paper leaves open:", "", *(f"* {choice}" for choice in first.choices), ""]


def _findings() -> dict[str, list[str]]:
    """What was written about the items after looking: papers/findings.md, a heading an item."""
    parts = re.split(r"^## (.+)$", (store.folder().parent / "findings.md").read_text(), flags=re.MULTILINE)
    return {name: [text.strip(), ""] for name, text in zip(parts[1::2], parts[2::2])}


def _tables(found: Found) -> Iterator[str]:
    item = found.item
    wide = len(item.columns) <= len(item.rows)
    across, down = (item.columns, item.rows) if wide else (item.rows, item.columns)
    for measure in item.measures:
        yield f"| {measure.name} | {' | '.join(across)} |"
        yield "|---" * (len(across) + 1) + "|"
        for one in down:
            places = [(one, other) if wide else (other, one) for other in across]
            yield f"| {one} | {' | '.join(entry(found, *place, measure) for place in places)} |"
        yield ""
    tuned = [(cell, found.winner(cell)) for cell in item.cells if cell.grid]
    if any(winner for _, winner in tuned):
        grids = {json_like(cell.grid) for cell, _ in tuned}
        yield f"Tuned on the first seed over {'; '.join(sorted(grids))}. Winners: " + "; ".join(
            f"{cell.row}, {cell.column}: {json_like(winner)}" for cell, winner in tuned if winner
        ) + "."  # fmt: skip
        yield ""


def json_like(values: Any) -> str:
    """`lr 0.1, method.mu 1` from a dict."""
    return ", ".join(
        f"{key} {value if not isinstance(value, (list, tuple)) else list(value)}" for key, value in values.items()
    )


def _verdict(verdict: Verdict) -> list[str]:
    lines = [f"**{verdict.text()}.**", ""]
    for claim, holds in verdict.claims:
        if holds is not None:
            lines.append(f"* {'Holds' if holds else 'Does not hold'}: {claim}.")
    return [*lines, ""] if lines[2:] else lines


def _made(found: Found) -> str:
    """Who made it."""
    runs = [run for cell in found.item.cells for run in found.best(cell)]
    machines, commits = ({run["made"][key] for run in runs} for key in ("machine", "commit"))
    seeds = sorted(len(found.best(cell)) for cell in found.item.cells if found.best(cell))
    several = f"{seeds[0]}" if seeds[0] == seeds[-1] else f"{seeds[0]} to {seeds[-1]}"
    wall = duration(sum(run["wall"] for run in found.runs))
    made = f"Commit {', '.join(sorted(commits))}; {', '.join(sorted(machines))}"
    beside = any(run["made"]["backend"] in ("compiled", BESIDE) for run in found.runs)
    counted = ", each counted from start to end though several shared a machine" if beside else ""
    return f"Seeds: {several}. {made}; {len(found.runs)} runs, {wall} of run time in all{counted}."
