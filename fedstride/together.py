"""Several runs side by side, their cohorts as rows of one batch: seeds, settings and methods that step alike.

Every run has a thread, and one of them works at a time. A run that has come to its local steps waits until all others
have, or are over; then those of the same kind (the same code, data, batch size and model) do their steps as one
cohort. Rows do not know of each other, so every run gives what it gives alone, to rounding.

Where a GPU would often wait for the runs' own work, they fall into two halves: one works while the other steps.
"""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fedstride import inputs
from fedstride.compiled import Compiled, Request
from fedstride.losses import LossFunction
from fedstride.oracle import room
from fedstride.vector import VectorModel

if TYPE_CHECKING:
    from fedstride.experiment import Experiment


RUNS = 16  # side by side, at most
FILLED = 256  # clients in one batch; more hardly make it quicker, and all runs end later
BUSY = 0.9  # share of the time that a GPU steps; with less, the runs are halved


def able(experiments: "Iterable[Experiment]") -> bool:
    """Whether runs can be done together: all are on a GPU, and none asks for another backend."""
    return all(run.backend in ("auto", "compiled") and inputs.device(run.device).type == "cuda" for run in experiments)


def several(experiments: "Iterable[Experiment]") -> int:
    """How many runs to do side by side, where nobody says it: as many as fill a batch."""
    smallest = min((run.cohort or 1 for run in experiments), default=1)
    return max(1, min(RUNS, -(-FILLED // smallest)))


class Waiting(NamedTuple):
    """A run that has come to its local steps."""

    oracle: Compiled
    request: Request
    turn: threading.Event
    result: list[Any]


class Begun(NamedTuple):
    """Steps that were begun, and on a GPU may be under way."""

    turns: list[threading.Event]  # of their runs
    since: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # before and after them

    def share(self) -> float:
        """How much of the time since they were begun they have taken."""
        if self.events is None:
            return 1.0
        self.events[1].synchronize()
        return self.events[0].elapsed_time(self.events[1]) / 1000 / (time.perf_counter() - self.since)


class Together:
    """The place where runs meet; give it to each as its `backend`."""

    def __init__(self, rows: int | None = None):
        self._rows = rows  # clients in one batch at most
        self._ready: deque[threading.Event] = deque()  # whose turn comes next; one run works at a time
        self._waiting: list[Waiting] = []
        self._begun: deque[Begun] = deque()  # those whose runs have not gone on
        self._latest: Begun | None = None
        self._halved = False
        # The runs' own work goes before the steps of others, which are on the ordinary stream.
        self._stream = torch.cuda.Stream(priority=-1) if torch.cuda.is_available() else None
        self._oracles: dict[tuple, Compiled] = {}
        # Recording needs the libraries' handles that running has made, and these belong to a thread.
        self._worker = ThreadPoolExecutor(1)

    def play(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Do all of them; an error of one is raised when the others are over."""
        results: list[Any] = [None] * len(works)
        errors: list[BaseException] = []

        def work(number: int, turn: threading.Event) -> None:
            turn.wait()
            try:
                with torch.cuda.stream(self._stream):
                    results[number] = works[number]()
            except BaseException as error:
                errors.append(error)
            self._hand_on()

        turns = [threading.Event() for _ in works]
        threads = [threading.Thread(target=work, args=both, daemon=True) for both in enumerate(turns)]
        self._ready.extend(turns)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # for what the runs are given
        for thread in threads:
            thread.start()
        self._hand_on()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def oracle(self, model: VectorModel, loss: LossFunction, each: tuple[LossFunction, str] | None) -> Compiled:
        """The oracle of one run; runs with the same network and loss share its programs."""
        own = Compiled(model, loss, each)
        name = (str(model.layers), model.frozen, *model.code, str(model.signature), model.dtype, loss)
        shared = self._oracles.setdefault(name, own)
        member = copy.copy(shared)
        member.model = own.model
        member.descend = lambda *request: self._wait(shared, Request(*request))  # type: ignore[method-assign]
        return member

    def _wait(self, oracle: Compiled, request: Request) -> bool:
        """Do the steps with those of the others; False if they cannot be done in one."""
        if request.kind is None:
            return False
        mine = Waiting(oracle, request, threading.Event(), [False])
        self._waiting.append(mine)
        self._hand_on()
        mine.turn.wait()
        if isinstance(mine.result[0], BaseException):
            raise mine.result[0]
        return mine.result[0]

    def _hand_on(self) -> None:
        """Let the next run work; once all wait, or a half of them, their steps come first."""
        half = self._halved and not self._begun and len(self._waiting) >= len(self._ready)
        if self._waiting and (half or not self._ready):
            self._begin()
        if self._begun and not self._ready:
            begun = self._begun.popleft()
            if self._stream is not None and begun.events is not None:
                self._stream.wait_event(begun.events[1])
            self._ready.extend(begun.turns)
        if self._ready:
            self._ready.popleft().set()

    def _begin(self) -> None:
        """Begin the steps of all who wait."""
        waiting, self._waiting = self._waiting, []
        self._halved = self._halved or (self._latest is not None and self._latest.share() < BUSY)
        turns, since = [one.turn for one in waiting], time.perf_counter()
        self._latest = Begun(turns, since, self._worker.submit(self._descend, waiting).result())
        self._begun.append(self._latest)

    def _descend(self, waiting: list[Waiting]) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        """The steps, kind by kind; on a GPU they may go on when this returns."""
        events = None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
        groups: dict[tuple, list[Waiting]] = {}
        for one in waiting:
            groups.setdefault((id(one.oracle), one.request.kind), []).append(one)
        for group in groups.values():
            oracle = group[0].oracle
            for part in self._parts(group, self._rows or room(oracle.model.x)):
                held: bool | BaseException
                try:
                    held = oracle.descend_all([one.request for one in part])
                except BaseException as error:  # it belongs to all of them, whoever does the work
                    held = error
                for one in part:
                    one.result[0] = held
        if events is not None:
            events[1].record()
        return events

    @staticmethod
    def _parts(group: list[Waiting], rows: int) -> list[list[Waiting]]:
        """As many requests at a time as fit."""
        parts: list[list[Waiting]] = [[]]
        count = 0
        for one in group:
            count += len(one.request.keys)
            if parts[-1] and count > rows:
                parts.append([])
                count = len(one.request.keys)
            parts[-1].append(one)
        return parts
