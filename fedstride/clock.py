"""The virtual clock: events in the order of (time, priority, sequence). Nothing ever sleeps."""

import heapq
from typing import Any

# At equal times the server first takes what has arrived, then clients act, then the server sends.
ARRIVAL, CLIENT, SERVER = 0, 1, 2


class Clock:
    """An event queue. An event is a kind and a subject, plain data both, so a clock can be written as JSON."""

    def __init__(self, now: float = 0.0):
        self.now = now
        self._heap: list[tuple[float, int, int, str, Any]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, time: float, priority: int, kind: str, subject: Any = None) -> None:
        """Plan an event; events of equal time and priority happen in the order in which they were planned."""
        heapq.heappush(self._heap, (time, priority, self._sequence, kind, subject))
        self._sequence += 1

    def pop(self) -> tuple[str, Any]:
        """Go to the next event and hand it out."""
        self.now, _, _, kind, subject = heapq.heappop(self._heap)
        return kind, subject

    def dump(self) -> dict[str, Any]:
        """Everything planned, as plain data."""
        return {"now": self.now, "sequence": self._sequence, "events": sorted(self._heap)}

    def load(self, stored: dict[str, Any]) -> None:
        """Undo `dump`; a sorted list is a heap."""
        self.now, self._sequence = stored["now"], stored["sequence"]
        self._heap = [
            (time, priority, sequence, kind, subject) for time, priority, sequence, kind, subject in stored["events"]
        ]
