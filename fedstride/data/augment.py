"""Random changes of the images in mini-batches, on the device, drawn by key.

An augmentation is a function (inputs [C, B, ...], keys [C]) -> inputs of the same shape, for C clients at once. What it
does to an example must depend on nothing but that example, the client's key and the position in the batch: then a run
is the same on every backend and however its clients are chunked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedstride.errors import FedstrideError
from fedstride.inputs import whole
from fedstride.keys import below, fold


@dataclass(frozen=True)
class CropFlip:
    """A random window of the padded image, mirrored half of the time."""

    padding: int
    fill: tuple[float, ...]

    def __call__(self, inputs: Tensor, keys: Tensor) -> Tensor:
        """New images for a block of mini-batches [C, B, channels, height, width]."""
        if inputs.dim() != 5 or len(self.fill) not in (1, inputs.shape[2]):
            raise FedstrideError(
                f"crop_flip(fill={self.fill}) needs images [channels, height, width] and one fill in all or one a "
                f"channel; the clients' examples have shape {tuple(inputs.shape[2:])}"
            )
        batch, channels, height, width = inputs.shape[1:]
        # Two draws an example; the mirror takes the lowest bit of the first, which a number below a bound does not use.
        own = fold(keys[:, None, None], torch.arange(2 * batch, device=inputs.device).view(batch, 2))
        up, left = below(own, torch.full_like(own, 2 * self.padding + 1))[..., None].unbind(2)
        rows = up + torch.arange(-self.padding, height - self.padding, device=inputs.device)  # [C, B, height]
        columns = left + torch.arange(-self.padding, width - self.padding, device=inputs.device)  # [C, B, width]
        columns = torch.where((own[..., :1] & 1).bool(), columns.flip(-1), columns)
        row, column = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        inside = (row == rows)[..., None] & (column == columns)[..., None, :]
        source = (row[..., None] * width + column[..., None, :]).flatten(2)[:, :, None].expand(-1, -1, channels, -1)
        moved = inputs.flatten(3).gather(3, source).view_as(inputs)
        return torch.where(inside[:, :, None], moved, _colour(self.fill, inputs.dtype, inputs.device))


@lru_cache
def _colour(fill: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(fill, dtype=dtype, device=device).view(-1, 1, 1)


def crop_flip(padding: int = 4, fill: float | Sequence[float] = 0.0) -> CropFlip:
    """Random crop after padding, then a mirror image with probability 1/2, as is usual for CIFAR.

    fill: the colour of the padding, in all channels or one number each. On normalised data 0 is the mean colour;
    `dataset.black` is what cropping before normalising gives, as the official code of FedaGrac does.
    """
    try:
        colour = np.atleast_1d(np.asarray(fill, dtype=np.float64)).tolist()
    except (TypeError, ValueError):
        raise FedstrideError(f"fill must be a number, or one a channel, not {fill!r}") from None
    return CropFlip(whole("padding", padding, 0), tuple(colour))
