"""Several runs side by side, their cohorts as rows of one batch: seeds, settings and methods that step alike.

Every run has a thread, and one of them works at a time. A run that has come to its local steps waits until all others
have, or are over; then those of the same kind (the same code, data, batch size and model) do their steps as one
cohort. Rows do not know of each other, so every run gives what it gives alone, to rounding.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fedstride import inputs
from fedstride.compiled import Compiled, Request
from fedstride.losses import LossFunction
from fedstride.oracle import room
from fedstride.vector import VectorModel

if TYPE_CHECKING:
    from fedstride.experiment import Experiment


RUNS = 16  # side by side, where nobody says how many


def able(experiments: "Iterable[Experiment]") -> bool:
    """Whether runs had better be done together: there are several, on a GPU, and none asks for another backend."""
    runs = list(experiments)
    return len(runs) > 1 and all(
        run.backend in ("auto", "compiled") and inputs.device(run.device).type == "cuda" for run in runs
    )


class Together:
    """The place where runs meet; give it to each as its `backend`."""

    def __init__(self, rows: int | None = None):
        self._rows = rows  # clients in one batch at most
        self._turn = threading.Lock()  # who holds it works
        self._waiting: list[tuple[Compiled, Request, threading.Event, list[Any]]] = []
        self._alive = 0
        self._oracles: dict[tuple, Compiled] = {}

    def play(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Do all of them; an error of one is raised when the others are over."""
        results: list[Any] = [None] * len(works)
        errors: list[BaseException] = []
        self._alive = len(works)

        def work(number: int) -> None:
            with self._turn:
                try:
                    results[number] = works[number]()
                except BaseException as error:
                    errors.append(error)
                self._alive -= 1
                self._descend_if_all_wait()

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def oracle(self, model: VectorModel, loss: LossFunction, each: tuple[LossFunction, str] | None) -> Compiled:
        """The oracle of one run; runs with the same network and loss share its programs."""
        own = Compiled(model, loss, each)
        trained = len(list(model.module.parameters())) == len(model.names)  # nothing else to tell two networks apart
        name = (repr(model.module), str(model.signature), model.x.dtype, loss) if trained else (id(own),)
        shared = self._oracles.setdefault(name, own)
        member = copy.copy(shared)
        member.model = own.model
        member.descend = lambda *request: self._wait(shared, Request(*request))  # type: ignore[method-assign]
        return member

    def _wait(self, oracle: Compiled, request: Request) -> bool:
        """Do the steps with those of the others; False if they cannot be done in one."""
        if request.kind is None:
            return False
        done = threading.Event()
        result: list[Any] = [False]
        self._waiting.append((oracle, request, done, result))
        if not self._descend_if_all_wait():
            self._turn.release()
            done.wait()
            self._turn.acquire()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def _descend_if_all_wait(self) -> bool:
        if not self._waiting or len(self._waiting) < self._alive:
            return False
        waiting, self._waiting = self._waiting, []
        groups: dict[tuple, list] = {}
        for one in waiting:
            groups.setdefault((id(one[0]), one[1].kind), []).append(one)
        for group in groups.values():
            oracle = group[0][0]
            for part in self._parts(group, self._rows or room(oracle.model.x)):
                held: bool | BaseException
                try:
                    held = oracle.descend_all([request for _, request, _, _ in part])
                except BaseException as error:  # it belongs to all of them, whoever does the work
                    held = error
                for _, _, _, result in part:
                    result[0] = held
        for _, _, done, _ in waiting:
            done.set()
        return True

    @staticmethod
    def _parts(group: list, rows: int) -> list[list]:
        """As many requests at a time as fit."""
        parts: list[list] = [[]]
        count = 0
        for one in group:
            count += len(one[1].keys)
            if parts[-1] and count > rows:
                parts.append([])
                count = len(one[1].keys)
            parts[-1].append(one)
        return parts
