"""The workers of one run: work is handed out, and what dead or straggling ones leave undone is given to others."""

import pickle
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError, RaySystemError, RayTaskError

from fedstride.errors import FedstrideError
from fedstride.scale.placement import Placement
from fedstride.scale.pool import PATIENCE, Pool
from fedstride.scale.worker import Brief

POLL = 0.5  # seconds between looks for workers that are late or back
TRIES = 3  # to load a run
LATE = (20.0, 5.0)  # seconds, and times what the others needed for the same work, after which a worker is late
DEATHS = 3  # a worker may die so often in one exchange before the run is given up


class Done(NamedTuple):
    """A part of some work."""

    rows: np.ndarray
    worker: int
    result: Any
    more: list[Any]  # references to what stays in the store


class _Sent(NamedTuple):
    rows: np.ndarray
    worker: int
    more: list[Any]
    since: float


class Team:
    """Hands out work by `placement`; a worker that is away comes back by answering."""

    def __init__(self, pool: Pool, brief: Brief, clients: int):
        self._pool = pool
        self.placement = Placement(clients, len(pool))
        try:
            self._brief = ray.put(brief)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise FedstrideError(
                f"workers need a copy of method, model, loss, sampling and augment, and one of them cannot be copied "
                f"to another process: {str(error).splitlines()[0]}"
            ) from None
        # Workers that are not there, by what will be ready when they are.
        self._away = {worker: self._load(worker) for worker in range(len(pool))}
        self._told: dict[int, tuple[str, int]] = {}  # every worker's backend, and how many clients it trains together
        self._deaths = dict.fromkeys(range(len(pool)), 0)  # while they made themselves ready
        while len(self._crew()) < len(pool):  # at the start, all
            if dying := [worker for worker, times in self._deaths.items() if times >= TRIES]:
                raise FedstrideError(
                    f"worker {dying[0]} has died {TRIES} times while it loaded the run; is there memory for as many "
                    "copies of the data as there are workers?"
                )
            time.sleep(POLL / 5)
        self.backend, self.chunk = self._told[0][0], sum(chunk for _, chunk in self._told.values())

    def _load(self, worker: int) -> Any:
        pool = self._pool
        return pool.handles[worker].load.remote(self._brief, pool.neighbours[worker], pool.sharing[worker])

    @property
    def present(self) -> list[int]:
        """Workers that can be given work."""
        return [worker for worker in range(len(self._pool)) if worker not in self._away]

    def call(self, worker: int, name: str, returns: int, *arguments: Any) -> list[Any]:
        """Ask a worker for something; the first reference is for what comes here."""
        refs = getattr(self._pool.handles[worker], name).options(num_returns=returns).remote(*arguments)
        return refs if isinstance(refs, list) else [refs]

    def share(self, clients: np.ndarray, work: np.ndarray, ask: Callable[[int, np.ndarray], list[Any]]) -> list[Done]:
        """Work on clients, balanced; `ask(worker, rows)` starts a part. Returns the parts by worker."""

        def split(rows: np.ndarray, present: list[int]) -> dict[int, np.ndarray]:
            parts = self.placement.split(clients[rows], work[rows], present)
            return {worker: rows[part] for worker, part in parts.items()}

        done = self._play(np.arange(len(clients)), work, split, ask)
        if len({part.worker for part in done}) == len(done):  # otherwise somebody has worked for two
            times = {part.worker: (float(work[part.rows].sum()), part.result.seconds) for part in done}
            self.placement.learn(times)
        return done

    def near(self, workers: np.ndarray, ask: Callable[[int, np.ndarray], list[Any]]) -> list[Done]:
        """Work on rows of the store, each at the worker that has it, or at another one if that is away."""

        def split(rows: np.ndarray, present: list[int]) -> dict[int, np.ndarray]:
            wanted = np.where(np.isin(workers[rows], present), workers[rows], present[0])
            return {int(worker): rows[wanted == worker] for worker in np.unique(wanted)}

        return self._play(np.arange(len(workers)), np.ones(len(workers)), split, ask)

    def _play(self, rows: np.ndarray, work: np.ndarray, split: Callable, ask: Callable) -> list[Done]:
        under_way: dict[Any, _Sent] = {}
        done: list[Done] = []
        left, deaths, pace = rows, 0, 0.0
        while len(left) or under_way:
            if len(left):
                for worker, part in split(left, self._crew()).items():
                    first, *more = ask(worker, part)
                    under_way[first] = _Sent(part, worker, more, time.monotonic())
                left = rows[:0]
            ready, _ = ray.wait(list(under_way), num_returns=1, timeout=POLL)
            for ref in ready:
                sent = under_way.pop(ref)
                try:
                    result = get(ref)
                except RayActorError as error:
                    deaths, left = deaths + 1, np.concatenate([left, sent.rows])
                    self._leave(sent.worker)
                    if deaths > DEATHS * len(self._pool):
                        raise FedstrideError(
                            f"workers have died {deaths} times over the same work, at last with: "
                            f"{str(error).strip().splitlines()[-1]}"
                        ) from None
                    continue
                done.append(Done(sent.rows, sent.worker, result, sent.more))
                pace = max(pace, (time.monotonic() - sent.since) / work[sent.rows].sum())
            for ref, sent in list(under_way.items()):  # nobody waits for ever for one that others could do
                limit = LATE[0] + LATE[1] * pace * work[sent.rows].sum()
                others = set(self.present) - {sent.worker for sent in under_way.values()}
                if done and others and time.monotonic() - sent.since > limit:
                    del under_way[ref]
                    left = np.concatenate([left, sent.rows])
                    self._leave(sent.worker)
            left = np.sort(left)
        return sorted(done, key=lambda part: (part.worker, part.rows[0]))

    def _leave(self, worker: int) -> None:
        """No more work for it until it answers: Ray starts dead workers again, and late ones end what they do first."""
        if worker not in self._away:
            self._away[worker] = self._load(worker)
            sys.stderr.write(f"worker {worker} is gone or late; what it was to do goes to others until it is back\n")

    def _crew(self) -> list[int]:
        """Who is there; those who have come back, too. Waits where nobody is."""
        until = time.monotonic() + PATIENCE
        while True:
            for worker, ref in list(self._away.items()):
                if not ray.wait([ref], timeout=0)[0]:
                    continue
                try:
                    self._told[worker] = get(ref)
                    del self._away[worker]
                except RayActorError:
                    self._deaths[worker] += 1
                    self._away[worker] = self._load(worker)
            if self.present:
                return self.present
            if time.monotonic() > until:
                raise FedstrideError(f"all {len(self._pool)} workers are gone and did not come back in {PATIENCE:g} s")
            time.sleep(POLL / 5)


def get(refs: Any) -> Any:
    """What a worker returned; its mistakes come out as they were made."""
    try:
        return ray.get(refs)
    except RayTaskError as error:
        raise _cause(error.cause) from None
    except (ObjectLostError, RaySystemError) as error:
        raise _cause(error) from None


def _cause(error: BaseException) -> BaseException:
    """What to tell a person."""
    if isinstance(error, ObjectLostError):
        return _lost()
    if isinstance(error, RaySystemError):
        why = str(error).splitlines()[0]
        return FedstrideError(
            f"a worker cannot read what it is sent: {why}; your own modules must be on its machine, too"
        )
    return error


def _lost() -> FedstrideError:
    return FedstrideError(
        "a machine of the cluster is gone, and what it held of the run (data or clients' memories) with it; resume the "
        "run from its last checkpoint"
    )
