"""Partitions: who holds which examples."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedstride as fs
from fedstride.data import files
from fedstride.partition import counts


def labelled(sizes=(100,) * 10, seed=0) -> fs.data.Dataset:
    """Classes of given sizes in random order; the input of an example is its number."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return fs.data.from_arrays((np.arange(float(len(labels)))[:, None], labels), name="labelled")


RULES = {
    "iid": lambda data, **o: fs.partition.iid(data, 7, **o),
    "dirichlet": lambda data, **o: fs.partition.dirichlet(data, 7, 0.3, **o),
    "balanced": lambda data, **o: fs.partition.dirichlet(data, 7, 0.3, balance=True, **o),
    "classes": lambda data, **o: fs.partition.classes(data, 10, 3, **o),
    "shards": lambda data, **o: fs.partition.shards(data, 7, 3, **o),
    "quantity": lambda data, **o: fs.partition.quantity(data, 7, 2.0, **o),
    "fedveca 1": lambda data, **o: fs.partition.fedveca(data, 7, 1, **o),
    "fedveca 2": lambda data, **o: fs.partition.fedveca(data, 7, 2, **o),
    "fedveca 3": lambda data, **o: fs.partition.fedveca(data, 25, 3, **o),
}


def rows(clients: fs.Clients) -> list[list[int]]:
    """The numbers of the examples that everybody holds."""
    return [sorted(clients.data(i)[0][:, 0].long().tolist()) for i in range(len(clients))]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", [(100,) * 10, (300, 10, 40, 90, 70, 200, 11, 99)], ids=["even", "uneven"])
def test_what_every_partition_keeps(rule, sizes):
    data = labelled(sizes)
    clients = RULES[rule](data, seed=3)
    held = rows(clients)
    everything = sum(held, [])
    assert all(held) and len(set(everything)) == len(everything)
    if rule != "classes":
        assert sorted(everything) == list(range(sum(sizes)))
    assert clients.inputs.data_ptr() == data.train.inputs.data_ptr()  # one table for all
    for client, mine in enumerate(held):
        assert sorted(clients.data(client)[1].tolist()) == sorted(data.train.targets[mine].tolist())
    table = counts(clients)
    assert table.sum(1).tolist() == clients.sizes.tolist() and table.shape == (len(clients), len(sizes))
    assert rows(RULES[rule](data, seed=3)) == held
    assert rows(RULES[rule](data.train, seed=3)) == held  # the training part alone will do
    assert rows(RULES[rule](data, seed=4)) != held or rule == "fedveca 2"  # which has nothing to draw


def test_iid():
    clients = fs.partition.iid(labelled((1000,) * 5), 4)
    assert clients.sizes.tolist() == [1250] * 4
    assert np.abs(counts(clients) - 250).max() < 60
    assert fs.partition.iid(labelled((10, 1)), 11).sizes.tolist() == [1] * 11


def test_quantity():
    data = labelled((2000,) * 5)
    sizes = fs.partition.quantity(data, 50, 1.0).sizes
    assert np.log(sizes).std() == pytest.approx(1, abs=0.25)
    assert fs.partition.quantity(data, 50, 0.0).sizes.tolist() == [200] * 50
    huge = fs.partition.quantity(data, 50, 1e4).sizes  # one draw dwarfs the others
    assert sorted(huge) == [1] * 49 + [9951]
    clients = fs.partition.quantity(data, 5, 0.5)
    share = counts(clients) / clients.sizes[:, None]
    assert np.abs(share - 0.2).max() < 0.05  # labels alike


def test_dirichlet():
    data = labelled((3000,) * 10)
    shares = np.concatenate([counts(fs.partition.dirichlet(data, 10, 0.5, seed)).T for seed in range(20)]) / 3000
    # The marginals are Beta(alpha, 9 alpha): mean 0.1, variance 0.09 / (10 alpha + 1).
    assert shares.mean() == pytest.approx(0.1) and shares.var() == pytest.approx(0.09 / 6, rel=0.1)
    even = counts(fs.partition.dirichlet(data, 10, 1e4))
    assert np.abs(even - 300).max() < 20
    small = labelled((60,) * 10)
    assert fs.partition.dirichlet(small, 12, 0.3, minimum=25).sizes.min() >= 25
    assert fs.partition.dirichlet(small, 12, 0.3, minimum=1).sizes.min() < 25
    tiny = fs.partition.dirichlet(small, 5, 1e-3, minimum=1)  # nearly every class in one hand
    assert (counts(tiny) == 60).sum() >= 8


