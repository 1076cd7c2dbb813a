"""Who trained when, from which version, and what the server did: rows for a Gantt chart, and a trace to replay."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedstride.errors import FedstrideError
from fedstride.sampling import Jobs


class Timeline:
    """One row a job and one a server update.

    A job row has client, exchange, version, repeat, target and steps, times (how often it counted), start and end of
    the training, arrival at the server, its fate, and the update it went into. Fates: used, rejected (not finite, or
    by the guard), lost (the client dropped out), overwritten (in a send buffer, never computed), in flight (when the
    run ended).
    """

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.written = 0  # rows of both kinds that are on disk
        self._updates_written = 0

    def news(self) -> list[dict[str, Any]]:
        """The rows that are not on disk yet: jobs first, then updates, as they came since the last call."""
        jobs = self.jobs[self.written - self._updates_written :]
        updates = self.updates[self._updates_written :]
        self._updates_written += len(updates)
        self.written += len(jobs) + len(updates)
        return jobs + updates

    def load(self, rows: list[dict[str, Any]]) -> None:
        """Rows from disk."""
        self.jobs = [row for row in rows if "fate" in row]
        self.updates = [row for row in rows if "fate" not in row]
        self.written, self._updates_written = len(rows), len(self.updates)

    def add(self, update: int, exchange: str, jobs: Jobs, spans: np.ndarray, used: np.ndarray) -> None:
        """Replies that reached the server: their jobs, [C, 3] start, end and arrival, and whether they were used."""
        for row, (start, end, arrival) in enumerate(spans.tolist()):
            self.jobs.append(
                {
                    "client": int(jobs.clients[row]),
                    "exchange": exchange,
                    "version": int(jobs.versions[row]),
                    "repeat": int(jobs.repeats[row]),
                    "target": int(jobs.targets[row]),
                    "steps": int(jobs.steps[row]),
                    "times": int(jobs.times[row]),
                    "start": start,
                    "end": end,
                    "arrival": arrival,
                    "fate": "used" if used[row] else "rejected",
                    "update": update,
                }
            )

    def add_gone(self, gone: Iterable[tuple[Any, str]]) -> None:
        """Jobs of which nothing reached the server, and why."""
        for job, fate in gone:
            self.jobs.append(
                {
                    "client": job.client,
                    "exchange": "train",
                    "version": job.version,
                    "repeat": job.repeat,
                    "target": job.target,
                    "steps": job.steps,
                    "times": 0,
                    "start": job.start,
                    "end": job.end,
                    "arrival": None,
                    "fate": fate,
                    "update": None,
                }
            )

    def add_update(self, update: int, seconds: float, sent: int, by_weight: bool) -> None:
        """The server acted."""
        used = sum(1 for job in self._since(update) if job["fate"] == "used")
        row = {"update": update, "seconds": seconds, "sent": sent, "used": used, "by_weight": by_weight}
        self.updates.append(row)

    def _since(self, update: int) -> Iterable[dict[str, Any]]:
        """The jobs of an update, which is the newest."""
        for job in reversed(self.jobs):
            if job["update"] is not None and job["update"] < update:
                return
            if job["update"] == update:
                yield job

    @property
    def seconds(self) -> float:
        """Virtual seconds up to the last server update."""
        return self.updates[-1]["seconds"] if self.updates else 0.0

    def busy(self, clients: int) -> np.ndarray:
        """[N]: seconds every client spent training, up to the last server update."""
        total = np.zeros(clients)
        spans = {(job["client"], job["start"], job["end"]) for job in self.jobs}  # an update sent twice was one job
        for client, start, end in spans:
            total[client] += max(0.0, min(end, self.seconds) - start)
        return total

    def utilisation(self, clients: int) -> np.ndarray:
        """[N]: the share of the run that every client spent training; the rest it was idle or sent and received."""
        return self.busy(clients) / self.seconds if self.seconds else np.zeros(clients)

    def staleness(self) -> dict[int, int]:
        """How many used updates were how many versions old."""
        counts = Counter(
            job["update"] - 1 - job["version"] for job in self.jobs if job["fate"] == "used" and job["update"]
        )
        return dict(sorted(counts.items()))

    @property
    def max_delay(self) -> int:
        """The largest staleness: lambda of the DLSGD paper."""
        return max(self.staleness(), default=0)

    def trace(self) -> list[dict[str, Any]]:
        """What `fs.schedule.Replay` follows: every update's jobs in the order in which they reached the server."""
        if any(job["exchange"] != "train" and job["update"] for job in self.jobs):
            raise FedstrideError("a run with several exchanges a round has no trace to replay")
        names = ("client", "version", "repeat", "target", "steps", "times", "start", "end")
        updates = [
            {name: row[name] for name in ("seconds", "sent", "by_weight")} | {"jobs": []} for row in self.updates
        ]
        for job in self.jobs:
            if job["fate"] == "used" and job["update"]:
                updates[job["update"] - 1]["jobs"].append({name: job[name] for name in names})
        return updates
