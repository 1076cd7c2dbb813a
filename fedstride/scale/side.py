"""Whole runs side by side, one a worker."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from fedstride.errors import FedstrideError
from fedstride.scale.pool import PATIENCE, Pool
from fedstride.scale.team import DEATHS, POLL, get

Task = TypeVar("Task")


def side_by_side(
    pool: Pool,
    folder: Path,
    tasks: Sequence[Task],
    call: Callable[[Task], tuple],
    watch: Callable[[Task, dict[str, Any]], None],
) -> Iterator[tuple[Task, Any]]:
    """Run `function(*arguments, progress)` of every task's call on some worker; yields what it gave as it ends.

    Runs write into the folder themselves, so every machine must see it; then the run of a worker that dies goes on
    from its last checkpoint on another one.
    """
    _check(pool, folder)
    waiting, idle = deque(tasks), deque(range(len(pool)))
    under_way: dict[Any, tuple[int, Task]] = {}
    away: dict[Any, int] = {}  # workers that have died, by what will be ready when Ray has started them again
    deaths = 0
    while waiting or under_way:
        while waiting and idle:
            worker, task = idle.popleft(), waiting.popleft()
            function, *arguments = call(task)
            play = pool.handles[worker].play.options(num_returns="streaming")
            under_way[play.remote(function, pool.neighbours[worker], *arguments)] = (worker, task)
        ready, _ = ray.wait([*under_way, *away], num_returns=1, timeout=PATIENCE)
        if not ready and not under_way:
            raise FedstrideError(f"all {len(pool)} workers are gone and did not come back in {PATIENCE:g} s")
        for ref in ready:
            worker = away.pop(ref) if ref in away else under_way[ref][0]
            stream: Any = ref
            try:
                if ref not in under_way:
                    get(ref)
                    idle.append(worker)
                    continue
                rows, over, result = get(next(stream))
            except RayActorError as error:
                if ref in under_way:
                    deaths, task = deaths + 1, under_way.pop(ref)[1]
                    waiting.appendleft(task)
                    if deaths > DEATHS * len(pool):
                        why = str(error).strip().splitlines()[-1]
                        raise FedstrideError(f"workers have died {deaths} times, at last over {task}: {why}") from None
                time.sleep(POLL)
                away[pool.handles[worker].where.remote()] = worker
                continue
            task = under_way[ref][1]
            for row in rows:
                watch(task, row)
            if over:
                del under_way[ref]
                idle.append(worker)
                yield task, result


def _check(pool: Pool, folder: Path) -> None:
    """Refuse workers that do not see the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / ".seen"
    mark.touch()
    try:
        for machine, sees in zip(pool.machines, get([handle.sees.remote(str(mark)) for handle in pool.handles])):
            if not sees:
                raise FedstrideError(
                    f"a worker on machine {machine[:8]} does not see the folder {folder}; whole runs write there "
                    "themselves, so put it where all machines of the cluster see it"
                )
    finally:
        mark.unlink()