def test_dirichlet_with_the_balance_rule():
    """Who holds an equal share gets no more: the first class after that adds nothing."""
    data = labelled((500,) * 10)
    for seed in range(5):
        table = counts(fs.partition.dirichlet(data, 10, 0.1, seed, balance=True))
        before = np.cumsum(table, axis=1) - table  # what everybody held when a class was dealt
        assert (table[before >= 500] == 0).all() and table.sum() == 5000
        assert table.sum(1).max() < 1000  # less than a fair share before, at most a whole class more
    free = [counts(fs.partition.dirichlet(data, 10, 0.1, seed)).sum(1).max() for seed in range(5)]
    assert max(free) > 1000


def test_classes():
    table = counts(fs.partition.classes(labelled((600,) * 10), 20, 5))  # FedaGrac's DP2
    assert ((table == 0) | (table == 60)).all() and ((table > 0).sum(1) == 5).all() and (table.sum(0) == 600).all()
    table = counts(fs.partition.classes(labelled((600,) * 10), 100, 2))  # DLSGD
    assert ((table > 0).sum(1) == 2).all() and (table.sum(1) == 60).all() and (table.sum(0) == 600).all()
    assert len({tuple(np.flatnonzero(row)) for row in table}) > 25  # of 45 pairs
    uneven = counts(fs.partition.classes(labelled((50, 70, 90)), 4, 2))  # 8 places: three, three, two
    assert ((uneven > 0).sum(1) == 2).all() and len(set(uneven[uneven > 0])) == 1
    assert sorted((uneven > 0).sum(0)) == [2, 3, 3]
    assert (counts(fs.partition.classes(labelled((40,) * 4), 5, 4)) == 8).all()  # everybody has everything
    for seed in range(40):  # nobody ends up with a class that has no place left
        table = counts(fs.partition.classes(labelled((40,) * 4), 6, 2, seed)) > 0
        assert (table.sum(1) == 2).all() and (table.sum(0) == 3).all()
    assert rows(fs.partition.classes(labelled((100,)), 2, 1))[0] not in (list(range(50)), list(range(50, 100)))
    few = counts(fs.partition.classes(labelled((40,) * 10), 3, 2))  # more classes than places
    assert ((few > 0).sum(1) == 2).all() and ((few > 0).sum(0) <= 1).all()


def test_shards():
    data = labelled((100,) * 10)
    clients = fs.partition.shards(data, 10, 2)
    assert clients.sizes.tolist() == [100] * 10 and ((counts(clients) > 0).sum(1) <= 2).all()
    assert set(counts(clients).ravel()) <= {0, 50, 100}
    assert fs.partition.shards(labelled((7, 6)), 2, 3).sizes.sum() == 13


def test_fedveca():
    data = labelled((60,) * 10)
    two = counts(fs.partition.fedveca(data, 5, 2))
    assert [np.flatnonzero(row).tolist() for row in two] == [[i, i + 5] for i in range(5)]
    three = counts(fs.partition.fedveca(data, 5, 3))
    assert [np.flatnonzero(row).tolist() for row in three] == [[0, 1, 2, 3, 4]] * 3 + [[6, 8], [5, 7, 9]]
    assert three.sum(1).tolist() == [100, 100, 100, 120, 180]
    many = counts(fs.partition.fedveca(data, 30, 2))  # more clients than labels: one label each
    assert [np.flatnonzero(row).tolist() for row in many] == [[i % 10] for i in range(30)] and (many.sum(1) == 20).all()
    many = counts(fs.partition.fedveca(data, 30, 3))
    for client, row in enumerate(many):
        mine = set(np.flatnonzero(row))
        assert mine <= {0, 1, 2, 3, 4} if client % 10 < 5 else mine == {client % 10}
    assert (many.sum(1) == 20).all()
    one = counts(fs.partition.fedveca(data, 5, 1))
    assert (one > 0).all() and (one == counts(fs.partition.iid(data, 5))).all()
    for labels in range(2, 12):  # nobody is empty, whatever the numbers
        for clients in range(2, 25):
            assert fs.partition.fedveca(labelled((30,) * labels), clients, 3).sizes.min() > 0


