"""The figures of the page as files, by matplotlib."""

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from fedstride.report.findings import Findings
from fedstride.statistics import lower_is_better

COLOURS = ["#0072b2", "#d55e00", "#008f68", "#b8559a", "#a67c00", "#3aa0d8", "#6a3d9a", "#4a4f57"]
DASHES: list[Any] = ["-", (0, (5, 2)), (0, (2, 2)), (0, (6, 2, 1, 2))]
GREY, SOFT = "#5d6670", "#e3e6ea"
UNITS = {
    "rounds": "round", "seconds": "{} seconds", "megabytes": "megabytes up and down", "steps": "client steps",
}  # fmt: skip
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedstride",  # the same figure, the same bytes
    "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "legend.frameon": False,
}  # fmt: skip


def draw(data: dict[str, Any], findings: Findings) -> dict[str, tuple[bytes, bytes]]:
    """Name -> PNG and SVG of every figure there are data for; nothing without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    made = {}
    context: Any = matplotlib.rc_context
    with context(STYLE):
        for name, size, paint in _plans(data, findings):
            figure = Figure(figsize=size, layout="constrained")
            paint(figure)
            files = []
            for kind in ("png", "svg"):
                out = io.BytesIO()
                figure.savefig(out, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
                files.append(out.getvalue())
                figure.set_layout_engine("none")  # what was laid out for the first stays for the second
            made[name] = (files[0], files[1])
    return made


Plan = tuple[str, tuple[float, float], Callable[[Any], None]]


def _plans(data: dict[str, Any], findings: Findings) -> Iterator[Plan]:
    metric = findings.metric
    for unit, lines in data["curves"].get(metric, {}).items():
        yield f"{metric}-{unit}", (7, 4.2), partial(_curves, data=data, findings=findings, unit=unit, lines=lines)
    if data["timelines"]:
        label = max(data["timelines"], key=lambda name: data["timelines"][name]["delayed"])
        line = data["timelines"][label]
        yield (
            "timeline",
            (9, 1.4 + 0.16 * len(line["utilisation"])),
            lambda f: _timeline(f, label, line, findings.clock),
        )
    if data["steps"]:
        name = max(data["steps"], key=lambda name: data["steps"][name]["change"])
        map = data["steps"][name]
        yield "steps", (7, 1.4 + 0.16 * len(map["cells"])), lambda f: _steps(f, name, map)
    if data["staleness"]:
        yield "staleness", (3.6 * len(data["staleness"]), 2.8), lambda f: _staleness(f, data)
    if data["partition"]:
        width, height = len(data["partition"]["counts"]), len(data["partition"]["classes"])
        yield "partition", (1.4 + 0.27 * width, 1 + 0.27 * height), lambda f: _partition(f, data["partition"])
    if data["fairness"]:
        yield "fairness", (7, 1 + 0.34 * len(data["fairness"])), lambda f: _fairness(f, data)


def _look(data: dict[str, Any], label: str) -> dict[str, Any]:
    """The same colours and dashes as in the page."""
    if label in data["references"]:
        return {"color": GREY, "linestyle": ":"}
    index = [name for name in data["labels"] if name not in data["references"]].index(label)
    return {"color": COLOURS[index % 8], "linestyle": DASHES[index // 8 % 4]}


def _curves(figure: Any, data: dict[str, Any], findings: Findings, unit: str, lines: dict[str, Any]) -> None:
    import numpy as np

    axes, factor = figure.subplots(), 100 if findings.metric == "accuracy" else 1
    for label in findings.ranking:
        if label not in lines:
            continue
        line, look = lines[label], _look(data, label)
        x, mean = np.array(line["x"]), factor * np.array(line["mean"], dtype=float)
        axes.plot(x, mean, label=label, linewidth=1.5, **look)
        if "half" in line:
            half = factor * np.array(line["half"], dtype=float)
            axes.fill_between(x, mean - half, mean + half, color=look["color"], alpha=0.1, linewidth=0)
    axes.set(
        xlabel=UNITS[unit].format(findings.clock),
        ylabel=findings.metric.replace("_", " ") + (", %" if factor == 100 else ""),
    )
    seen = factor * np.array([value for line in lines.values() for value in line["mean"] if value is not None])
    low, high = np.quantile(seen, [0, 0.94] if lower_is_better(findings.metric) else [0.06, 1])  # as in the page
    room = 0.05 * (high - low) or 0.05
    axes.set_ylim(low - room, min(100, high + room) if factor == 100 else high + room)
    axes.grid(axis="y", color=SOFT, linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _timeline(figure: Any, label: str, line: dict[str, Any], clock: str) -> None:
    import matplotlib

    axes, beside = figure.subplots(1, 2, sharey=True, width_ratios=[6, 1])
    blues = matplotlib.colormaps["Blues"]
    jobs = [(*job, job[4] - 1 - job[3] if job[4] else 0) for job in line["jobs"]]
    oldest = max([1, *(job[-1] for job in jobs)])
    for fate in sorted({job[6] for job in jobs}):
        bars = [job for job in jobs if job[6] == fate]
        if fate == "used":
            style: dict[str, Any] = {
                "color": [blues(0.35 + 0.65 * job[-1] / oldest if line["delayed"] else 0.7) for job in bars]
            }
        else:
            edge = "#9aa3ad" if fate in ("overwritten", "in flight") else "#c2410c"
            style = {"facecolor": "none", "edgecolor": edge, "hatch": "/////", "linewidth": 0.5}
        axes.barh(
            [job[0] for job in bars],
            [min(job[2], line["until"]) - job[1] for job in bars],
            left=[job[1] for job in bars],
            height=[0.75 if job[7] == "train" else 0.3 for job in bars],
            **style,
        )
    axes.vlines(line["updates"], 0, 1, transform=axes.get_xaxis_transform(), color="black", linewidth=0.4, alpha=0.4)
    axes.set(xlabel=f"{clock} seconds", ylabel="client", xlim=(0, line["until"]))
    axes.set_title(f"{label}, seed {line['seed']}: the first {len(line['jobs'])} of {line['total']} jobs"
                   + (", darker: older versions" if line["delayed"] else ""), fontsize=9, loc="left")  # fmt: skip
    axes.set_facecolor("#f4f5f7")
    axes.locator_params(axis="y", integer=True)
    axes.invert_yaxis()
    beside.barh(range(len(line["utilisation"])), [100 * share for share in line["utilisation"]], color=GREY, height=0.6)
    beside.set(xlabel="busy, %", xlim=(0, 100))


def _steps(figure: Any, label: str, map: dict[str, Any]) -> None:
    import numpy as np

    axes = figure.subplots()
    cells, columns = np.array(map["cells"], dtype=float), len(map["cells"][0])
    extent = (0.5, 0.5 + columns * map["width"], len(cells) - 0.5, -0.5)
    image = axes.imshow(cells, aspect="auto", cmap="Blues", extent=extent, interpolation="nearest")
    axes.locator_params(axis="y", integer=True)
    axes.set(xlabel="round", ylabel="client")
    axes.set_title(f"{label}, seed {map['seed']}", fontsize=9, loc="left")
    figure.colorbar(image, label="local steps")


def _staleness(figure: Any, data: dict[str, Any]) -> None:
    panels = figure.subplots(1, len(data["staleness"]), squeeze=False)[0]
    for axes, (label, counts) in zip(panels, data["staleness"].items()):
        shares = [100 * count / sum(counts) for count in counts]
        axes.bar(range(len(counts)), shares, color=_look(data, label)["color"])
        axes.set(xlabel="versions old", ylabel="% of updates")
        axes.set_title(label, fontsize=9, loc="left")


def _partition(figure: Any, partition: dict[str, Any]) -> None:
    axes, counts = figure.subplots(), partition["counts"]
    most = max(1, *(count for row in counts for count in row))
    spots = [
        (client, k, 180 * count / most) for client, row in enumerate(counts) for k, count in enumerate(row) if count
    ]
    axes.scatter(*zip(*spots), color=COLOURS[0], alpha=0.85, linewidth=0)
    axes.set_yticks(range(len(partition["classes"])), partition["classes"])
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="client", ylabel="class")
    axes.set_title(f"seed {partition['seed']}; the largest disc is {most} examples", fontsize=9, loc="left")
    axes.grid(axis="y", color=SOFT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.invert_yaxis()


def _fairness(figure: Any, data: dict[str, Any]) -> None:
    axes = figure.subplots()
    labels = [label for label in reversed(data["ranking"]) if label in data["fairness"]]
    for place, label in enumerate(labels):
        spread, colour = data["fairness"][label], _look(data, label)["color"]
        low, median, high = (100 * share for share in spread["quartiles"])
        axes.barh(place, high - low, left=low, height=0.6, color=colour, alpha=0.2, linewidth=0)
        spots = [place - 0.25 + 0.5 * (index * 0.618034 % 1) for index in range(len(spread["points"]))]
        axes.scatter([100 * share for share in spread["points"]], spots, s=6, color=colour, alpha=0.6, linewidth=0)
        axes.plot([median, median], [place - 0.36, place + 0.36], color=colour, linewidth=2)
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="accuracy of a client, %")
