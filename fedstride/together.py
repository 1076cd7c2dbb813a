"""Several runs side by side, their cohorts as rows of one batch: seeds, settings and methods that step alike.

Every run has a thread, and one of them works at a time. A run that has come to its local steps waits until all others
have, or are over; then those of the same kind do their steps as one cohort (fedstride/joint.py), so every run gives
what it gives alone, to rounding.

On a GPU these steps are `compiled`, and where it would often wait for the runs' own work, the runs fall into two
halves: one works while the other steps. On a CPU they are those of `vmap`; a model that `auto` trains one client after
the other there gains nothing, and its runs take turns.
"""

import copy
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fedstride import inputs
from fedstride.compiled import Compiled
from fedstride.joint import Request, Several, most, named
from fedstride.memory import main_memory
from fedstride.oracle import Oracle, Vmap, choose
from fedstride.sampling import Sampler
from fedstride.vector import VectorModel

if TYPE_CHECKING:
    from fedstride.experiment import Experiment


RUNS = 16  # side by side, at most
FILLED = 256  # clients in one batch on a GPU; more hardly make it quicker, and all runs end later
CROWD = 50  # clients of one run on a CPU; of more, several runs take longer side by side (docs/performance.md)
BUSY = 0.9  # share of the time that a GPU steps; with less, the runs are halved


class Network(NamedTuple):
    """What counts of an experiment's model and fleet, on a CPU."""

    batched: bool  # whether `auto` trains several clients at a time
    most: int  # clients in one batch at most
    fleets: int  # so many fleets may remember a vector for every client: a quarter of the machine's memory


NETWORKS: dict[str, Network] = {}  # by data, batch size and model


def able(experiment: "Experiment") -> bool:
    """Whether a run gains by others beside it, and leaves it open how it trains.

    On a CPU a run gains if its clients train many at a time, do not fill a batch alone, and have data that other runs
    have as well.
    """
    device = inputs.device(experiment.device).type
    if experiment.chunk is not None:
        return False
    if device == "cuda":
        return experiment.backend in ("auto", "compiled")
    if device != "cpu" or experiment.backend not in ("auto", "vmap") or not experiment.reads_data:
        return False
    network = _network(experiment)
    cohort = experiment.cohort or 1
    return network.batched and network.fleets > 1 and cohort <= CROWD and network.most >= 2 * cohort


