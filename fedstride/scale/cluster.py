"""The transport of a simulation whose jobs are trained by workers; clock, cohorts and bytes stay here.

Down travels a message, once for everybody; up come sums and scalars. Memories, and in asynchronous runs the uploads
that wait for the server, stay in the store of the machine where they were made (fedstride/scale/shelf.py).
"""

import secrets
from collections import namedtuple
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from torch import Tensor, nn

from fedstride.algorithm import Exchange
from fedstride.descent import Local
from fedstride.engine import Answers, Plan
from fedstride.losses import LossFunction
from fedstride.oracle import Oracle
from fedstride.replies import Reduced, Replies, finite, joined
from fedstride.sampling import Jobs, Sampler
from fedstride.scale.pool import Pool
from fedstride.scale.shelf import Place, Shelf, Stored, fetch, request, store
from fedstride.scale.team import Team
from fedstride.scale.worker import Brief, Part, Request, as_tensor, packed
from fedstride.simulator import Content, Simulator, Trained


class Remote(NamedTuple):
    """What a job gives, computed and not yet at the server: vectors elsewhere, the rest here."""

    upload: Place | None
    memory: Place | None
    train_loss: Tensor | None  # [1]
    used: bool
    bytes: int
    fields: tuple[str, ...]
    scalars: dict[str, Tensor]  # [1] each


def connect(
    pool: Pool, plan: Plan, model: nn.Module, loss: LossFunction, device: str, backend: str, chunk: int | None,
    oracle: Oracle, sampler: Sampler, local: Local, *rest: Any,
) -> tuple["Cluster", str]:  # fmt: skip
    """The transport of one run, and the workers' backend; what comes last is what `Simulator` takes, too."""
    clients = sampler.clients
    arrays = tuple(part.cpu().numpy() for part in (clients.inputs, clients.targets, clients.order))
    brief = Brief(
        secrets.token_hex(8), plan.algorithm, model, oracle.model.dtype, device, backend, loss,
        (oracle.each, oracle.reduction) if oracle.each else None, oracle.model.mixes_examples, oracle.model.pixels,
        ray.put(arrays), clients.sizes, sampler.batch_size, sampler.sampling, local, plan.weights, plan.seed, chunk,
    )  # fmt: skip
    team = Team(pool, brief, len(clients))
    return Cluster(team, plan, oracle, sampler, local, *rest, team.chunk), team.backend


