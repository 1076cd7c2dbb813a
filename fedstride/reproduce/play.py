"""Running what is missing of an item, one run after the other or several side by side."""

import hashlib
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedstride.experiment import Experiment
from fedstride.reproduce import store
from fedstride.reproduce.items import Cell, Item
from fedstride.reproduce.store import Found, points
from fedstride.scale.pool import Pool, hired
from fedstride.statistics import Run
from fedstride.together import Together, able, several

BESIDE = "vmap, side by side"  # how runs were made that shared a CPU
Watch = Callable[[str, Experiment, dict[str, Any]], None]


class Task(NamedTuple):
    """One run to be done."""

    cell: Cell
    point: dict[str, Any]
    experiment: Experiment

    def __str__(self) -> str:
        point = [f"{key}={value}" for key, value in self.point.items()]
        return " ".join([self.cell.row, self.cell.column, *point]).strip() + f", seed {self.experiment.seed}"


class Ended(NamedTuple):
    """A run that is over."""

    rows: list[dict[str, Any]]
    status: str
    backend: str
    wall: float


def play(
    item: Item, path: Path, folder: Path, seeds: int, watch: Watch = lambda *row: None, jobs: int | None = None,
    workers: Pool | None = None,
) -> Found:  # fmt: skip
    """Tune on the first seed where there is a grid, then run every seed; stored runs stay, half-done ones go on.

    jobs: runs side by side, in one batch where that is quicker, else in processes; None: as many as is good.
    workers: instead, whole runs on these, as long as there is one for each of them.
    """
    found = Found(item, path)
    if workers is not None:
        with hired(workers if any(missing(found, seeds)) else None) as pool:
            if pool is not None:
                _spread(found, folder.absolute(), seeds, watch, pool)
        return found
    planned = [task.experiment for task in missing(found, seeds)]
    if jobs != 1 and planned and all(map(able, planned)):  # also a single one: on a GPU it is compiled
        _together(found, folder, seeds, watch, jobs or several(planned))
        return found
    if jobs and jobs > 1:
        _side_by_side(found, folder, seeds, watch, jobs)
        return found
    for task in missing(found, seeds):
        _add(found, task, _run(task.experiment, folder, partial(watch, str(task), task.experiment)), folder)
    return found


def missing(found: Found, seeds: int) -> Iterator[Task]:
    """What can be run now: all points of a grid on seed 0, then the best one on the others, cell by cell."""
    for seed in range(seeds):
        for cell in sorted(found.item.cells, key=lambda cell: bool(cell.after)):  # those that wait for others last
            for point in points(cell) if seed == 0 else [found.winner(cell)]:
                if point is not None and found.get(cell, point, seed) is None:
                    experiment = found.planned(cell, point, seed)
                    if experiment is not None:
                        yield Task(cell, point, experiment)


def _together(found: Found, folder: Path, seeds: int, watch: Watch, jobs: int) -> None:
    """Runs as rows of one batch."""
    together, busy, idle = Together(), set(), 0

    def ready() -> list[Task]:
        return [task for task in missing(found, seeds) if _folder(task.experiment) not in busy]

    def work() -> None:
        nonlocal idle
        while (tasks := ready()) and not together.failed:
            if idle and len(tasks) > 1:
                return  # more can be done now than when the others had nothing left: all begin anew
            task = tasks[0]
            busy.add(_folder(task.experiment))
            shared = len(busy) > 1
            ended = _run(task.experiment, folder, partial(watch, str(task), task.experiment), together)
            if ended.backend == "vmap" and (shared or len(busy) > 1):
                ended = ended._replace(backend=BESIDE)
            _add(found, task, ended, folder)
            busy.discard(_folder(task.experiment))
        idle += 1

    while any(missing(found, seeds)):  # some can be planned only when others are over
        idle = 0
        together.play([work] * jobs)


def _side_by_side(found: Found, folder: Path, seeds: int, watch: Watch, jobs: int) -> None:
    """Runs in processes of their own, the cores shared out among them; this one stores what they give back."""
    threads = max(1, torch.get_num_threads() // jobs)
    context = multiprocessing.get_context("spawn")
    under_way: dict[Future[Ended], Task] = {}
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads,)) as pool:
        while True:
            busy = {_folder(task.experiment) for task in under_way.values()}
            for task in missing(found, seeds):
                if len(under_way) >= jobs:
                    break
                if _folder(task.experiment) not in busy:
                    under_way[pool.submit(_run, task.experiment, folder)] = task
                    busy.add(_folder(task.experiment))
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                task = under_way.pop(future)
                ended = future.result()
                watch(str(task), task.experiment, ended.rows[-1])
                _add(found, task, ended, folder)


def _spread(found: Found, folder: Path, seeds: int, watch: Watch, pool: Pool) -> None:
    """Whole runs on workers, as long as there is one for each; those left over share all workers."""
    from fedstride.scale.side import side_by_side  # needs Ray

    def call(task: Task) -> tuple:
        return _run, task.experiment, folder

    def seen(task: Task, row: dict[str, Any]) -> None:
        watch(str(task), task.experiment, row)

    while tasks := list({_folder(task.experiment): task for task in missing(found, seeds)}.values()):
        count = len(tasks) - len(tasks) % len(pool)
        for task, ended in side_by_side(pool, folder, tasks[:count], call, seen):
            _add(found, task, ended, folder)
        for task in tasks[count:]:
            own = partial(watch, str(task), task.experiment)
            _add(found, task, _run(task.experiment, folder, own, workers=pool), folder)


def _run(
    experiment: Experiment, folder: Path, progress: Any = False, together: Together | None = None,
    workers: Pool | None = None,
) -> Ended:  # fmt: skip
    start = time.perf_counter()
    result = experiment.run(folder / _folder(experiment), True, progress, together, workers)
    return Ended(result.rows, result.status, result.backend, time.perf_counter() - start)


def _add(found: Found, task: Task, ended: Ended, folder: Path) -> None:
    """Store what a run gave; its folder goes, or a later version of the code would take it for its own."""
    more = found.item.derive or (lambda row, experiment: {})
    rows = [row | more(row, task.experiment) for row in ended.rows]
    run = Run(task.experiment.seed, rows, ended.status)
    found.add(task.cell, task.point, task.experiment, run, ended.wall, ended.backend)
    shutil.rmtree(folder / _folder(task.experiment))


def _folder(experiment: Experiment) -> str:
    """A name that no other experiment has."""
    text = json.dumps(store.brief(experiment), sort_keys=True)
    return f"{experiment.method.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}/seed-{experiment.seed}"
