"""Local descent: what a cohort's steps change, and the algebra of one step once its gradient is known."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as trees

AUGMENT = 1 << 41  # key offset of the augmentation of mini-batches

Augment = Callable[[Tensor, Tensor], Tensor]  # (inputs [C, B, ...], keys [C]) -> inputs


@dataclass(frozen=True)
class Local:
    """Options of the local optimiser: a change of every client's steps that a method need not know of."""

    momentum: float = 0.0  # v <- momentum v + direction; y <- y - lr v; starts at zero in every job
    weight_decay: float = 0.0  # adds weight_decay * y to every gradient
    clip: float | None = None  # scales the gradients of local steps down to this norm
    augment: Augment | None = field(default=None, repr=False, compare=False)  # changes the inputs of mini-batches


class Moving(NamedTuple):
    """Clients on their way, one row each."""

    y: Tensor  # [C, d]
    lr: Tensor  # [C, 1]
    losses: Tensor  # [C]: sum over the steps
    velocity: Tensor  # [C, d] under momentum
    rows: tuple[Tensor, ...] = ()  # what the direction reads
    carry: Any = ()  # what the direction hands on from step to step; (): nothing

    @property
    def carries(self) -> bool:
        """Whether something is handed on."""
        return isinstance(self.carry, Tensor) or bool(self.carry)


def shifted(g: Tensor, y: Tensor, shift: Tensor) -> Tensor:
    """The direction of methods that correct gradients by a vector; one function, so that their runs step as one."""
    return g + shift


def shaped(local: Local, y: Tensor, g: Tensor) -> Tensor:
    """A gradient with the options of the local optimiser."""
    if local.clip is not None:
        g = g * (local.clip / g.norm(dim=1, keepdim=True)).clamp(max=1)
    return torch.add(g, y, alpha=local.weight_decay) if local.weight_decay else g


def move(direction: Callable[..., Any] | None, local: Local, at: Moving, g: Tensor) -> None:
    """One step along a gradient, in place."""
    g = shaped(local, at.y, g)
    if at.carries:
        step, new = direction(g, at.y, at.carry, *at.rows)  # type: ignore[misc]
        _store(at.carry, new)
    else:
        step = g if direction is None else direction(g, at.y, *at.rows)
    if local.momentum:
        step = at.velocity.mul_(local.momentum).add_(step)
    at.y.addcmul_(step, at.lr, value=-1)


def _store(old: Any, new: Any) -> None:
    """Write a new carry over the one it came from, unless it was updated in place."""
    pairs = [(a, b) for a, b in zip(trees.tree_leaves(old), trees.tree_leaves(new)) if a is not b]
    held = {a.untyped_storage()._cdata for a, _ in pairs}
    for a, b in [(a, b.clone() if b.untyped_storage()._cdata in held else b) for a, b in pairs]:  # moved among them
        a.copy_(b)


def cut(tree: Any, rows: slice, whole: int) -> Any:
    """Cut per-client tensors; what all clients share ([1, ...]) stays."""
    if isinstance(tree, tuple):
        parts = [cut(part, rows, whole) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree[rows] if isinstance(tree, Tensor) and tree.dim() and len(tree) == whole else tree


def active(steps: np.ndarray) -> list[int]:
    """For every step, how many clients (sorted, longest first) are still at work."""
    return np.searchsorted(-steps, -np.arange(int(steps[0])), side="left").tolist()
