"""What clients remember: pages on the device, in main memory and in a file, all alike."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from problems import digits, small_network

import fedstride as fs
from fedstride import memory
from fedstride.memory import Memories


class Kept(NamedTuple):
    c: torch.Tensor
    count: torch.Tensor


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr(memory, "PAGE", 3 * (5 + 1) * 8)  # three clients


def table(limit, dtype=torch.float64):
    return Memories(Kept(torch.arange(5, dtype=dtype), torch.zeros((), dtype=dtype)), limit)


@pytest.mark.parametrize("limit", [None, 0.0, 2 * 144 / (1 << 30)])  # everything here, in a file, two pages here
def test_rows_are_what_was_put(limit, small_pages, monkeypatch):
    kept, expected, files, mapped = table(limit), {}, [], memory._mapped
    monkeypatch.setattr(memory, "_mapped", lambda *given: files.append(given) or mapped(*given))
    rng = np.random.default_rng(0)
    for number in range(60):
        clients = rng.choice(40, 4, replace=False)
        before = kept.get(clients)
        for row, client in enumerate(clients):
            own = expected.get(int(client), (torch.arange(5.0, dtype=torch.float64), 0.0))
            assert torch.equal(before.c[row], own[0]) and before.count[row] == own[1]
            expected[int(client)] = (torch.full((5,), float(number * 100 + client), dtype=torch.float64), float(number))
        new = [expected[int(client)] for client in clients]
        kept.put(clients, Kept(torch.stack([c for c, _ in new]), torch.tensor([[count] for _, count in new])))
    pages = len(kept._pages)
    assert pages > 10
    assert len(files) == 2 * {None: 0, 0.0: pages}.get(limit, pages - 2)  # one a field


@pytest.mark.parametrize("limit", [None, 0.0])
def test_dump_and_load_keep_everything(limit, small_pages):
    kept, other = table(limit), table(0.0)
    kept.put(np.array([7, 2, 30, 4]), Kept(torch.randn(4, 5).double(), torch.ones(4, 1).double()))
    other.put(np.array([5]), Kept(torch.ones(1, 5).double(), torch.ones(1, 1).double()))  # forgotten by load
    other.load(*kept.dump())
    for clients in ([7, 2, 30, 4], [4, 5, 6]):
        for mine, theirs in zip(other.get(clients), kept.get(clients)):
            assert torch.equal(mine, theirs)


def test_a_run_with_its_memories_in_a_file_is_the_same(tmp_path):
    clients, _ = digits()
    options = dict(rounds=4, steps=2, participation=fs.participation.uniform(3), seed=3)
    plain = fs.simulate("scaffold", small_network(), clients, **options)
    filed = fs.simulate("scaffold", small_network(), clients, memory=0.0, **options)
    assert torch.equal(plain.x, filed.x)
    fs.simulate("scaffold", small_network(), clients, memory=0.0, folder=tmp_path, **options | dict(rounds=2))
    resumed = fs.simulate("scaffold", small_network(), clients, folder=tmp_path, resume=True, **options)
    assert torch.equal(plain.x, resumed.x)


def test_bad_limits_are_refused():
    clients, _ = digits()
    with pytest.raises(fs.FedstrideError, match="memory must be a number from 0"):
        fs.simulate("scaffold", small_network(), clients, memory=-1.0)
