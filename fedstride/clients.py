"""The fleet: every client's data, its size and its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fedstride.errors import FedstrideError
from fedstride.vector import KEPT


class Fleet(NamedTuple):
    """What a method may know of the fleet before the first round."""

    weights: Tensor  # [N], sum to one: the weight w_i of every client in the objective
    sizes: Tensor  # [N], examples a client holds

    @property
    def clients(self) -> int:
        """Number of clients N."""
        return len(self.sizes)


class Clients:
    """All clients' examples in one table; client i owns the rows `order[offsets[i]:offsets[i + 1]]`."""

    def __init__(self, inputs: Tensor, targets: Tensor, order: Tensor, sizes: Sequence[int] | np.ndarray):
        self.inputs = inputs
        self.targets = targets
        self.order = order
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        if len(self.sizes) == 0:
            raise FedstrideError("there are no clients; give at least one pair (inputs, targets)")
        for client in np.flatnonzero(self.sizes == 0):
            raise FedstrideError(f"client {client} has no data; every client needs at least one example")

    @classmethod
    def from_arrays(cls, pairs: Sequence[tuple[Any, Any]]) -> Clients:
        """One pair (inputs, targets) of arrays or tensors a client."""
        inputs: list[Tensor] = []
        targets: list[Tensor] = []
        for client, pair in enumerate(pairs):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise FedstrideError(f"client {client} must be a pair (inputs, targets)")
            try:
                a, b = (
                    part if isinstance(part, Tensor) else torch.as_tensor(np.require(part, requirements=["C", "W"]))
                    for part in pair
                )
            except (TypeError, ValueError, RuntimeError) as error:
                raise FedstrideError(f"client {client} has data that are not arrays of numbers: {error}") from None
            if a.dim() == 0 or b.dim() == 0 or len(a) != len(b):
                raise FedstrideError(
                    f"client {client} has inputs of shape {tuple(a.shape)} but targets of shape {tuple(b.shape)}; "
                    "the first dimensions must be equal"
                )
            if len(a) == 0:
                raise FedstrideError(f"client {client} has no data; every client needs at least one example")
            if inputs and (a.shape[1:] != inputs[0].shape[1:] or b.shape[1:] != targets[0].shape[1:]):
                raise FedstrideError(
                    f"client {client} has examples of shape {tuple(a.shape[1:])} -> {tuple(b.shape[1:])}, client 0 of "
                    f"{tuple(inputs[0].shape[1:])} -> {tuple(targets[0].shape[1:])}; all clients need the same"
                )
            for name, array in (("inputs", a), ("targets", b)):
                if array.is_floating_point() and not bool(torch.isfinite(array).all()):
                    raise FedstrideError(f"client {client} has NaN or infinity in its {name}")
            inputs.append(a)
            targets.append(b)
        if not inputs:
            raise FedstrideError("there are no clients; give at least one pair (inputs, targets)")
        sizes = [len(a) for a in inputs]
        return cls(torch.cat(inputs), torch.cat(targets), torch.arange(sum(sizes)), sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        return f"Clients({len(self)} clients, {self.sizes.sum()} examples of shape {tuple(self.inputs.shape[1:])})"

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one client."""
        rows = self.order[self.offsets[client] : self.offsets[client + 1]]
        return self.inputs[rows], self.targets[rows]

    def pooled(self) -> Clients:
        """The same examples in the hands of one client."""
        return Clients(self.inputs, self.targets, self.order, [int(self.sizes.sum())])

    def to(self, device: torch.device, dtype: torch.dtype) -> Clients:
        """The same clients on a device, floats as models in `dtype` take them, whole-number targets in int64."""
        dtype = KEPT.get(dtype, dtype)
        inputs = _there(self.inputs, device, dtype if self.inputs.is_floating_point() else self.inputs.dtype)
        targets = _there(self.targets, device, dtype if self.targets.is_floating_point() else torch.int64)
        return Clients(inputs, targets, _there(self.order, device, self.order.dtype), self.sizes)

    def fleet(self, weights: str, device: torch.device) -> Fleet:
        """Weights by data size or uniform, in float64 whatever the model's dtype, since means are compared."""
        if weights not in ("data", "uniform"):
            raise FedstrideError(f"weights must be 'data', 'uniform' or None (the method's own), not {weights!r}")
        share = self.sizes / self.sizes.sum() if weights == "data" else np.full(len(self), 1 / len(self))
        return Fleet(torch.as_tensor(share, device=device), torch.as_tensor(self.sizes, device=device))


_COPIES = WeakTensorKeyDictionary()  # a table -> {(device, dtype): how often it was changed, and the same there}


def _there(table: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A table on a device; runs on the same data share one copy, which goes when the table goes."""
    if table.device == device and table.dtype == dtype:
        return table
    copies, changed = _COPIES.setdefault(table, {}), table._version
    if copies.get((device, dtype), (None,))[0] != changed:
        copies[device, dtype] = changed, table.to(device, dtype)
    return copies[device, dtype][1]
