"""Gradients that are products of matrices, added to the parameters while they are made: see fedstride/tracing.py."""

import torch
from torch import Tensor


@torch.library.custom_op("fedstride::add_product", mutates_args=("y",))
def add_product(y: Tensor, lr: Tensor, a: Tensor, b: Tensor, shift: Tensor | None, decay: float) -> None:
    """y <- y - lr (a b + decay y + shift) with y and shift [C, O I], lr [C, 1], a [C, O, K], b [C, K, I]."""
    if y.is_cuda and y.dtype == torch.float32:
        from fedstride.kernels import add

        return add(y, lr, a, b, shift, decay)
    return move_rows(y, lr, torch.bmm(a.to(y.dtype), b.to(y.dtype)).flatten(1), shift, decay)


def move_rows(y: Tensor, lr: Tensor, gradient: Tensor, shift: Tensor | None, decay: float) -> None:
    """The same with a gradient that is there already."""
    if decay:
        gradient = torch.add(gradient, y, alpha=decay)
    y.addcmul_(gradient if shift is None else gradient + shift, lr, value=-1)
