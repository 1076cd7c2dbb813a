"""Gradients that are products of matrices, added to the parameters while they are made: see fedstride/tracing.py."""

import torch
from torch import Tensor

LONGEST = 64  # sums, in which the kernel is known to be as quick as memory allows
CLIENTS = 65_535  # that a CUDA program can have


@torch.library.custom_op("fedstride::add_product", mutates_args=("y",))
def add_product(y: Tensor, lr: Tensor, a: Tensor, b: Tensor, shift: Tensor | None, decay: float) -> None:
    """y <- y - lr (a b + decay y + shift) with y and shift [C, O I], lr [C, 1], a [C, O, K], b [C, K, I]."""
    if y.is_cuda and y.dtype == torch.float32 and _rounded(a) and a.shape[2] <= LONGEST and len(y) <= CLIENTS:
        from fedstride.kernels import add

        return add(y, lr, a, b, shift, decay)
    if decay:
        y.addcmul_(y, lr, value=-decay)
    if shift is not None:
        y.addcmul_(shift, lr, value=-1)
    y.view(len(y), a.shape[1], b.shape[2]).baddbmm_(a.to(y.dtype) * -lr[..., None], b.to(y.dtype))
    return None


def _rounded(a: Tensor) -> bool:
    """Whether products of such matrices are made by tensor cores."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return a.dtype == torch.bfloat16 or (a.dtype == torch.float32 and tf32)
