"""Who trains whom: clients stay with a worker, and the work is balanced by steps and measured time."""

import heapq
from collections.abc import Sequence

import numpy as np

TOLERANCE = 1.1  # times its share of the work that a worker keeps before clients move away from it
RANGE = 16.0  # the largest share is at most so many times the smallest
SHORTEST = 0.01  # seconds; what takes less says nothing about speed


class Placement:
    """Every client's home among the workers, and what share of the work each worker can take."""

    def __init__(self, clients: int, workers: int):
        self.home = np.full(clients, -1, dtype=np.int32)  # -1: none yet
        self.share = np.ones(workers)

    def split(self, clients: np.ndarray, work: np.ndarray, present: Sequence[int]) -> dict[int, np.ndarray]:
        """Worker -> rows, in their order. Who has no home there, or would keep it too long, finds another one."""
        shares = self.share[list(present)]
        limits = TOLERANCE * work.sum() * shares / shares.sum()
        chosen, load = np.full(len(clients), -1), np.zeros(len(present))
        for place, worker in enumerate(present):
            mine = np.flatnonzero(self.home[clients] == worker)
            fits = work[mine].cumsum() <= limits[place]
            chosen[mine[fits]], load[place] = worker, work[mine[fits]].sum()
        loose = np.flatnonzero(chosen < 0)
        heap = [(load[place] / shares[place], place) for place in range(len(present))]
        heapq.heapify(heap)
        for row in loose[np.argsort(-work[loose], kind="stable")]:  # longest first, to whoever would be done first
            _, place = heap[0]
            chosen[row] = present[place]
            load[place] += work[row]
            heapq.heapreplace(heap, (load[place] / shares[place], place))
        self.home[clients[loose]] = chosen[loose]
        return {worker: rows for worker in present if len(rows := np.flatnonzero(chosen == worker))}

    def learn(self, times: dict[int, tuple[float, float]]) -> None:
        """Move the shares towards equal times; `times` has work and seconds of workers that were at it together.

        It is times that are made equal, not work per second that is measured: where a call costs the same however much
        work it holds, a worker with little work looks slow, would get less, and look slower still.
        """
        if len(times) < 2 or max(seconds for _, seconds in times.values()) < SHORTEST:
            return
        slow = {worker: seconds * self.share[worker] / work for worker, (work, seconds) in times.items()}
        middle = float(np.exp(np.mean(np.log(list(slow.values())))))
        for worker, value in slow.items():
            self.share[worker] *= (middle / value) ** 0.5  # half of the way, since a single time is noisy
        self.share = np.clip(self.share / self.share.mean(), RANGE**-0.5, RANGE**0.5)