def test_natural():
    data = labelled((3, 3))
    clients = fs.partition.natural(data, ["b", "a", "b", "c", "a", "b"])
    assert rows(clients) == [[1, 4], [0, 2, 5], [3]]
    assert rows(fs.partition.natural(data.train, np.array([5, 5, 2, 2, 2, 5]))) == [[2, 3, 4], [0, 1, 5]]
    regression = fs.data.from_arrays((np.ones((4, 2)), np.ones(4)))
    assert fs.partition.natural(regression, [0, 1, 1, 1]).sizes.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda data: fs.partition.iid(data, 0), "clients must be a whole number from 1, not 0"),
        (lambda data: fs.partition.iid(data, 1001), "1000 examples are too few for 1001 clients"),
        (lambda data: fs.partition.iid(data, 5, seed=-1), "seed must be a whole number from 0"),
        (
            lambda data: fs.partition.iid("digits", 5),
            r"iid needs a data set, such as fs\.data\.load\('digits'\), not str",
        ),
        (lambda data: fs.partition.dirichlet(data, 5, 0), "dirichlet needs a positive alpha, not 0"),
        (lambda data: fs.partition.dirichlet(data, 5, "a"), "alpha must be a number, not 'a'"),
        (
            lambda data: fs.partition.dirichlet(data, 200, 1.0),
            "no draw gives each of 200 clients 10 of the 1000 examples",
        ),
        (lambda data: fs.partition.dirichlet(data, 90, 0.01), "use a larger alpha than 0.01, fewer clients"),
        (lambda data: fs.partition.classes(data, 5, 11), "k must be a number of classes from 1 to 10, not 11"),
        (lambda data: fs.partition.classes(data, 900, 2), "fewer examples than the 180 clients that share it"),
        (lambda data: fs.partition.shards(data, 501, 2), "1000 examples cannot be cut into 1002 shards"),
        (lambda data: fs.partition.quantity(data, 5, -1), "sigma must be a number from 0, not -1"),
        (lambda data: fs.partition.fedveca(data, 5, 4), "case must be 1, 2 or 3"),
        (lambda data: fs.partition.fedveca(data, 1, 3), "needs two clients"),
        (lambda data: fs.partition.natural(data, [1, 2]), r"one value for each of 1000 examples, not \(2,\)"),
        (
            lambda data: fs.partition.dirichlet(fs.data.from_arrays((np.ones((9, 2)), np.ones(9))), 3, 1.0),
            "targets that are whole numbers from 0",
        ),
    ],
)
def test_partitions_that_cannot_be(make, words):
    with pytest.raises(fs.FedstrideError, match=words) as caught:
        make(labelled())
    assert "\n" not in str(caught.value)


def test_a_partition_trains():
    digits = fs.data.load("digits")
    clients = fs.partition.dirichlet(digits, clients=10, alpha=0.3, seed=0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    result = fs.simulate("fedavg", model, clients, rounds=10, lr=0.3, test=digits.test, device="cpu")
    assert result.rows[-1]["accuracy"] > 0.8


def test_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    clients = fs.partition.dirichlet(labelled(), 7, 0.3)
    figure = fs.partition.picture(clients, tmp_path / "fleet.png")
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(
        fs.FedstrideError, match="cannot save the picture as .*fleet.doc: Format 'doc' is not supported"
    ):
        fs.partition.picture(clients, tmp_path / "fleet.doc")
    bubbles = figure.axes[0].collections[0]
    table = counts(clients)
    client, label = np.nonzero(table)
    assert bubbles.get_offsets().astype(int).tolist() == np.stack([client, label], 1).tolist()
    np.testing.assert_allclose(bubbles.get_sizes() / bubbles.get_sizes().max(), table[client, label] / table.max())


def test_a_picture_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(fs.FedstrideError, match="pip install matplotlib"):
        fs.partition.picture(fs.partition.iid(labelled(), 5))


def test_the_papers_partitions_of_real_data():
    if not (Path(os.environ.get("FEDSTRIDE_DATA", "/nonexistent")) / files.SOURCES["fashion-mnist"].folder).is_dir():
        pytest.skip("fashion-mnist is not in the folder that FEDSTRIDE_DATA names")
    fashion = fs.data.load("fashion-mnist")
    clients = fs.partition.dirichlet(fashion, clients=100, alpha=0.3, seed=0)
    assert len(clients) == 100 and clients.sizes.sum() == 60000 and clients.sizes.min() >= 10
    two = fs.partition.classes(fashion, clients=50, k=2)  # FedLGA: 1,200 images of two classes
    assert (two.sizes == 1200).all() and ((counts(two) > 0).sum(1) == 2).all()
