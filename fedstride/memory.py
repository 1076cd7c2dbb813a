"""What clients remember between jobs: one table with a row a visited client."""

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

PAGE = 1 << 26  # bytes


def main_memory() -> int:
    """Bytes of main memory that the memories of fleets may take, where nobody says it: a quarter of the machine's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def as_rows(values: Any) -> Any:
    """A NamedTuple of tensors with a leading axis of one client: [d] -> [1, d], [] -> [1, 1]; the rest as it is."""
    if not values:
        return ()
    rows = [value.reshape(1, -1) if isinstance(value, Tensor) else value for value in values]
    return type(values)(*rows)


class Memories:
    """Rows of all visited clients, in pages; everybody else is still at the initial row.

    Pages are made where there is room: on the device, then in main memory, then in a file that is mapped into memory
    and that nobody else sees, so what a fleet remembers may be larger than the machine. They stay where they are: the
    system keeps those of the file that are in use in memory. `limit` is the main memory to be used, in GiB; None: a
    quarter of the machine's.
    """

    def __init__(self, initial: Any, limit: float | None = None):
        initial = as_rows(initial)
        self._type, self._limit = type(initial), limit
        self._begin(list(initial))

    def _begin(self, initial: list[Tensor]) -> None:
        self._initial = initial
        self._slots: dict[int, int] = {}
        self._pages: list[list[Tensor]] = []  # field by field, [rows of a page, ...] each
        if not initial:
            return
        device, limit = initial[0].device, self._limit
        self._bytes = sum(value.numel() * value.element_size() for value in self._initial)  # of a client
        self._rows = max(1, PAGE // self._bytes)
        main = main_memory() if limit is None else limit * (1 << 30)
        on_device = torch.cuda.mem_get_info(device)[1] // 4 if device.type == "cuda" else 0
        self._room = [(device, on_device), (torch.device("cpu"), main)]  # bytes that are left

    def get(self, clients: Any) -> Any:
        """The memories of some clients, [C, ...] each."""
        if not self._initial:
            return ()
        found = [value.repeat(len(clients), *[1] * (value.dim() - 1)) for value in self._initial]
        for page, rows, slots in self._places(clients):
            for value, table in zip(found, page):
                value[rows.to(value.device)] = table[slots.to(table.device)].to(value.device)
        return self._type(*found)

    def put(self, clients: Any, memory: Any) -> None:
        """Replace the memories of some clients."""
        if not self._initial:
            return
        for client in clients:
            self._slots.setdefault(int(client), len(self._slots))
        while len(self._slots) > len(self._pages) * self._rows:
            self._pages.append(self._page())
        for page, rows, slots in self._places(clients):
            for table, value in zip(page, memory):
                table[slots.to(table.device)] = value[rows.to(value.device)].to(table.device, table.dtype)

    def _places(self, clients: Any) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
        """Page by page, which of the clients have been visited, and in which rows of it they are."""
        slots = np.array([self._slots.get(int(client), -1) for client in clients], dtype=np.int64)
        for number in np.unique(slots[slots >= 0] // self._rows):
            rows = np.flatnonzero((slots >= 0) & (slots // self._rows == number))
            yield self._pages[number], torch.as_tensor(rows), torch.as_tensor(slots[rows] % self._rows)

    def _page(self) -> list[Tensor]:
        size = self._rows * self._bytes
        shapes = [(self._rows, *value.shape[1:]) for value in self._initial]
        for place, (device, left) in enumerate(self._room):
            if size <= left:
                self._room[place] = (device, left - size)
                pinned = device.type == "cpu" and self._initial[0].is_cuda
                return [
                    torch.empty(shape, dtype=value.dtype, device=device, pin_memory=pinned)
                    for shape, value in zip(shapes, self._initial)
                ]
        return [torch.from_numpy(_mapped(shape, value)) for shape, value in zip(shapes, self._initial)]

    def dump(self) -> tuple[list[int], dict[str, Tensor]]:
        """Visited clients in slot order, and their rows field by field, the initial row first."""
        everybody = self.get(self._slots)
        fields = getattr(self._type, "_fields", ())
        rows = {name: torch.cat([first, own]) for name, first, own in zip(fields, self._initial, everybody)}
        return list(self._slots), rows

    def load(self, clients: list[int], tables: dict[str, Tensor]) -> None:
        """Undo `dump`."""
        fields = getattr(self._type, "_fields", ())
        self._begin([tables[name][:1].to(old.device) for name, old in zip(fields, self._initial)])
        self.put(clients, [tables[name][1:] for name in fields])

    def here(self) -> "Memories":
        """In this process, where they are already."""
        return self


def _mapped(shape: tuple[int, ...], like: Tensor) -> np.ndarray:
    """An array in a file without a name, which goes when the array goes."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype=torch.empty(0, dtype=like.dtype).numpy().dtype, mode="w+", shape=shape)
