"""Losses: callables (outputs, targets) -> scalar.

A loss that can also be asked for its value per example may be masked and chunked, which lets clients with different
batch sizes share one call. `per_example` finds out which losses those are; all others see whole, unpadded batches.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstride.errors import FedstrideError

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss given per example, with its reduction over the batch ("mean" or "sum")."""

    each: LossFunction
    reduction: str = "mean"
    labels: tuple[float, ...] = ()  # the only targets it makes sense for; (): any

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise FedstrideError(f"a loss's reduction must be 'mean' or 'sum', not {self.reduction!r}")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        values = self.each(outputs, targets)
        return values.mean() if self.reduction == "mean" else values.sum()


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets.view_as(outputs)).square().reshape(outputs.shape[0], -1).sum(1)


def _half_squared_hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (1 - targets * outputs.view_as(targets)).clamp(min=0).square()


def _half_squared_parity(outputs: Tensor, targets: Tensor) -> Tensor:
    return _half_squared_hinge(outputs, 1 - 2 * (targets % 2))


cross_entropy = Loss(_cross_entropy)
"""Softmax cross-entropy with integer targets, mean over the batch."""
least_squares = Loss(_half_square)
"""Half the squared error, mean over the batch."""
least_squares_sum = Loss(_half_square, "sum")
"""Half the squared error, summed: 1/2 ||A x - b||^2."""
squared_hinge = Loss(_half_squared_hinge, labels=(-1, 1))
"""Half the squared hinge, 1/2 max(0, 1 - y s)^2 for one score s and a label y of -1 or +1, mean over the batch: the
loss of FedVeca's squared SVM, whose regulariser is the run's weight_decay."""
parity_hinge = Loss(_half_squared_parity)
"""The same for labels that are whole numbers: even ones count as +1, odd ones as -1."""


def per_example(
    loss: LossFunction, outputs: Tensor, targets: Tensor, all_targets: Tensor
) -> tuple[LossFunction, str] | None:
    """Return (loss per example, reduction) when `loss` is its reduction of that, else None.

    An attribute called `reduction` proves little: class weights and ignored targets make torch's mean a weighted one,
    so a torch loss with either is not taken apart; the claim is checked on real outputs besides.
    """
    reduction = getattr(loss, "reduction", None)
    if reduction not in ("mean", "sum"):
        return None
    each: LossFunction
    if isinstance(loss, Loss):
        each = loss.each
        if loss.labels:
            known = torch.isin(all_targets.double(), all_targets.new_tensor(loss.labels, dtype=torch.float64))
            for label in all_targets[~known][:1].tolist():
                raise FedstrideError(f"the loss is for labels {loss.labels}, but a client has {label}")
    else:
        ignored = getattr(loss, "ignore_index", None)
        if ignored is not None and bool((all_targets == ignored).any()):
            return None
        if any(getattr(loss, name, None) is not None for name in ("weight", "pos_weight")):
            return None
        whole = copy.copy(loss)
        whole.reduction = "none"  # type: ignore[attr-defined]

        def each(outputs: Tensor, targets: Tensor) -> Tensor:
            values = whole(outputs, targets)
            if values.dim() < 2:
                return values
            return values.flatten(1).mean(1) if reduction == "mean" else values.flatten(1).sum(1)

    try:
        values = each(outputs, targets)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if values.shape != (len(targets),):
        return None
    reduced = values.mean() if reduction == "mean" else values.sum()
    return (each, reduction) if torch.allclose(reduced, loss(outputs, targets), rtol=1e-4) else None


def check_scalar(loss: LossFunction, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a loss that does not give one number for these outputs and targets."""
    if not callable(loss) or isinstance(loss, type):
        raise FedstrideError(
            f"loss must be a function (outputs, targets), such as fs.losses.cross_entropy, not {loss!r}"
        )
    try:
        value = loss(outputs, targets)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise FedstrideError(
            f"the loss cannot take outputs of shape {tuple(outputs.shape)} with targets of shape "
            f"{tuple(targets.shape)} and type {targets.dtype}: {str(error).splitlines()[0]}"
        ) from None
    if not isinstance(value, Tensor) or value.dim() != 0:
        raise FedstrideError("the loss must return a scalar tensor for (outputs, targets)")
