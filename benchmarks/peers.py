"""Ours beside pfl-research, Flower's simulation and a plain PyTorch loop, on identical work.

usage: peers.py [--pfl PYTHON] [--models logistic,mlp,cnn,cifar] [--cohorts 10,30,100] [--turns 3]
                [--device cpu] [--backends auto] [--pictures FOLDER]

Data, first weights, cohorts, steps and batches are the same for all (work.py); before a time is believed, the final
weights of all rounds are compared with the plain loop's, in a run of their own in float64 and small steps. With the
steps that are timed, float32 takes two orders of summing percents apart on the CNN, and the plain loop as far from its
own result in float64. pfl rounds to float32 in any case, which the tolerance allows for.

The plain loop and every process of a peer have one thread, Flower's many processes wait passively, and ours has the
defaults that a user would have. Contenders take turns, because machines drift; figures are
medians over the second half of the rounds of all turns, since ours traces shapes that keep coming, which takes a while.
PYTHON is the interpreter of an environment with torch and `pfl[pytorch]==0.6.0`. With `--device cuda` it is ours
(backends vmap,graph,compiled) and the plain loop.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pictures
import roofline
import torch
import work

HERE = Path(__file__).parent
STEPS = {"logistic": 20, "mlp": 10, "cnn": 5, "cifar": 5}
ROUNDS = {"logistic": 50, "mlp": 8, "cnn": 6, "cifar": 6}
TOLERANCE = 1e-3  # the largest difference between final weights, as a share of the largest distance any of them moved


class Case(NamedTuple):
    """One line of the tables."""

    model: str
    cohort: int

    @property
    def users(self) -> int:
        """The fleet: pfl's own setting for CIFAR-10, otherwise a hundred."""
        return 1000 if self.model == "cifar" else max(100, self.cohort)


class Turn(NamedTuple):
    """What one process did."""

    first: float  # seconds from the start of the process to the end of the first round
    rounds: list[float]  # seconds a round
    peak: int  # bytes resident in the process and its descendants
    x: np.ndarray


def resident(root: int) -> int:
    """Bytes resident in a process and its descendants; a page that several share counts in each."""
    parents, pages = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                pages[int(entry.name)] = int((entry / "statm").read_text().split()[1])
            except (OSError, IndexError):  # it has ended meanwhile
                continue
    family, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family, grown = family | more, bool(more)
    return sum(pages.get(pid, 0) for pid in family) * os.sysconf("SC_PAGE_SIZE")


