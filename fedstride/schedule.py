"""When clients start and when the server acts."""

import numbers
from dataclasses import dataclass
from typing import Any

from fedstride.errors import FedstrideError


@dataclass(frozen=True)
class Sync:
    """Rounds: a cohort starts together and the server waits for all of it."""

    participation: Any = None  # None: the run's own


@dataclass(frozen=True)
class Deadline:
    """Rounds that end after so many seconds: who is late hands in the steps it has done ("cut") or nothing ("drop").

    Only the training exchange is cut; a cut client's upload comes after the deadline. The seconds count from the moment
    the server sends the model.
    """

    seconds: float
    late: str = "cut"
    participation: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, numbers.Real) or not 0 < float(self.seconds) < float("inf"):
            raise FedstrideError(f"a deadline must be a positive number of seconds, not {self.seconds!r}")
        if self.late not in ("cut", "drop"):
            raise FedstrideError(f"late must be 'cut' or 'drop', not {self.late!r}")


Schedule = Sync | Deadline