def several(experiments: "Iterable[Experiment]") -> int:
    """How many runs that gain by it to do side by side, where nobody says it: as many as fill a batch."""
    runs = list(experiments)
    smallest = min((run.cohort or 1 for run in runs), default=1)
    if all(inputs.device(run.device).type == "cuda" for run in runs):
        return max(1, min(RUNS, -(-FILLED // smallest)))
    networks = [_network(run) for run in runs]
    return min(RUNS, min(one.most for one in networks) // smallest, min(one.fleets for one in networks))


def _network(experiment: "Experiment") -> Network:
    """The same for all seeds, methods and rates, so it is made once."""
    parts = {slot: getattr(experiment, slot) for slot in ("data", "partition", "model", "batch_size", "dtype")}
    plain = type(experiment)(**parts, device="cpu")
    name = json.dumps(plain.dump(), sort_keys=True)
    if name not in NETWORKS:
        prepared = plain.model_copy(update={"seed": experiment.seed}).prepare()
        model = VectorModel(prepared.model, getattr(torch, plain.dtype), torch.device("cpu"))
        clients = prepared.clients.to(model.x.device, model.dtype)
        size = Sampler(clients, prepared.settings["batch_size"], "replacement").bytes
        fleets = int(main_memory() / (len(clients) * model.x.nbytes))
        NETWORKS[name] = Network(choose("auto", model, model.x.device, 2) == "vmap", most(model.x, size), fleets)
    return NETWORKS[name]


class Waiting(NamedTuple):
    """A run that has come to its local steps."""

    oracle: Compiled | Several
    request: Request
    kind: tuple  # cohorts of the same kind do their steps as one
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

    def __init__(self, backend: str | None = None):
        self._backend = backend  # None: `compiled` on a GPU, elsewhere what `auto` chooses
        self._ready: deque[threading.Event] = deque()  # whose turn comes next; one run works at a time
        self._waiting: list[Waiting] = []
        self.failed = False  # whether a run has ended with an error: no new one should be begun
        self._interrupted = False
        self._begun: deque[Begun] = deque()  # those whose runs have not gone on
        self._latest: Begun | None = None
        self._halved = False
        # The runs' own work goes before the steps of others, which are on the ordinary stream.
        self._stream = torch.cuda.Stream(priority=-1) if torch.cuda.is_available() else None
        self._oracles: dict[tuple, Compiled | Several] = {}
        # Recording needs the libraries' handles that running has made, and these belong to a thread.
        self._worker = ThreadPoolExecutor(1)

    def play(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Do all of them; an error of one is raised when the others are over.

        An interrupt ends all of them where they next come to local steps.
        """
        results: list[Any] = [None] * len(works)
        errors: list[BaseException] = []
        self.failed = self._interrupted = False

        def work(number: int, turn: threading.Event) -> None:
            turn.wait()
            try:
                if not self._interrupted:
                    with torch.cuda.stream(self._stream):
                        results[number] = works[number]()
            except BaseException as error:
                self.failed = True
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
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._interrupted = self.failed = True
            for thread in threads:
                thread.join()
            raise
        if errors:
            raise errors[0]
        return results

    def backend(self, device: torch.device) -> tuple[str, bool]:
        """How its runs train, and whether nobody asked for that by name."""
        return self._backend or ("compiled" if device.type == "cuda" else "auto"), self._backend is None

    def oracle(self, alone: Oracle) -> Oracle:
        """The oracle of one run; runs with the same network and loss share its programs."""
        own = Several(alone) if type(alone) is Vmap else alone
        if not isinstance(own, (Compiled, Several)):
            return own
        model = own.model
        network = (str(model.layers), model.frozen, *model.code, str(model.signature), model.dtype)
        name = (own.name, *network, named(own.loss), own.reduction, model.mixes_examples)
        shared = self._oracles.setdefault(name, own)
        member = copy.copy(shared)
        member.model = model
        member.descend = lambda *request: self._wait(shared, Request(*request))  # type: ignore[method-assign]
        return member

    def _wait(self, oracle: Compiled | Several, request: Request) -> bool:
        """Do the steps with those of the others; False if they cannot be done in one."""
        kind = oracle.kind(request)
        if kind is None:
            return False
        mine = Waiting(oracle, request, kind, threading.Event(), [False])
        self._waiting.append(mine)
        self._hand_on()
        mine.turn.wait()
        if self._interrupted:
            raise KeyboardInterrupt
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
        turns, since, events = [one.turn for one in waiting], time.perf_counter(), None
        try:
            events = self._worker.submit(self._descend, waiting).result()
        except Exception as error:  # nobody may wait for ever
            for one in waiting:
                one.result[0] = error
        self._latest = Begun(turns, since, events)
        self._begun.append(self._latest)

    def _descend(self, waiting: list[Waiting]) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        """The steps, kind by kind; on a GPU they may go on when this returns."""
        events = None
        if self._stream is not None and any(one.oracle.model.x.is_cuda for one in waiting):
            torch.cuda.current_stream().wait_stream(self._stream)
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
        groups: dict[tuple, list[Waiting]] = {}
        for one in waiting:
            groups.setdefault((id(one.oracle), one.kind), []).append(one)
        for group in groups.values():
            oracle = group[0].oracle
            for part in self._parts(group, oracle.most(group[0].request)):
                held: bool | BaseException
                try:
                    held = oracle.descend_all([one.request for one in part])
                except BaseException as error:
                    # Alone on a CPU, only the guilty fail; on a GPU it belongs to all, whoever does the work.
                    held = False if isinstance(error, Exception) and isinstance(oracle, Several) else error
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
