"""What clients remember between jobs: one table with a row a visited client."""

from typing import Any

import torch
from torch import Tensor


def as_rows(values: Any) -> Any:
    """A NamedTuple of tensors with a leading axis of one client: [d] -> [1, d], [] -> [1, 1]; the rest as it is."""
    if not values:
        return ()
    rows = [value.reshape(1, -1) if isinstance(value, Tensor) else value for value in values]
    return type(values)(*rows)


class Memories:
    """Rows of all visited clients; everybody else is still at the initial row, which is row 0."""

    def __init__(self, initial: Any):
        initial = as_rows(initial)
        self._type = type(initial)
        self._slots: dict[int, int] = {}
        self._tables = list(initial)

    def _slot(self, clients: Any) -> list[int]:
        return [self._slots.get(int(client), 0) for client in clients]

    def get(self, clients: Any) -> Any:
        """The memories of some clients, [C, ...] each."""
        if not self._tables:
            return ()
        slots = torch.tensor(self._slot(clients), device=self._tables[0].device)
        return self._type(*(table[slots] for table in self._tables))

    def put(self, clients: Any, memory: Any) -> None:
        """Replace the memories of some clients."""
        if not self._tables:
            return
        for client in clients:
            self._slots.setdefault(int(client), len(self._slots) + 1)
        needed = len(self._slots) + 1
        if needed > len(self._tables[0]):
            room = max(needed, 2 * len(self._tables[0]))
            self._tables = [torch.cat([t, t.new_zeros(room - len(t), *t.shape[1:])]) for t in self._tables]
        slots = torch.tensor(self._slot(clients), device=self._tables[0].device)
        for table, value in zip(self._tables, memory):
            table[slots] = value.to(table.dtype)

    def dump(self) -> tuple[list[int], dict[str, Tensor]]:
        """Visited clients in slot order, and their rows field by field, the initial row first."""
        used = len(self._slots) + 1
        fields = getattr(self._type, "_fields", ())
        return list(self._slots), {name: table[:used] for name, table in zip(fields, self._tables)}

    def load(self, clients: list[int], tables: dict[str, Tensor]) -> None:
        """Undo `dump`."""
        self._slots = {client: slot for slot, client in enumerate(clients, start=1)}
        fields = getattr(self._type, "_fields", ())
        self._tables = [tables[name].to(old.device) for name, old in zip(fields, self._tables)]

    def here(self) -> "Memories":
        """In this process, where they are already."""
        return self
