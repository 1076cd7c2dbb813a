"""What travels and what it weighs: vectors in the run's own type, or rounded to float16; single numbers as they are."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstride.errors import FedstrideError
from fedstride.replies import Reduced

HALF = 65504.0  # the largest number of float16


def narrow(vector: Tensor) -> Tensor:
    """In float16; a finite number that does not fit becomes the largest that does."""
    return torch.where(torch.isfinite(vector), vector.clamp(-HALF, HALF), vector).to(torch.float16)


def single(value: Tensor) -> bool:
    """Whether a field is one number for every client."""
    return value.dim() == 0 or value.shape[-1] == 1


@dataclass(frozen=True)
class Wire:
    """The way between server and clients, for messages and uploads (NamedTuples of tensors, numbers and Nones)."""

    half: bool = False

    def carry(self, fields: Any) -> Any:
        """As it arrives at the other end."""
        if not self.half or not fields or isinstance(fields, Reduced):
            return fields
        rounded = [narrow(f).to(f.dtype) if isinstance(f, Tensor) and not single(f) else f for f in fields]
        return type(fields)(*rounded)

    def bytes(self, fields: Any) -> int:
        """Of the tensors in a message or upload."""
        if isinstance(fields, Reduced):
            return fields.bytes
        tensors = [value for value in fields or () if isinstance(value, Tensor)]
        return sum(v.numel() * (2 if self.half and not single(v) else v.element_size()) for v in tensors)


def make(kind: str | None) -> Wire:
    """By the type of numbers on it; None: the run's own."""
    if kind not in (None, "float16"):
        raise FedstrideError(f"wire must be 'float16' or None (the run's own type), not {kind!r}")
    return Wire(kind == "float16")
