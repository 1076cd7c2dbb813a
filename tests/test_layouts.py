"""How images lie in memory: channels last where a network is quicker so on a CPU."""

import pytest
import torch
from torch import nn

import fedstride as fs
from fedstride.oracle import Batch, make
from fedstride.vector import VectorModel

LAST = torch.channels_last


class Watch(nn.Module):
    """Notes how what passes through it lies."""

    def __init__(self, seen):
        super().__init__()
        self.notes = lambda inputs: seen.append(inputs.is_contiguous(memory_format=LAST))

    def forward(self, inputs):
        self.notes(inputs)
        return inputs


class Viewing(nn.Module):
    """Looks at its images in a way that needs channels first, as many networks do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3), nn.Linear(4 * 3 * 3, 3)

    def forward(self, inputs):
        found = nn.functional.max_pool2d(self.first(inputs), 2)
        return self.last(found.view(len(inputs), -1))


def pooling():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))


@pytest.mark.parametrize(
    ("network", "last"),
    [
        (pooling(), True),  # 5 x 144 numbers against kernels of 72
        (nn.Sequential(nn.Conv2d(2, 4, 7), nn.Flatten(), nn.Linear(16, 3)), False),  # 5 x 16 against 392
    ],
)
def test_channels_are_last_where_images_outweigh_kernels(network, last):
    seen: list[bool] = []
    network.insert(1, Watch(seen))
    model, images = VectorModel(network, torch.float32), torch.randn(5, 2, 8, 8)
    model.probe(images[:4])
    seen.clear()
    model.predict(model.x, images)
    oracle = make("sequential", model, fs.losses.cross_entropy, None)
    oracle(model.x[None], Batch(images[None], torch.zeros(1, 5, dtype=torch.int64)))
    assert seen == [last, last]


@pytest.mark.parametrize("network", [pooling, Viewing])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedveca"])
def test_layouts_change_nothing_but_rounding(network, method):
    torch.manual_seed(0)
    images, labels = torch.randn(3, 12, 2, 8, 8), torch.randint(0, 3, (3, 12))
    clients, model = fs.Clients.from_arrays(list(zip(images, labels))), network()
    settings = dict(rounds=3, steps=[3, 1, 2], batch_size=4, lr=0.1, device="cpu", test=(images[0], labels[0]))
    one, two = (fs.simulate(method, model, clients, backend=name, **settings) for name in ("sequential", "vmap"))
    torch.testing.assert_close(one.x, two.x, rtol=1e-4, atol=1e-6)
    assert one.rows[-1]["loss"] == pytest.approx(two.rows[-1]["loss"], rel=1e-5)
