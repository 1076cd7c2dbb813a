"""One torch thread a test process: the tests run two processes side by side."""

import torch

torch.set_num_threads(1)
