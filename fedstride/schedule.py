"""When clients start and when the server acts."""

from dataclasses import dataclass

from fedstride.participation import Participation


@dataclass(frozen=True)
class Sync:
    """Rounds: a cohort starts together and the server waits for all of it. None: the run's own participation."""

    participation: Participation | None = None
