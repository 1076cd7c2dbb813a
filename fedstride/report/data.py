"""The numbers behind the figures: small, rounded, plain data, for the page and for the static figures alike."""

import math
from collections import Counter
from typing import Any

import numpy as np

from fedstride.errors import FedstrideError
from fedstride.report.findings import Findings, grouped
from fedstride.report.sentences import scale, words
from fedstride.runs import Record
from fedstride.statistics import UNITS, Run, curve, lower_is_better, summarise
from fedstride.timeline import Timeline

POINTS = 400  # of a curve
JOBS = 400  # of a timeline
CLIENTS = 60  # rows of a figure
BINS = 120  # columns of the map of steps


def collect(records: list[Record], findings: Findings) -> dict[str, Any]:
    """Everything the figures need; a part without data is empty."""
    groups = grouped(records)
    labels = sorted(groups)  # a method keeps its colour when the ranking changes
    recorded = {label: next((r for r in groups[label] if r.jobs), None) for label in labels}
    shown = {label: record for label, record in recorded.items() if record}
    curves = {metric: {unit: _curves(groups, metric, unit) for unit in UNITS} for metric in findings.metrics}
    return {
        "labels": labels,
        "clock": findings.clock,
        "ranking": findings.ranking,
        "references": findings.references,
        "metrics": [
            {"name": name, "words": words(name), "scale": scale(name), "lower": lower_is_better(name)}
            for name in findings.metrics
        ],
        "curves": {m: {u: lines for u, lines in by.items() if lines} for m, by in curves.items() if any(by.values())},
        "steps": {label: steps for label, record in shown.items() if (steps := _steps(record))},
        "timelines": {label: line for label, record in shown.items() if (line := _timeline(record))},
        "staleness": {label: ages for label in labels if (ages := _staleness(groups[label]))},
        "partition": next((picture for record in records if (picture := _partition(record))), None),
        "fairness": {label: spread for label in labels if (spread := _fairness(groups[label]))},
    }


def rounded(values: Any, digits: int = 4) -> list[float | int | None]:
    """So many significant digits; None for what JSON cannot say."""
    return [
        None if value is None or not math.isfinite(value) else _short(float(f"{value:.{digits}g}")) for value in values
    ]


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _curves(groups: dict[str, list[Record]], metric: str, unit: str) -> dict[str, Any]:
    """Label -> places, means, half-widths; of the runs that ended, or, where none has, of those under way."""
    lines = {}
    for label, group in groups.items():
        runs = [r.run for r in group if r.ended] or [r.run for r in group if r.rows]
        try:
            found = curve(runs, metric, unit)
        except FedstrideError:  # never measured, no time passed, or all diverged; the table says which
            continue
        if len(found.at) < 2 or found.at[-1] == found.at[0]:
            continue
        keep = np.unique(np.linspace(0, len(found.at) - 1, min(POINTS, len(found.at))).round().astype(int))
        parts = {"x": rounded(found.at[keep], 5), "mean": rounded(found.mean[keep])}
        if found.n > 1:
            parts["half"] = rounded(found.half[keep], 3)
        lines[label] = parts | {"n": found.n}
    return lines


def _steps(record: Record) -> dict[str, Any] | None:
    """Clients x rounds: local steps of the updates that went into a round, averaged where rounds share a column."""
    jobs = [job for job in record.jobs if job["exchange"] == "train" and job["fate"] == "used" and job["update"]]
    if not jobs:
        return None
    rounds, clients = max(job["update"] for job in jobs), max(job["client"] for job in jobs) + 1
    width = -(-rounds // BINS)
    total, count = np.zeros((2, clients, -(-rounds // width)))
    for job in jobs:
        total[job["client"], (job["update"] - 1) // width] += job["steps"]
        count[job["client"], (job["update"] - 1) // width] += 1
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    spread = float(np.mean([np.ptp(row[~np.isnan(row)]) for row in mean if (~np.isnan(row)).any()]))
    cells = [rounded(row, 3) for row in mean[:CLIENTS]]
    return {"seed": record.seed, "clients": clients, "rounds": rounds, "width": width, "cells": cells, "change": spread}


def _timeline(record: Record) -> dict[str, Any] | None:
    """The first jobs as [client, start, end, version, update, steps, fate, exchange], and what came of every client."""
    whole = Timeline()
    whole.load([*record.jobs, *record.updates])
    if not whole.seconds:
        return None  # no time passed
    clients = max(job["client"] for job in record.jobs) + 1
    jobs = sorted((job for job in record.jobs if job["client"] < CLIENTS), key=lambda job: job["start"])
    until = jobs[JOBS]["start"] if len(jobs) > JOBS else whole.seconds
    rows = [
        [job["client"], *rounded([job["start"], job["end"]], 6), job["version"], job["update"], job["steps"],
         job["fate"], job["exchange"]]
        for job in jobs[:JOBS]
    ]  # fmt: skip
    ticks = rounded([row["seconds"] for row in record.updates if 0 < row["seconds"] <= until], 6)
    return {
        "seed": record.seed, "clients": clients, "jobs": rows, "total": len(record.jobs), "updates": ticks,
        "until": rounded([until], 6)[0], "seconds": rounded([whole.seconds], 6)[0],
        "utilisation": rounded(whole.utilisation(clients)[:CLIENTS], 3), "delayed": bool(whole.max_delay),
    }  # fmt: skip


def _staleness(group: list[Record]) -> list[int] | None:
    """How many used updates were 0, 1, 2, ... versions old, over all seeds; only for methods where some were."""
    ages: Counter[int] = Counter()
    for record in group:
        whole = Timeline()
        whole.load([*record.jobs, *record.updates])
        ages.update(whole.staleness())
    oldest = max(ages.keys(), default=0)
    return [ages[age] for age in range(oldest + 1)] if oldest else None


def _partition(record: Record) -> dict[str, Any] | None:
    counts = record.clients.get("counts")
    if not counts:
        return None
    classes = record.clients.get("classes") or range(len(counts[0]))
    names = [str(name) for name in classes]
    return {"seed": record.seed, "classes": names, "clients": len(counts), "counts": counts[:CLIENTS]}


def _fairness(group: list[Record]) -> dict[str, Any] | None:
    """Every client's accuracy in every run that ended, and the mean over seeds of the worst tenth."""
    points, runs = [], []
    for record in group:
        values = [value for value in record.clients.get("accuracy") or [] if value is not None and math.isfinite(value)]
        if values and record.ended and record.status != "diverged":
            points += values
            worst = float(np.mean(np.sort(values)[: max(1, len(values) // 10)]))
            runs.append(Run(record.seed, [{"round": 1, "worst": worst}]))
    if not runs:
        return None
    quartiles = rounded(np.percentile(points, [25, 50, 75]))
    worst_text = summarise(runs, "worst").text(100).replace("+-", "\N{PLUS-MINUS SIGN}")
    return {"points": rounded(points, 3), "quartiles": quartiles, "worst": worst_text}
