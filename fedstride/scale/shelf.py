"""Rows of clients in Ray's object store: they stay on the machine where they were made, and outlive their worker.

The driver owns every object and knows which row of which belongs to whom; an object goes when nobody's row is in it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from torch import Tensor

from fedstride.memory import Memories, as_rows
from fedstride.scale.worker import Columns, Pick, pick

CROWDED = 2  # rows in the store for one that is still somebody's, before the others are cleared away
SELDOM = 64  # rows put before anybody looks


class Stored:
    """One object: tables with a row a client, and the worker whose machine holds it (-1: the driver's)."""

    def __init__(self, ref: Any, count: int, worker: int):
        self.ref, self.count, self.worker = ref, count, worker


class Place(NamedTuple):
    """Where a client's row is."""

    stored: Stored
    row: int


def request(places: Sequence[Place]) -> tuple[Pick, list[Any]]:
    """How a worker finds these rows, and the objects to send along."""
    objects: dict[Stored, int] = {}
    which = [objects.setdefault(place.stored, len(objects)) for place in places]
    rows = [place.row for place in places]
    return Pick(np.array(which, dtype=np.int64), np.array(rows, dtype=np.int64)), [stored.ref for stored in objects]


def fetch(places: Sequence[Place]) -> Columns:
    """The rows themselves, here."""
    wanted, refs = request(places)
    return pick(ray.get(refs), wanted)


def store(columns: Columns, count: int) -> list[Place]:
    """Put rows that are here into the store."""
    stored = Stored(ray.put(columns), count, -1)
    return [Place(stored, row) for row in range(count)]


class Shelf:
    """What clients remember, as `Memories`, with the rows elsewhere."""

    def __init__(self, initial: Any, device: torch.device):
        initial = as_rows(initial)
        self._type, self._device = type(initial), device
        self._fields = getattr(self._type, "_fields", ())
        self._places: dict[int, Place] = {}  # of visited clients, in the order of their first visit
        self._new = 0  # rows put since somebody looked for those that are nobody's
        self._set_initial({name: value.cpu().numpy() for name, value in zip(self._fields, initial)})

    def _set_initial(self, columns: Columns) -> None:
        self._initial = store(columns, 1)[0] if columns else None

    def places(self, clients: Iterable[int]) -> list[Place]:
        """Where these clients' memories are; none for a method without."""
        if self._initial is None:
            return []
        return [self._places.get(int(client), self._initial) for client in clients]

    def put(self, clients: np.ndarray, places: Sequence[Place]) -> None:
        """From now on these are the memories of these clients."""
        self._places.update(zip(clients.tolist(), places))
        self._new += len(places)

    def crowd(self) -> dict[int, Place]:
        """The rows to be moved so that objects that are mostly nobody's can go; looked for only now and then."""
        if self._new <= max(SELDOM, len(self._places)):
            return {}
        self._new = 0
        used: dict[Stored, int] = {}
        for place in self._places.values():
            used[place.stored] = used.get(place.stored, 0) + 1
        thin = {stored for stored, rows in used.items() if CROWDED * rows < stored.count}
        return {client: place for client, place in self._places.items() if place.stored in thin}

    def get(self, clients: Iterable[int]) -> Any:
        """The memories of some clients, [C, ...] each, brought here."""
        return self.rows(self.places(clients))

    def rows(self, places: Sequence[Place]) -> Any:
        """The rows at these places, brought here."""
        if not places:
            return ()
        columns = fetch(places)
        return self._type(*(torch.from_numpy(columns[name]).to(self._device) for name in self._fields))

    def dump(self) -> tuple[list[int], dict[str, Tensor]]:
        """Visited clients, and their rows field by field, the initial row first."""
        if self._initial is None:
            return list(self._places), {}
        columns = fetch([self._initial, *self._places.values()])
        return list(self._places), {name: torch.from_numpy(columns[name]) for name in self._fields}

    def load(self, clients: list[int], tables: dict[str, Tensor]) -> None:
        """Undo `dump`."""
        if self._initial is None:
            return
        columns = {name: tables[name].cpu().numpy() for name in self._fields}
        self._set_initial({name: value[:1] for name, value in columns.items()})
        rows = store({name: value[1:] for name, value in columns.items()}, len(clients))
        self._places = dict(zip(clients, rows))

    def here(self) -> Memories:
        """All of it in this process."""
        tables = Memories(self._type(*(torch.zeros(1) for _ in self._fields)) if self._fields else ())
        tables.load(*self.dump())
        return tables
