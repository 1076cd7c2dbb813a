"""The networks every benchmark uses.

They pool before the ReLU, as those of `fedstride.models`: the same numbers to the bit, a quarter of them to look at.
"""

from torch import nn

NETWORKS = {
    "logistic": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    ),
    # The network of pfl-research's CIFAR-10 benchmark, without its dropout: random masks could not be compared.
    "cifar": lambda: nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10),
    ),
}  # fmt: skip