def play(command: list[str], folder: str, tries: int = 2) -> Turn:
    """One process from start to end; once more if it dies, as two processes of pfl do now and then."""
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    peak, start = 0, time.time()
    with open(Path(folder, "log"), "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                peak = max(peak, resident(process.pid))
                time.sleep(0.2)
        finally:
            process.terminate()  # after Ctrl-C; otherwise it has ended
    if process.returncode and tries > 1:
        print(f"{' '.join(command)} failed; once more", file=sys.stderr)
        return play(command, folder, tries - 1)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{Path(folder, 'log').read_text()[-2000:]}")
    times = json.loads(Path(folder, "times.json").read_text())
    return Turn(times[1] - start, np.diff(times).tolist(), peak, np.load(Path(folder, "final.npy")))


def contenders(folder: str, options: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each."""
    python, device = sys.executable, options.device
    ours = {
        f"ours, {backend}": [python, str(HERE / "ours.py"), folder, device, backend, "replacement"]
        for backend in options.backends.split(",")
    }
    single = ["env", "OMP_NUM_THREADS=1"]  # with two threads, small operations wait for each other
    passive = ["env", "OMP_WAIT_POLICY=PASSIVE"]  # processes whose threads wait actively hold each other up
    peers = {"plain loop": [*single, python, str(HERE / "plain.py"), folder, device]}
    if device == "cpu":
        if options.pfl:
            program = [str(HERE / "pfl_research.py"), folder]
            peers["pfl"] = [*single, options.pfl, *program]
            peers["pfl, two processes"] = [
                *single, options.pfl, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *program
            ]  # fmt: skip
        peers["Flower"] = [*passive, python, str(HERE / "flower.py"), folder]
    return ours | peers


class Figures(NamedTuple):
    """What is told of a contender in a case."""

    rate: float  # client-steps a second
    round: float  # median seconds
    startup: float  # seconds to the end of the first round, less a median round: whatever is not done again
    peak: int
    difference: float  # of the final weights from the plain loop's


def measure(case: Case, options: argparse.Namespace) -> dict[str, Figures]:
    """All contenders on one case."""
    steps = STEPS[case.model]
    with tempfile.TemporaryDirectory() as folder:
        work.write(Path(folder), case.model, case.users, case.cohort, steps, ROUNDS[case.model])
        commands = contenders(folder, options)
        turns: dict[str, list[Turn]] = {name: [] for name in commands}
        for turn in range(options.turns):
            for name, command in commands.items():
                print(f"{case.model} {case.cohort} turn {turn + 1}: {name}", file=sys.stderr, flush=True)
                turns[name].append(play(command, folder))
        work.make_comparable(Path(folder))
        final = {  # ours with the peers' batches, for the weights alone
            name: play([*command[:-1], "replay"] if name.startswith("ours") else command, folder).x
            for name, command in commands.items()
        }
        reference, moved = final["plain loop"], np.abs(final["plain loop"] - np.load(Path(folder, "x.npy"))).max()
    figures = {}
    for name, done in turns.items():
        middle = statistics.median(seconds for turn in done for seconds in turn.rounds[len(turn.rounds) // 2 :])
        figures[name] = Figures(
            case.cohort * steps / middle, middle, statistics.median(turn.first for turn in done) - middle,
            max(turn.peak for turn in done), float(np.abs(final[name] - reference).max() / moved),
        )  # fmt: skip
    print(f"{case}: { ({name: round(one.rate) for name, one in figures.items()}) }", file=sys.stderr, flush=True)
    return figures


def table(title: str, results: dict[Case, dict[str, Figures]], cell) -> None:
    names = list(next(iter(results.values())))
    print(f"\n{title}:\n\n| model | cohort | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for case, figures in results.items():
        first = figures[names[0]]
        print(f"| {case.model} | {case.cohort} | {' | '.join(cell(figures[name], first) for name in names)} |")


def speed(figures: Figures, ours: Figures) -> str:
    """Client-steps a second, and how many times as fast ours is; in words where the weights are not the same."""
    if not figures.difference <= TOLERANCE:
        return f"weights differ by {figures.difference:.0e}"
    return f"{figures.rate:,.0f}" + (f" ({ours.rate / figures.rate:.1f}x)" if figures is not ours else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pfl", metavar="PYTHON")
    parser.add_argument("--models", default="logistic,mlp,cnn,cifar")
    parser.add_argument("--cohorts", default="10,30,100")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backends")
    parser.add_argument("--pictures", metavar="FOLDER", type=Path)
    options = parser.parse_args()
    options.backends = options.backends or {"cpu": "auto", "cuda": "vmap,graph,compiled"}[options.device]
    cohorts = {model: [int(size) for size in options.cohorts.split(",")] for model in options.models.split(",")}
    cases = [Case(model, n) for model, sizes in cohorts.items() for n in ([50] if model == "cifar" else sizes)]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} at the start")
    results = {case: measure(case, options) for case in cases}
    table("Client-steps per second (how many times as fast the first column is)", results, speed)
    table("Median seconds a round", results, lambda figures, ours: f"{figures.round:.3f}")
    table(
        "Start-up in seconds, process start to the end of the first round, less a median round",
        results,
        lambda figures, ours: f"{figures.startup:.1f}",
    )
    table("Peak memory in MiB, all processes", results, lambda figures, ours: f"{figures.peak / 2**20:,.0f}")
    table("Difference of final weights", results, lambda figures, ours: f"{figures.difference:.0e}")
    rates = {
        (case.model, case.cohort): {name: figures.rate for name, figures in contenders.items()}
        for case, contenders in results.items()
    }
    best = {case: max(rate for name, rate in each.items() if name.startswith("ours")) for case, each in rates.items()}
    roofline.report(options.device, best)
    if options.pictures:
        pictures.draw(options.pictures, rates)


if __name__ == "__main__":
    main()
