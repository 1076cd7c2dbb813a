"""From the server's numbers to the device that trains."""

import numpy as np
import torch
from torch import Tensor


def there(numbers: np.ndarray, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the server on a device, which goes on with what it is doing."""
    return torch.as_tensor(numbers, dtype=dtype).to(device, non_blocking=True)
