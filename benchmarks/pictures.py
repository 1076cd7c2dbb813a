"""The pictures of docs/performance.md; run by itself, that of its table of one GPU."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt


def draw(folder: Path, rates: dict[tuple[str, int], dict[str, float]]) -> None:
    """Bars: client-steps a second of every contender in every case; lines: the same against the cohort's size."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(next(iter(rates.values())))
    figure, axis = plt.subplots(figsize=(10, 4), layout="constrained")
    for i, name in enumerate(names):
        places = np.arange(len(rates)) + 0.8 * (i / len(names) - 0.5)
        axis.bar(places, [case[name] for case in rates.values()], 0.8 / len(names), label=name, align="edge")
    axis.set_xticks(range(len(rates)), [f"{model}\ncohort {cohort}" for model, cohort in rates], fontsize=8)
    axis.set(yscale="log", ylabel="client-steps per second")
    axis.legend(ncols=len(names), fontsize=8)
    figure.savefig(folder / "peers.png", dpi=110)
    models = [
        model for model in dict.fromkeys(model for model, _ in rates) if sum(key[0] == model for key in rates) > 1
    ]
    if not models:
        return
    figure, axes = plt.subplots(1, len(models), figsize=(3.4 * len(models), 3.2), layout="constrained", squeeze=False)
    for axis, model in zip(axes[0], models):
        sizes = [cohort for key, cohort in rates if key == model]
        for name in names:
            axis.plot(sizes, [rates[model, cohort][name] for cohort in sizes], marker="o", label=name)
        axis.set(xscale="log", yscale="log", title=model, xlabel="clients in a cohort")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
    axes[0, 0].set_ylabel("client-steps per second")
    axes[0, -1].legend(fontsize=7)
    figure.savefig(folder / "cohorts.png", dpi=110)


def fleets(path: Path, clients: np.ndarray, milliseconds: np.ndarray, megabytes: np.ndarray) -> None:
    """A round and the process's memory against the size of the fleet."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axis, values, label in zip(axes, (milliseconds, megabytes), ("a round, ms", "memory of the process, MiB")):
        axis.plot(clients, values, marker="o")
        axis.set(xscale="log", xlabel="clients in the fleet, 50 in a round", ylabel=label, ylim=(0, 1.3 * values.max()))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def gpu(page: Path) -> None:
    """Bars from the table of one GPU on the page: ours and the others, where they ran."""
    table = next(part for part in page.read_text().split("\n\n") if "hand-fused JAX" in part and part.startswith("|"))
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    cases = [dict(zip(header, row)) for row in rows]
    for before, case in zip(cases, cases[1:]):
        case["model"] = case["model"] or before["model"]
    names = [name for name in header if name.startswith(("ours", "hand", "pfl"))]
    figure, axis = plt.subplots(figsize=(10, 4), layout="constrained")
    for i, name in enumerate(names):
        ran = {place: int(case[name].replace(",", "")) for place, case in enumerate(cases) if case[name]}
        bars = axis.bar([place + 0.2 * (i - 1.5) for place in ran], list(ran.values()), 0.2, label=name)
        axis.bar_label(bars, fontsize=6, fmt="{:,.0f}", rotation=90, padding=2)
    labels = [f"{case['model']}\n{case['clients']} clients\nbatch {case['batch']}" for case in cases]
    axis.set_xticks(range(len(labels)), labels, fontsize=8)
    axis.set(yscale="log", ylabel="client-steps per second", ylim=(300, 2e7))
    axis.legend(ncols=len(names), fontsize=8)
    figure.savefig(page.parent / "performance" / "gpu.png", dpi=110)


if __name__ == "__main__":
    gpu(Path(__file__).parent.parent / "docs" / "performance.md")
