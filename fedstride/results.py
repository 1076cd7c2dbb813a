"""What a run gives back."""

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from fedstride.errors import FedstrideError
from fedstride.timeline import Timeline

# What every row counts, whatever the method and the metrics.
COUNTERS = "round seconds clients steps bytes_up bytes_down rejected staleness max_staleness".split()


@dataclass(frozen=True)
class Target:
    """Stop as soon as a row meets all of these: accuracy at least, losses at most."""

    accuracy: float | None = None
    loss: float | None = None
    train_loss: float | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, field.name) is None for field in fields(self)):
            raise FedstrideError("a Target needs accuracy, loss or train_loss")
        for field in fields(self):
            goal = getattr(self, field.name)
            if goal is not None and (not isinstance(goal, numbers.Real) or math.isnan(goal)):
                raise FedstrideError(f"the {field.name} of a Target must be a number, not {goal!r}")
        if self.accuracy is not None and not 0 <= self.accuracy <= 1:
            raise FedstrideError(f"the accuracy of a Target is a share from 0 to 1, not {self.accuracy!r}")

    def __call__(self, row: dict[str, Any]) -> bool:
        for name, low in (("accuracy", False), ("loss", True), ("train_loss", True)):
            goal = getattr(self, name)
            if goal is None:
                continue
            if name not in row or not (row[name] <= goal if low else row[name] >= goal):  # NaN meets no goal
                return False
        return True


@dataclass(frozen=True)
class Result:
    """The end of a run: the model, the rows, and how it ended."""

    x: Tensor  # the final global model as a flat vector
    model: nn.Module  # a module of the user's own kind with x loaded
    rows: list[dict[str, Any]]  # one dict a round; row 0 only for methods with a prologue
    status: str  # finished, stopped (target reached), diverged
    method: str
    backend: str
    state: Any  # the method's server state
    memories: Any  # what the clients remember
    batch: float  # jobs trained together, on average
    timeline: Timeline | None = None  # who trained when; recorded on request

    def summary(self) -> str:
        """What a person wants to read."""
        last = self.rows[-1] if self.rows else {"round": 0}
        ending = {
            "finished": f"finished after {last['round']} rounds",
            "stopped": f"reached its target in round {last['round']}",
            "diverged": f"diverged at round {last['round']}",
        }[self.status]
        lines = [f"{self.method} {ending} ({self.backend} backend)"]
        for name in ("accuracy", "loss", "train_loss", "local_loss"):
            seen = [row for row in self.rows if name in row]
            if seen:
                pick = max if name == "accuracy" else min
                best = pick(seen, key=lambda row: row[name])
                lines.append(
                    f"  {name}: {seen[-1][name]:.4f} at the end, best {best[name]:.4f} in round {best['round']}"
                )
        counters = ("bytes_up", "bytes_down", "steps", "rejected")
        totals = {name: sum(row.get(name, 0) for row in self.rows) for name in counters}
        up, down = totals["bytes_up"] / 1e6, totals["bytes_down"] / 1e6
        lines.append(f"  {totals['steps']:,} client steps, {up:,.2f} MB up, {down:,.2f} MB down")
        if last.get("seconds"):
            lines.append(f"  {last['seconds']:,.1f} virtual seconds")
        if any(row.get("max_staleness") for row in self.rows):
            seen = [row for row in self.rows if "staleness" in row]
            mean = sum(row["staleness"] for row in seen) / len(seen)
            most = max(row["max_staleness"] for row in seen)
            lines.append(
                f"  updates {mean:.1f} versions old on average, {most} at most; {self.batch:.1f} trained at once"
            )
        if totals["rejected"]:
            lines.append(f"  {totals['rejected']} uploads rejected: not finite, or refused by the guard")
        if "epsilon" in last:
            lines.append(f"  epsilon {last['epsilon']:.4g} at delta {last['delta']:g}")
        return "\n".join(lines)
