"""The transport of a simulation: trains jobs in batches on one device, in virtual time."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstride.algorithm import Algorithm, Exchange
from fedstride.courses import Course, Job
from fedstride.descent import Local
from fedstride.engine import Answers
from fedstride.errors import FedstrideError
from fedstride.keys import job_keys
from fedstride.memory import Memories, as_rows
from fedstride.oracle import Oracle
from fedstride.sampling import Jobs, Sampler
from fedstride.schedule import Deadline, Schedule
from fedstride.train import Work
from fedstride.wire import Wire
from fedstride.world import Pace


class Content(NamedTuple):
    """What a job gives: computed, and not yet at the server."""

    upload: Any  # NamedTuples of [1, ...] tensors
    memory: Any
    train_loss: Tensor | None  # [1]


class Trained(NamedTuple):
    """What some clients did together."""

    upload: Any  # NamedTuples of [C, ...] tensors; elsewhere than here, Reduced and where the memories are
    memory: Any
    train_loss: Tensor | None  # [C]
    evaluations: np.ndarray  # [C]: gradients, in mini-batches


def train(
    oracle: Oracle, sampler: Sampler, local: Local, seed: int, exchange: Exchange, message: Any, jobs: Jobs, memory: Any
) -> Trained:
    """Let some clients, longest jobs first, do their part of an exchange together."""
    work = Work(oracle, sampler, jobs, job_keys(seed, exchange.name, *jobs[:3], oracle.model.x.device), local)
    given = exchange.client(work, message, memory)
    if not isinstance(given, tuple) or len(given) != 2 or not all(_fields(part) for part in given):
        raise FedstrideError(
            f"the client half of the exchange {exchange.name!r} must return an upload and a memory, each a NamedTuple "
            f"of tensors or (), not {type(given).__name__}"
        )
    return Trained(*given, work.train_loss, work.evaluations)


def _fields(part: Any) -> bool:
    """Whether it is a NamedTuple, or nothing."""
    return isinstance(part, tuple) and (not part or hasattr(part, "_fields"))


class Simulator:
    """Trains cohorts, or in an asynchronous run whatever is under way, in batches."""

    def __init__(
        self,
        algorithm: Algorithm,
        oracle: Oracle,
        sampler: Sampler,
        local: Local,
        seed: int,
        pace: Pace,
        schedule: Schedule,
        plan_job: Callable[[int, int], tuple[int, int, float]],
        wire: Wire,
        chunk: int,
        memory: float | None = None,
    ):
        self._oracle, self._sampler, self._local, self._chunk, self._seed = oracle, sampler, local, chunk, seed
        self._pace, self._extra = pace, algorithm.full_gradients
        self._needs_all = algorithm.name if algorithm.full_only else ""
        self._schedule, self._plan_job, self._wire = schedule, plan_job, wire
        self.now, self.sent = 0.0, 0
        self.memories = Memories(algorithm.init_client(oracle.model.x), memory)
        self.batches = self.trained = 0  # how often jobs were trained together, and how many jobs in all
        self.course: Course | None = None
        self._bytes = (0, 0)  # of a message and an upload, which the course's costs come from
        self._messages: dict[int, Any] = {}  # by version, as long as a job may start from it
        self._kept = 4  # models kept when they were last looked through
        self._contents: dict[int, Content] = {}  # by number of the job
        self._rejections = 0  # since the newest model was published
        self.refused: set[int] = set()  # clients whose updates were rejected since one was used

    @torch.no_grad()
    def ask(self, exchange: Exchange, message: Any, jobs: Jobs, deadline: Deadline | None = None) -> Iterator[Answers]:
        """Train the cohort, longest jobs first, so that clients of similar length train together."""
        asked = len(jobs.clients)
        self.sent += asked
        jobs = jobs if exchange.insist else self._present(jobs)
        cut = deadline.seconds if deadline is not None and exchange.name == "train" else None
        down = self._pace.transfer(jobs, self._wire.bytes(message), "down")
        late = np.zeros(len(jobs.clients), dtype=bool)
        if deadline is not None and cut is not None:
            room = cut - down - self._pace.compute(jobs, self._extra * self._sampler.steps_per_epoch(jobs.clients))
            done = self._pace.steps_within(jobs, room)
            late = done < jobs.steps
            if deadline.late == "drop":
                done = np.where(late, 0, done)
            whole = len(done) == len(self._sampler.clients)
            if deadline.late == "drop" and whole and not done.any() and not self.trained:  # else steps differ by round
                raise FedstrideError(
                    f"at virtual second {self.now:g} no client of the fleet can finish its steps within the deadline "
                    f"of {cut:g} s; give more time, fewer steps, or late='cut'"
                )
            if not done.any() and not self._possible(cut, self._wire.bytes(message)):
                raise FedstrideError(
                    f"no client of the fleet can fetch the model and do a single step within the deadline of {cut:g} "
                    "s; give more time"
                )
            if self._needs_all and not done.all():
                raise FedstrideError(
                    f"client {jobs.clients[done == 0][0]} cannot do a single step within the deadline of {cut:g} s, "
                    f"and {self._needs_all} needs every client in every round; give more time"
                )
            jobs, down, late = (jobs._replace(steps=done).take(done > 0), down[done > 0], late[done > 0])
        end = self.now
        if cut is not None and (late.any() or len(jobs.clients) < asked):
            end = self.now + cut  # the server waits for the missing until the deadline
        order = np.argsort(-jobs.steps, kind="stable")
        jobs, down, late = jobs.take(order), down[order], late[order]
        for rows, trained in self._cohort(exchange, as_rows(message), jobs):
            part = jobs.take(rows)
            ready = down[rows] + self._pace.compute(part, trained.evaluations)
            if cut is not None:
                ready = np.where(late[rows], cut, ready)
            size = self._wire.bytes(trained.upload) / len(part.clients)
            arrival = ready + self._pace.transfer(part, size, "up")
            end = max(end, float((self.now + arrival).max()))
            spans = self.now + np.stack([down[rows], ready, arrival], axis=1)
            yield Answers(part, trained.upload, trained.memory, trained.train_loss, spans)
        self.now = end

    def _present(self, jobs: Jobs) -> Jobs:
        """Those who will answer; where none of them is there, the server waits for the first to come back."""
        there = self._pace.answers(jobs, self.now)
        later = self.now if there.any() else self._pace.wake(jobs, self.now)
        if later == float("inf"):
            if self._pace.forsaken(self.now):
                raise FedstrideError(
                    f"at virtual second {self.now:g} no client of the fleet is there, and none is known to come back"
                )
        elif later > self.now:
            self.now = later
            there = self._pace.answers(jobs, self.now)
        return jobs.take(there)

    def _possible(self, cut: float, bytes_: float) -> bool:
        """Whether some client of the fleet can do a step within a deadline."""
        ids, ones = np.arange(len(self._sampler.clients)), np.ones(len(self._sampler.clients), dtype=np.int64)
        fleet = Jobs(ids, ones, ones, ones, ones, ones, ones)
        extra = self._pace.compute(fleet, self._extra * self._sampler.steps_per_epoch(ids))
        return bool(self._pace.steps_within(fleet, cut - self._pace.transfer(fleet, bytes_, "down") - extra).any())

    def _cohort(self, exchange: Exchange, message: Any, jobs: Jobs) -> Iterator[tuple[slice, Trained]]:
        """Which rows were trained, and what they gave; chunk by chunk."""
        for start in range(0, len(jobs.clients), self._chunk):
            rows = slice(start, start + self._chunk)
            yield rows, self._train(exchange, message, jobs.take(rows))

    def _train(self, exchange: Exchange, message: Any, jobs: Jobs) -> Trained:
        self.batches, self.trained = self.batches + 1, self.trained + len(jobs.clients)
        own = (self._oracle, self._sampler, self._local, self._seed)
        return train(*own, exchange, message, jobs, self.memories.get(jobs.clients))

    @torch.no_grad()
    def gather(self, exchange: Exchange, message: Any, version: int) -> Iterator[Answers]:
        """Replies in the order of their arrival, until the server acts.

        The content of a reply is computed when it arrives, together with everything else that is under way and certain
        to arrive. Replies are handed over in groups: before anything is trained, because memories must count by then,
        and when the server acts.
        """
        course, message = self.course or self._open(exchange, message), as_rows(message)
        sent, everyone = course.sent, len(self._sampler.clients)
        # Models read from a checkpoint have the right fields; here they get the method's own type back.
        self._messages = {v: type(message)(*kept) for v, kept in self._messages.items()} | {version: message}
        course.publish(version)
        self._prune(course)
        arrived: list[tuple[int, float]] = []
        heard: set[int] = set()  # whose updates have arrived since one was used for certain
        self._rejections = 0
        while not course.closed and len(self.refused) < everyone:
            number = course.advance()
            if number is None:
                yield from self._settle(course, arrived)
                if self._rejections:
                    break  # all others wait for a new model: the server acts on what it has
                raise FedstrideError(f"at virtual second {course.clock.now:g} {course.stalled()}")
            if number not in self._contents:
                yield from self._settle(course, arrived)
                self._train_ahead(exchange, course, number)
            if not arrived:
                heard = set(self.refused)
            arrived.append((number, course.clock.now))
            heard.add(course.jobs[number].client)
            if course.closed or len(heard) >= everyone:  # all may turn out to be refused, and then nothing follows
                yield from self._settle(course, arrived)
        self.now = course.clock.now
        self.sent += course.sent - sent

    def _settle(self, course: Course, arrived: list[tuple[int, float]]) -> Iterator[Answers]:
        """Hand over what has arrived; rejected replies do not count, so the schedule may go on."""
        if arrived:
            before = self._rejections
            yield self._hand_over(course, arrived)
            course.refuse(self._rejections - before)
            arrived.clear()

    def _prune(self, course: Course) -> None:
        """Forget models from which no job will be computed any more; not every time, since all jobs are looked at."""
        if len(self._messages) <= 2 * self._kept:
            return
        waiting = {job.version for number, job in course.jobs.items() if number not in self._contents}
        self._messages = {v: kept for v, kept in self._messages.items() if v in waiting or v in course.versions}
        self._kept = max(4, len(self._messages))

    def _open(self, exchange: Exchange, message: Any) -> Course:
        """Begin the course: its costs need the bytes that travel, so client 0 shows once what an upload is."""
        steps = np.ones(1, dtype=np.int64)
        batches, trained = self.batches, self.trained
        once = Jobs(0 * steps, 0 * steps, 0 * steps, steps, steps, 1e-9 * steps, steps)
        shown = self._train(exchange, as_rows(message), once)
        self.batches, self.trained = batches, trained
        self._bytes = (self._wire.bytes(message), self._wire.bytes(shown.upload))
        self.course = self._make_course()
        return self.course

    def _make_course(self) -> Course:
        extra = self._extra * self._sampler.steps_per_epoch(np.arange(len(self._sampler.clients)))
        return self._schedule.course(self._pace.costs(*self._bytes, extra), self._plan_job, self._seed, self.now)

    def _train_ahead(self, exchange: Exchange, course: Course, number: int) -> None:
        """Train a job and, with it, those that are certain to be needed, as many as fit."""
        others = [other for other in course.needed if other not in self._contents]
        others.sort(key=lambda other: course.jobs[other].end)
        numbers = [number, *others[: self._chunk - 1]]
        numbers.sort(key=lambda other: -course.jobs[other].steps)
        self._compute(exchange, numbers, columns([course.jobs[other] for other in numbers]))

    def _compute(self, exchange: Exchange, numbers: list[int], jobs: Jobs) -> None:
        """Train jobs together that may start from different models, and keep what they give."""
        message = stacked([self._messages[version] for version in jobs.versions.tolist()], self._oracle.model.x)
        done = self._train(exchange, message, jobs)
        losses = None if done.train_loss is None else done.train_loss.cpu()
        for row, number in enumerate(numbers):
            # Copies, so that a late result does not keep all of its batch in memory.
            own = [
                type(part)(*(value[row : row + 1].clone() for value in part)) if part else ()
                for part in (done.upload, done.memory)
            ]
            self._contents[number] = Content(own[0], own[1], None if losses is None else losses[row : row + 1])

    def _hand_over(self, course: Course, arrived: list[tuple[int, float]]) -> Answers:
        """The contents of some jobs as one group of replies."""
        jobs = [course.jobs[number] for number, _ in arrived]
        contents = [self._contents[number] for number, _ in arrived]
        times = np.array([course.times(number) for number, _ in arrived])
        spans = np.array([(job.start, job.end, time) for job, (_, time) in zip(jobs, arrived)])
        for number, _ in arrived:
            course.release(number)
            if number not in course.jobs:
                del self._contents[number]
        table = columns(jobs, times)
        losses = [content.train_loss for content in contents if content.train_loss is not None]
        return Answers(table, *self._together(table, contents), torch.cat(losses) if losses else None, spans)

    def _together(self, jobs: Jobs, contents: list[Content]) -> tuple[Any, Any]:
        """Uploads and memories of several jobs."""
        upload, memory = (
            type(parts[0])(*(torch.cat(values) for values in zip(*parts))) if parts[0] else ()
            for parts in zip(*((content.upload, content.memory) for content in contents))
        )
        return upload, memory

    def keep(self, answers: Answers, used: np.ndarray) -> None:
        """Memories of used uploads become the clients' own; the others stay as they were."""
        self._rejections += int((~used).sum())
        since = used.nonzero()[0][-1] + 1 if used.any() else 0
        self.refused = (set() if used.any() else self.refused) | set(answers.jobs.clients[since:].tolist())
        if answers.memory and used.any():
            self._remember(answers, used)

    def _remember(self, answers: Answers, used: np.ndarray) -> None:
        mask = torch.as_tensor(used, device=self._oracle.model.x.device)
        self.memories.put(answers.jobs.clients[used], [value[mask] for value in answers.memory])

    def gone(self) -> list[tuple[Job, str]]:
        """Jobs of an asynchronous run that never reached the server."""
        if self.course is None:
            return []
        gone, self.course.gone = self.course.gone, []
        if gone:  # what was resent before it was overwritten has been computed
            self._contents = {number: kept for number, kept in self._contents.items() if number in self.course.jobs}
        return gone

    def under_way(self) -> list[Job]:
        """Jobs of an asynchronous run that have started and not reached the server."""
        return [] if self.course is None else [job for job in self.course.jobs.values() if job.start <= self.now]

    def dump(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain data and tensors."""
        stored: dict[str, Any] = {"batches": self.batches, "trained": self.trained, "refused": sorted(self.refused)}
        if self.course is not None:
            stored |= {"course": self.course.dump(), "bytes": list(self._bytes), "contents": self._dump_contents()}
            stored["messages"] = tuple(self._messages.items())
        return stored

    def load(self, stored: dict[str, Any], now: float) -> None:
        """Undo `dump`."""
        self.now, self.batches, self.trained = now, stored["batches"], stored["trained"]
        self.refused = set(stored["refused"])
        if "course" in stored:
            self._bytes = (stored["bytes"][0], stored["bytes"][1])
            self.course = self._make_course()
            self.course.load(stored["course"])
            self._load_contents({number: Content(*content) for number, *content in stored["contents"]})
            self._messages = dict(stored["messages"])

    def _dump_contents(self) -> tuple:
        return tuple((number, *content) for number, content in self._contents.items())

    def _load_contents(self, contents: dict[int, Content]) -> None:
        self._contents = contents


def stacked(messages: list, like: Tensor) -> Any:
    """Several messages, one row each, as one; numbers that differ become a column."""
    first = messages[0]
    if all(message is first for message in messages):
        return first

    def field(values: tuple) -> Any:
        if isinstance(values[0], Tensor):
            return torch.cat(values)
        return values[0] if all(value == values[0] for value in values) else like.new_tensor(values)[:, None]

    return type(first)(*(field(values) for values in zip(*messages)))


def columns(jobs: list[Job], times: np.ndarray | None = None) -> Jobs:
    """Jobs one after the other as columns."""
    table = [(job.client, job.version, job.repeat, job.target, job.steps) for job in jobs]
    clients, versions, repeats, targets, steps = np.array(table, dtype=np.int64).reshape(-1, 5).T
    lr = np.array([job.lr for job in jobs])
    return Jobs(
        clients, versions, repeats, targets, steps, lr, np.ones(len(jobs), dtype=np.int64) if times is None else times
    )
