"""Load on a deployment over loopback: many nodes with a small model, or few nodes with a large one.

python benchmarks/deploy.py nodes     # 50 nodes, 8 of them in a round, 20 rounds
python benchmarks/deploy.py model     # 3 nodes, a model of 80 MiB, 4 rounds

Prints seconds a round, and the largest memory of the server process, of Flower's link, and of everything together
(proportional set size: what processes share counts once).
"""

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from fedstride.deploy.stack import Stack
from fedstride.experiment import Experiment

SCENES = {
    "nodes": (50, dict(rounds=20, participation={"name": "uniform", "n": 8}, model={"name": "mlp", "hidden": 8})),
    "model": (3, dict(rounds=4, model={"name": "mlp", "hidden": 1050}, lr=1e-9)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", choices=SCENES)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rounds", type=int)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the stack is stopped
    clients, fields = SCENES[given.scene]
    clients = given.clients or clients
    fields |= {"rounds": given.rounds} if given.rounds else {}
    if given.scene == "nodes":
        fields["partition"] = {"name": "iid", "clients": clients}
    else:  # many parameters, and few numbers between the layers
        fields["data"] = {"name": "least-squares", "clients": clients, "rows": 50, "features": 20_000}
    experiment = Experiment(method={"name": "fedavg"}, steps=2, batch_size=5, device="cpu", **fields)
    with tempfile.TemporaryDirectory() as folder:
        rows = play(experiment, clients, Path(folder))
    seconds = [b["seconds"] - a["seconds"] for a, b in zip([{"seconds": 0.0}, *rows], rows)]
    mean = sum(seconds) / len(rows)
    print(f"{len(rows)} rounds, {min(seconds):.1f} to {max(seconds):.1f} s each, {mean:.1f} s on average")
    print(f"clients in a round: {sorted({row['clients'] for row in rows})}")


def play(experiment: Experiment, clients: int, folder: Path) -> list[dict]:
    rows: list[dict] = []
    start = time.monotonic()

    def watch(line: str) -> None:
        if line.startswith('{"round"'):
            rows.append(json.loads(line))
            print(
                f"{time.monotonic() - start:7.1f} s: round {rows[-1]['round']}, {rows[-1]['clients']} clients",
                flush=True,
            )

    with Stack(folder / "stack", clients) as stack, Peak(stack):
        for number in range(clients):
            stack.start(number)
        classes = len(experiment.prepare(real=True).classes)
        stack.run(experiment.settled(classes), "load", folder / "run", timeout=900.0, watch=watch)
    return rows


class Peak:
    """Looks every two seconds at the memory of all processes of a stack, and says at the end what was most."""

    def __init__(self, stack: Stack):
        self._stack, self._over = stack, threading.Event()
        self._most: dict[str, int] = {"server": 0, "link": 0, "everything": 0, "processes": 0}
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for name, most in self._most.items():
            print(f"{name}: {most}" if name == "processes" else f"{name}: {most / 1024:.0f} MiB at most")

    def _watch(self) -> None:
        while not self._over.wait(2.0):
            groups = {process.pid for process in self._stack.processes.values()}
            found = {"server": 0, "link": 0, "everything": 0, "processes": 0}
            for path in Path("/proc").glob("[0-9]*"):
                try:
                    words = (path / "cmdline").read_bytes().decode(errors="replace")
                    if int((path / "stat").read_text().rpartition(")")[2].split()[3]) not in groups or not words:
                        continue
                    status = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
                    pss = next(
                        row for row in (path / "smaps_rollup").read_text().splitlines() if row.startswith("Pss:")
                    )
                except (OSError, StopIteration, ValueError):
                    continue  # it has just ended
                found["everything"] += int(pss.split()[1])
                found["processes"] += 1
                for name, program in (("server", "flwr-serverapp"), ("link", "flower-superlink")):
                    if program in words:
                        found[name] = int(status["VmHWM"].split()[0])
            self._most = {name: max(most, found[name]) for name, most in self._most.items()}


if __name__ == "__main__":
    main()