class Cluster(Simulator):
    """As `Simulator`, with the jobs trained elsewhere."""

    def __init__(self, team: Team, plan: Plan, *settings: Any):
        method = plan.algorithm
        super().__init__(method, *settings)
        self._team, self._method = team, method
        self._weights, self._by_weight = plan.weights, plan.participation.by_weight
        x = self._oracle.model.x
        self._device, self._d = x.device, len(x)
        self.memories: Any = Shelf(method.init_client(x), x.device)
        self._refs: dict[int, Any] = {}  # of the models in asynchronous runs, by version
        self._version = 0  # newest model

    def _cohort(self, exchange: Exchange, message: Any, jobs: Jobs) -> Iterator[tuple[slice, Trained]]:
        if not len(jobs.clients):
            return
        everybody, by_weight = np.zeros(len(jobs.clients), dtype=np.int64), self._by_weight and not exchange.insist
        done, memory = self._ask(exchange, [ray.put(packed(message))], everybody, jobs, by_weight, keep=False)
        reduced = joined(
            [self._tensors(part.reduced, len(done) == 1) for _, part, _ in done], [rows for rows, _, _ in done]
        )
        losses, evaluations = None, np.empty(len(jobs.clients))
        for rows, part, _ in done:
            evaluations[rows] = part.evaluations
            if part.losses is not None:
                losses = np.empty(len(jobs.clients), part.losses.dtype) if losses is None else losses
                losses[rows] = part.losses
        loss = None if losses is None else torch.from_numpy(losses).to(self._device)
        yield slice(0, len(jobs.clients)), Trained(reduced, memory, loss, evaluations)

    def _ask(
        self, exchange: Exchange, models: list[Any], starts: np.ndarray, jobs: Jobs, by_weight: bool, keep: bool
    ) -> tuple[list[tuple[np.ndarray, Part, list[Place]]], list[Place]]:
        """Let the workers train; returns their parts with the places of kept uploads, and everybody's new memory."""
        place, homes = self._method.place(exchange), self.memories.places(jobs.clients)
        epochs = self._sampler.steps_per_epoch(jobs.clients)
        work = jobs.steps + self._extra * epochs if exchange.name == "train" else epochs

        def ask(worker: int, rows: np.ndarray) -> list[Any]:
            used, own = np.unique(starts[rows], return_inverse=True)
            wanted, objects = request([homes[row] for row in rows]) if homes else (None, [])
            order = Request(place, exchange.insist, jobs.take(rows), own, wanted, by_weight, keep)
            returns = 1 + keep + bool(homes)
            return self._team.call(worker, "train", returns, order, *(models[which] for which in used), *objects)

        self.batches, self.trained = self.batches + 1, self.trained + len(jobs.clients)
        done, memory = [], list(homes)
        for rows, worker, part, more in self._team.share(jobs.clients, work.astype(np.float64), ask):
            places = [
                [Place(stored, i) for i in range(len(rows))] for stored in (Stored(r, len(rows), worker) for r in more)
            ]
            if homes:
                for row, where in zip(rows, places.pop()):
                    memory[row] = where
            done.append((rows, part, places[0] if keep else []))
        return done, memory

    def _tensors(self, reduced: Reduced, copy: bool) -> Reduced:
        """As tensors: copies, or on the store's memory, which must not be written to, where they are summed anyway."""
        make: Any = torch.tensor if copy else as_tensor
        tables = ({name: make(value, device=self._device) for name, value in part.items()} for part in reduced[2:])
        return Reduced(reduced.used.copy(), reduced.bytes, *tables)

    def gather(self, exchange: Exchange, message: Any, version: int) -> Iterator[Answers]:
        self._version = version
        yield from super().gather(exchange, message, version)

    def _compute(self, exchange: Exchange, numbers: list[int], jobs: Jobs) -> None:
        self._refs = {version: ref for version, ref in self._refs.items() if version in self._messages}
        versions, starts = np.unique(jobs.versions, return_inverse=True)
        for version in versions.tolist():
            if version not in self._refs:
                self._refs[version] = ray.put(packed(self._messages[version]))
        models = [self._refs[version] for version in versions.tolist()]
        done, memory = self._ask(exchange, models, starts, jobs, self._by_weight, keep=True)
        for rows, part, uploads in done:
            reduced = self._tensors(part.reduced, copy=True)
            size = reduced.bytes // len(rows)
            for i, row in enumerate(rows):
                loss = None if part.losses is None else torch.from_numpy(part.losses[i : i + 1].copy()).to(self._device)
                scalars = {name: value[i : i + 1] for name, value in reduced.scalars.items()}
                self._contents[numbers[row]] = Remote(  # type: ignore[assignment]
                    uploads[i], memory[row] if memory else None, loss, bool(reduced.used[i]), size, part.fields, scalars
                )

    def _together(self, jobs: Jobs, contents: list[Any]) -> tuple[Any, Any]:
        used = np.array([content.used for content in contents])
        memory = [content.memory for content in contents] if contents[0].memory else ()
        chosen = [content for content in contents if content.used]
        size = sum(content.bytes for content in contents)
        if not chosen:
            return Reduced(used, size, {}, {}, {}), memory
        scalars = {name: torch.cat([content.scalars[name] for content in chosen]) for name in chosen[0].scalars}
        replies = Replies(
            self._weights, self._d, self._by_weight, self._method.needs_rows, self._version, self._method.factor,
            self._device,
        )  # fmt: skip
        factors, places = replies.factor_rows(jobs.take(used)), [content.upload for content in chosen]
        if self._method.needs_rows:
            rows = {name: torch.from_numpy(table).to(self._device) for name, table in fetch(places).items()}
            sums = {name: factors.to(value.dtype) @ value for name, value in rows.items()}
            return Reduced(used, size, scalars, rows, sums), memory

        def ask(worker: int, rows: np.ndarray) -> list[Any]:
            wanted, objects = request([places[row] for row in rows])
            return self._team.call(worker, "total", 1, factors.cpu().numpy()[:, rows], wanted, *objects)

        sums = {}
        for part in self._team.near(np.array([place.stored.worker for place in places]), ask):
            for name, value in part.result.items():
                more = torch.tensor(value, device=self._device)
                sums[name] = sums[name] + more if name in sums else more
        return Reduced(used, size, scalars, {}, sums), memory

    def _remember(self, answers: Answers, used: np.ndarray) -> None:
        self.memories.put(answers.jobs.clients[used], [answers.memory[row] for row in np.flatnonzero(used)])
        crowd = self.memories.crowd()
        clients, places = list(crowd), list(crowd.values())

        def ask(worker: int, rows: np.ndarray) -> list[Any]:
            wanted, objects = request([places[row] for row in rows])
            return self._team.call(worker, "gather", 2, wanted, *objects)

        for part in self._team.near(np.array([place.stored.worker for place in places]), ask) if crowd else []:
            stored = Stored(part.more[0], len(part.rows), part.worker)
            own = [clients[row] for row in part.rows]
            self.memories.put(np.array(own), [Place(stored, i) for i in range(len(own))])

    def _dump_contents(self) -> tuple:
        contents: list[Any] = list(self._contents.values())
        if not contents:
            return ()
        uploads = fetch([content.upload for content in contents])
        memories = self.memories.rows([content.memory for content in contents if content.memory])
        stored = []
        for row, (number, content) in enumerate(zip(self._contents, contents)):
            values = (
                torch.from_numpy(uploads[name][row : row + 1]) if name in uploads else content.scalars[name][:, None]
                for name in content.fields
            )
            upload = namedtuple("Upload", content.fields)(*values)
            memory = type(memories)(*(value[row : row + 1] for value in memories)) if memories else ()
            stored.append((number, upload, memory, content.train_loss))
        return tuple(stored)

    def _load_contents(self, contents: dict[int, Content]) -> None:
        if not contents:
            return
        uploads, memories = zip(*((content.upload, content.memory) for content in contents.values()))
        fields = uploads[0]._fields
        columns = {name: torch.cat(values) for name, values in zip(fields, zip(*uploads))}
        vectors = {name: value for name, value in columns.items() if value.shape[1] > 1 or self._d == 1}
        places = store({name: value.cpu().numpy() for name, value in vectors.items()}, len(contents))
        used = finite(uploads[0]._make(columns.values()), len(contents))
        homes: list[Any] = [None] * len(contents)
        if memories[0]:
            rows = {name: torch.cat(values).cpu().numpy() for name, values in zip(memories[0]._fields, zip(*memories))}
            homes = store(rows, len(contents))
        for row, (number, content) in enumerate(contents.items()):
            scalars = {name: value[row : row + 1, 0] for name, value in columns.items() if value.shape[1] == 1}
            self._contents[number] = Remote(  # type: ignore[assignment]
                places[row],
                homes[row],
                content.train_loss,
                bool(used[row]),
                self._wire.bytes(content.upload),
                fields,
                scalars,
            )
