"""Data sets by name and by hand, synthetic fleets, augmentation."""

import gzip
import hashlib
import io
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import digits, small_network
from torch import nn

import fedstride as fs
from fedstride import oracle as oracles
from fedstride.data import files
from fedstride.descent import Local
from fedstride.keys import job_keys
from fedstride.sampling import Jobs, Sampler
from fedstride.train import Work
from fedstride.vector import VectorModel

REAL = os.environ.get("FEDSTRIDE_DATA")


def idx(array) -> bytes:
    array = np.asarray(array, dtype=np.uint8)
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def mnist_files(labels=(3, 1, 4, 1, 5)) -> dict[str, bytes]:
    """Five training and two test images, in the official format."""
    images = np.arange(7 * 28 * 28).reshape(7, 28, 28) % 256
    contents = (idx(images[:5]), idx(labels), idx(images[5:]), idx([9, 2]))
    return dict(zip(files.SOURCES["mnist"].files, contents))


def cifar_files(name: str) -> dict[str, bytes]:
    """Two images a file; labels count up through the set, and so does the first pixel of the blue plane."""
    contents = {}
    for number, file in enumerate(files.SOURCES[name].files):
        records = []
        for label in (2 * number, 2 * number + 1):
            planes = bytes([10]) * 1024 + bytes([20]) * 1024 + bytes([40 + label]) + bytes([30]) * 1023
            records.append((bytes([label % 10]) if name == "cifar-10" else bytes([7, 90 + label])) + planes)
        contents[file] = b"".join(records)
    return contents


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Puts files where a set is looked for and makes their checksums the right ones; nothing can be downloaded."""
    monkeypatch.setenv("FEDSTRIDE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(files, "SOURCES", dict(files.SOURCES))

    def put(name: str, contents: dict[str, bytes], address: str | None = None, there: bool = True) -> Path:
        source = files.SOURCES[name]
        sums = {file: hashlib.sha256(data).hexdigest() for file, data in contents.items()}
        address = (tmp_path / "nowhere").as_uri() + "/" if address is None else address
        files.SOURCES[name] = source._replace(files=sums, address=address)
        folder = tmp_path / "data" / source.folder
        if there:
            folder.mkdir(parents=True, exist_ok=True)
            for file, data in contents.items():
                (folder / file).write_bytes(data)
        return folder

    return put


def refused(words: str, function, *arguments, **options) -> None:
    with pytest.raises(fs.FedstrideError, match=words) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)


# Named sets


def test_digits():
    one, two = fs.data.load(), fs.data.load("digits")
    assert repr(one) == "Dataset('digits', 1437 + 360 examples of shape (1, 8, 8), 10 classes)"
    assert torch.equal(one.train.inputs, two.train.inputs) and torch.equal(one.test.targets, two.test.targets)
    assert one.train.inputs.dtype == torch.float32 and one.train.targets.dtype == torch.int64
    assert float(one.train.inputs.min()) == 0 and float(one.train.inputs.max()) == 1
    together = torch.cat([one.train.inputs, one.test.inputs]).flatten(1)
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    every = {image.tobytes() for image in (images / 16).astype(np.float32)}
    assert {image.numpy().tobytes() for image in together} == every
    assert torch.equal(
        torch.bincount(torch.cat([one.train.targets, one.test.targets])), torch.bincount(torch.as_tensor(labels))
    )
    result = fs.simulate(
        "fedavg", nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), fs.partition.iid(one, 5), rounds=5, lr=0.5,
        test=one.test, device="cpu",
    )  # fmt: skip
    assert result.rows[-1]["accuracy"] > 0.8


def test_mnist_files(place):
    place("mnist", mnist_files())
    raw = fs.data.load("mnist", normalise=False)
    assert raw.train.inputs.shape == (5, 1, 28, 28) and raw.test.inputs.shape == (2, 1, 28, 28)
    assert raw.train.targets.tolist() == [3, 1, 4, 1, 5] and raw.test.targets.tolist() == [9, 2]
    assert raw.classes == tuple("0123456789") and raw.black == (0.0,)
    assert torch.equal(raw.train.inputs[0, 0, 1], torch.arange(28, 56) / 255)
    normal = fs.data.load("mnist")
    torch.testing.assert_close(normal.test.inputs, (raw.test.inputs - 0.1307) / 0.3081)
    torch.testing.assert_close(torch.tensor(normal.black), normal.train.inputs[0, 0, 0, :1])
    assert (normal.mean, normal.std) == ((0.1307,), (0.3081,))


def test_fashion_mnist_files(place):
    place("fashion-mnist", mnist_files())
    dataset = fs.data.load("fashion-mnist")
    assert dataset.classes[0] == "T-shirt/top" and dataset.classes[9] == "Ankle boot" and len(dataset.classes) == 10
    assert (dataset.mean, dataset.std) == ((0.1307,), (0.3081,))


@pytest.mark.parametrize(
    ("name", "train", "test"), [("cifar-10", [*range(10)], [0, 1]), ("cifar-100", [90, 91], [92, 93])]
)
def test_cifar_files(place, name, train, test):
    place(name, cifar_files(name))
    raw = fs.data.load(name, normalise=False)
    assert raw.train.targets.tolist() == train and raw.test.targets.tolist() == test
    assert raw.train.inputs.shape == (len(train), 3, 32, 32)
    for channel, value in enumerate((10, 20, 30)):
        assert bool((raw.train.inputs[:, channel, 1:] == value / 255).all())
    numbers = (torch.cat([raw.train.inputs, raw.test.inputs])[:, 2, 0, 0] * 255 - 40).round().tolist()
    assert numbers == list(range(len(train) + len(test)))
    assert len(raw.classes) == int(name[6:]) and list(raw.classes) == sorted(raw.classes)
    normal = fs.data.load(name)
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (normal.mean, normal.std))
    torch.testing.assert_close(normal.test.inputs * std + mean, raw.test.inputs)
    if name == "cifar-10":
        assert (normal.mean, normal.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def test_a9a_files(place):
    place("a9a", {"a9a": b"-1 3:1 123:1 \n+1 1:0.5 \n-1 2:1 \n", "a9a.t": b"+1 5:1\n"})
    dataset = fs.data.load("a9a")
    assert dataset.train.inputs.shape == (3, 123) and dataset.test.inputs.shape == (1, 123)
    assert dataset.train.targets.tolist() == [0, 1, 0] and dataset.test.targets.tolist() == [1]
    assert dataset.train.inputs.nonzero().tolist() == [[0, 2], [0, 122], [1, 0], [2, 1]]
    assert float(dataset.train.inputs[1, 0]) == 0.5


def test_svmlight_files(tmp_path):
    one, two, real = (tmp_path / name for name in ("one", "two", "real"))
    one.write_text("7 1:1 4:2\n2 2:1\n5 1:3\n")
    two.write_text("5 3:1\n")
    real.write_text("0.5 1:1\n-2 2:1\n")
    dataset = fs.data.load("svmlight", path=one, test=two)
    assert dataset.classes == ("2", "5", "7") and dataset.train.targets.tolist() == [2, 0, 1]
    assert dataset.test.targets.tolist() == [1] and dataset.test.inputs.shape == (1, 4)
    assert fs.data.load("svmlight", path=str(one), features=9).train.inputs.shape == (3, 9)
    assert fs.data.load("svmlight", path=one, test=one).test.targets.tolist() == [2, 0, 1]
    regression = fs.data.load("svmlight", path=real)
    assert regression.classes == () and regression.train.targets.tolist() == [0.5, -2.0] and regression.test is None
    refused("one is not an svmlight file", fs.data.load, "svmlight", path=one, features=2)
    two.write_text("4 3:1\n")
    refused("two has label 4, which the training file does not have", fs.data.load, "svmlight", path=one, test=two)
    two.write_bytes(b"\x00\x01 junk")
    refused("two is not an svmlight file", fs.data.load, "svmlight", path=two)
    refused("cannot read .*three: No such file", fs.data.load, "svmlight", path=tmp_path / "three")
    refused("which needs a path", fs.data.load, "svmlight")
    refused("belong to load\\('svmlight'", fs.data.load, "mnist", path=one)


def test_unknown_names():
    refused(
        "unknown data set 'fashion_mnist'; did you mean 'fashion-mnist'\\? Choose from digits",
        fs.data.load,
        "fashion_mnist",
    )
    refused("unknown data set 'zzz'\\. Choose from", fs.data.load, "zzz")


# Files that are missing, wrong or damaged


def test_missing_files_and_no_network(place, tmp_path):
    folder = place("mnist", mnist_files(), there=False)
    refused(
        f"mnist is not complete in {folder} .*; put train-images-idx3-ubyte.gz, .* there, from file:",
        fs.data.load,
        "mnist",
    )
    assert not folder.exists()
    place("cifar-10", cifar_files("cifar-10"), (tmp_path / "nowhere.tar.gz").as_uri(), there=False)
    refused("put data_batch_1.bin, .*test_batch.bin there", fs.data.load, "cifar-10")


def test_missing_files_are_downloaded(place, tmp_path):
    server = tmp_path / "server"
    server.mkdir()
    for file, data in mnist_files().items():
        (server / file).write_bytes(data)
    folder = place("mnist", mnist_files(), server.as_uri() + "/", there=False)
    folder.mkdir(parents=True)
    first = next(iter(mnist_files()))
    (folder / first).write_bytes(mnist_files()[first])  # only what is missing is asked for
    (server / first).unlink()
    assert len(fs.data.load("mnist").train.targets) == 5
    assert sorted(path.name for path in folder.iterdir()) == sorted(mnist_files())


def test_an_archive_is_downloaded(place, tmp_path):
    contents = cifar_files("cifar-100")
    packed = tmp_path / "c.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for file, data in contents.items():
            member = tarfile.TarInfo(f"cifar-100-binary/{file}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    folder = place("cifar-100", contents, packed.as_uri(), there=False)
    assert fs.data.load("cifar-100").train.targets.tolist() == [90, 91]
    assert sorted(path.name for path in folder.iterdir()) == sorted(contents)
    for path in folder.iterdir():
        path.unlink()
    packed.write_bytes(packed.read_bytes()[:100])
    refused("cifar-100 is not complete in .* could not be downloaded", fs.data.load, "cifar-100")
    assert not list(folder.iterdir())


def test_a_download_with_the_wrong_checksum_is_not_kept(place, tmp_path):
    server = tmp_path / "server"
    server.mkdir()
    for file, data in mnist_files(labels=(0, 0, 0, 0, 0)).items():
        (server / file).write_bytes(data)
    folder = place("mnist", mnist_files(), server.as_uri() + "/", there=False)
    refused("train-labels-idx1-ubyte.gz as downloaded from file:.* does not match its checksum", fs.data.load, "mnist")
    assert not folder.exists()


def test_a_file_with_the_wrong_checksum(place):
    folder = place("mnist", mnist_files())
    path = folder / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(idx([1, 1]))
    refused(f"{path} does not match its checksum; delete it", fs.data.load, "mnist")


def test_the_default_folder(monkeypatch):
    monkeypatch.delenv("FEDSTRIDE_DATA", raising=False)
    assert files.folder() == Path.home() / ".cache" / "fedstride"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("train-images-idx3-ubyte.gz", lambda data: data[:-9], "is damaged: it is not a complete gzip file"),
        ("train-images-idx3-ubyte.gz", lambda data: b"<html>", "is damaged: it is not a complete gzip file"),
        ("t10k-images-idx3-ubyte.gz", lambda data: idx([1, 2]), "begins with 00000801, not with 00000803"),
        ("t10k-labels-idx1-ubyte.gz", lambda data: gzip.compress(b""), "is not an idx file"),
        (
            "train-labels-idx1-ubyte.gz",
            lambda data: gzip.compress(gzip.decompress(data)[:-1]),
            "is damaged: it holds 4 values, its header says 5",
        ),
        ("train-labels-idx1-ubyte.gz", lambda data: idx([1, 2]), "has 5 images, .*train-labels.* 2 labels"),
        ("t10k-labels-idx1-ubyte.gz", lambda data: idx([1, 12]), "it has label 12; there are 10 classes"),
    ],
)
def test_damaged_idx_files(place, file, change, words):
    contents = mnist_files()
    contents[file] = change(contents[file])
    place("mnist", contents)
    refused(f"{file.split('-')[0]}-.*{words}", fs.data.load, "mnist")


def test_damaged_cifar_files(place):
    contents = cifar_files("cifar-10")
    place("cifar-10", contents | {"data_batch_3.bin": contents["data_batch_3.bin"][:-1]})
    refused("data_batch_3.bin is damaged: 6145 bytes are not a number of 3073-byte records", fs.data.load, "cifar-10")
    place("cifar-10", contents | {"data_batch_2.bin": b"\x0b" * 3073})
    refused("data_batch_2.bin is damaged: it has label 11; there are 10 classes", fs.data.load, "cifar-10")


# Arrays and tables


def test_from_arrays():
    train = (np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2], dtype=np.int32))
    dataset = fs.data.from_arrays(train, (np.ones((2, 2)), [1, 0]))
    assert dataset.classes == ("0", "1", "2") and dataset.train.targets.dtype == torch.int64
    normal = dataset.normalised([5.0, 6.0], [2.0, 4.0])
    torch.testing.assert_close(
        normal.train.inputs, (dataset.train.inputs - torch.tensor([5.0, 6.0])) / torch.tensor([2.0, 4.0])
    )
    again = normal.normalised([1.0], [0.5])  # from the raw inputs: mean 5 + 2 * 1 and 6 + 4 * 1
    assert (again.mean, again.std) == ((7.0, 10.0), (1.0, 2.0))
    torch.testing.assert_close(
        again.test.inputs, (1 - torch.tensor([[7.0, 10.0]] * 2)) / torch.tensor([1.0, 2.0]), check_dtype=False
    )
    assert fs.data.from_arrays((np.ones((3, 2)), np.ones(3))).classes == ()
    refused("train has inputs of shape", fs.data.from_arrays, (np.ones((3, 2)), np.ones(2)))
    refused("test has NaN", fs.data.from_arrays, train, (np.full((1, 2), np.nan), [0]))
    refused(
        "test has examples of shape \\(3,\\), train of \\(2,\\)", fs.data.from_arrays, train, (np.ones((1, 3)), [0])
    )
    refused(
        "arrays has label 3 in its test targets; classes go from 0 to 2",
        fs.data.from_arrays,
        train,
        (np.ones((1, 2)), [3]),
    )
    refused("one mean and one positive std, or 2 of each", dataset.normalised, [1.0] * 3, [1.0] * 3)


class Table:
    """Columns by name, as `datasets.Dataset` has them."""

    def __init__(self, **columns):
        self.columns, self.column_names = columns, list(columns)

    def __getitem__(self, name):
        return self.columns[name]

    @property
    def features(self):
        return {"label": type("ClassLabel", (), {"names": ["cat", "dog"]})}


def test_from_huggingface():
    grey = [np.full((2, 3), shade, dtype=np.uint8) for shade in (0, 51, 255)]
    table = Table(image=grey, label=[0, 1, 1])
    dataset = fs.data.from_huggingface(table, inputs="image", targets="label")
    assert dataset.train.inputs.shape == (3, 1, 2, 3) and dataset.classes == ("cat", "dog") and dataset.test is None
    torch.testing.assert_close(dataset.train.inputs[:, 0, 0, 0], torch.tensor([0, 0.2, 1]))
    colour = np.zeros((4, 5, 6, 3), dtype=np.uint8)
    colour[..., 2] = 255
    both = {"train": Table(x=colour, y=[0, 1, 2, 0]), "test": Table(x=colour[:1], y=[2])}
    dataset = fs.data.from_huggingface(both, inputs="x", targets="y")
    assert dataset.train.inputs.shape == (4, 3, 5, 6) and dataset.test.targets.tolist() == [2]
    assert dataset.train.inputs.amax((0, 2, 3)).tolist() == [0, 0, 1] and len(dataset.classes) == 3
    plain = fs.data.from_huggingface({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0.5, 1.5]}, inputs="x", targets="y")
    assert plain.train.inputs.dtype == torch.float32 and plain.classes == ()
    refused(
        "no column 'img'; its columns are image, label",
        fs.data.from_huggingface,
        table,
        inputs="img",
        targets="label",
    )
    ragged = Table(x=[[1], [1, 2]], y=[0, 1])
    refused(
        "column 'x' is empty or has examples of different shapes",
        fs.data.from_huggingface,
        ragged,
        inputs="x",
        targets="y",
    )


def test_a_name_on_the_hub_needs_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("pip install datasets", fs.data.from_huggingface, "someone/set", inputs="x", targets="y")


def test_from_flower():
    tables = [Table(x=np.full((n, 2), n, dtype=np.float32), y=np.zeros(n, dtype=int)) for n in (3, 1, 2)]

    class Partitioner:
        num_partitions = 3

        def load_partition(self, client):
            return tables[client]

    class Federated:
        """Its partitioner has no data, hence no number of partitions, before the first use."""

        def __init__(self):
            self.partitioners = {"train": type("Empty", (), {})()}

        def load_partition(self, client):
            self.partitioners["train"] = Partitioner()
            return tables[client]

    for source in (tables, Partitioner(), Federated()):
        clients = fs.data.from_flower(source, inputs="x", targets="y")
        assert clients.sizes.tolist() == [3, 1, 2] and bool((clients.data(2)[0] == 2).all())
    refused("pip install flwr-datasets", fs.data.from_flower, 3, inputs="x", targets="y")


# Synthetic fleets


def test_least_squares():
    clients = fs.data.least_squares(seed=3)
    assert len(clients) == 20 and clients.sizes.tolist() == [500] * 20
    matrices = [clients.data(i)[0] for i in range(20)]
    hessians = torch.stack([a.T @ a for a in matrices])
    spectrum = torch.linalg.eigvalsh(hessians.mean(0))
    assert float(spectrum[-1]) == pytest.approx(12541, rel=0.01)  # the values of another seed
    assert float(spectrum[0]) == pytest.approx(33.9, rel=0.1)
    ranks = [int(torch.linalg.matrix_rank(a)) for a in matrices]
    assert ranks == [99] + [100] * 19 and torch.equal(matrices[0][:, 0], matrices[0][:, 1])
    for i, a in enumerate(matrices):
        torch.testing.assert_close(a @ torch.full((100,), 10.0, dtype=a.dtype), clients.data(i)[1])
    assert float(torch.cat(matrices).min()) >= 0 and float(torch.cat(matrices).max()) <= 1
    steep = fs.data.least_squares(clients=4, rho=1.5, seed=3)
    torch.testing.assert_close(steep.data(3)[0], 8 * matrices[3])  # 4^1.5
    torch.testing.assert_close(steep.data(3)[1], 8 * clients.data(3)[1])
    random = fs.data.least_squares(targets="random", seed=3)
    assert 0 <= float(random.targets.min()) < 0.01 < 0.99 < float(random.targets.max()) <= 1
    torch.testing.assert_close(random.inputs, clients.inputs)
    assert not torch.equal(fs.data.least_squares(seed=4).inputs, clients.inputs)
    refused("targets must be 'interpolating' or 'random'", fs.data.least_squares, targets="none")
    refused("clients must be a whole number from 1", fs.data.least_squares, clients=0)


def test_least_squares_is_solved():
    clients = fs.data.least_squares(clients=3, rows=30, features=2)
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    result = fs.simulate(
        "fedavg", model, clients, loss=fs.losses.least_squares_sum, rounds=100, lr=0.05, steps=2, batch_size=None,
        dtype=torch.float64, device="cpu", every=100,
    )  # fmt: skip
    torch.testing.assert_close(result.x, torch.full((2,), 10.0, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_synthetic():
    clients, test = fs.data.synthetic(0.5, 2.0, clients=200, seed=1)
    assert len(clients) == 200 and clients.sizes.min() >= 45 and clients.inputs.shape[1] == 60
    assert set(clients.targets.unique().tolist()) <= set(range(10))
    total = int(clients.sizes.sum()) + len(test.targets)
    assert len(test.targets) == pytest.approx(0.1 * total, rel=0.05)
    centres = torch.stack([clients.data(i)[0].mean(0) for i in range(200)])
    assert float(centres.mean(1).var()) == pytest.approx(4, rel=0.25)  # B_k has standard deviation 2
    assert float(centres.var(1).mean()) == pytest.approx(1, rel=0.1)  # entries around it have 1
    largest = clients.data(int(clients.sizes.argmax()))[0]
    torch.testing.assert_close(largest.var(0), torch.arange(1, 61) ** -1.2, rtol=0.2, atol=0)
    same, _ = fs.data.synthetic(0.5, 2.0, clients=3, seed=1)
    assert torch.equal(same.data(2)[0], clients.data(2)[0])  # a client does not depend on how many there are
    refused("alpha must be a number from 0, not -1", fs.data.synthetic, -1, 0)


# Augmentation


def images(clients=3, batch=40, channels=2, height=6, width=5):
    return torch.rand(clients, batch, channels, height, width, generator=torch.Generator().manual_seed(0))


def test_crop_flip_takes_windows_of_the_padded_image():
    inputs, keys = images(), torch.arange(3)
    changed = fs.data.crop_flip(padding=2, fill=(7.0, 8.0))(inputs, keys)
    padded = torch.stack([F.pad(inputs[:, :, c], (2, 2, 2, 2), value=7.0 + c) for c in range(2)], 2)
    seen = []
    for client in range(3):
        for example in range(40):
            windows = {}
            for up in range(5):
                for left in range(5):
                    window = padded[client, example, :, up : up + 6, left : left + 5]
                    windows[up, left, 0], windows[up, left, 1] = window, window.flip(-1)
            hits = [name for name, window in windows.items() if torch.equal(window, changed[client, example])]
            assert len(hits) == 1
            seen += hits
    for part, count in ((0, 5), (1, 5), (2, 2)):
        share = np.bincount([one[part] for one in seen], minlength=count) / len(seen)
        assert np.abs(share - 1 / count).max() < 0.12, share
    assert len(set(seen)) > 40  # of 50: the three draws do not hang together


def test_crop_flip_does_not_depend_on_company():
    inputs, keys, change = images(), torch.tensor([5, -3, 11]), fs.data.crop_flip(padding=1)
    whole = change(inputs, keys)
    torch.testing.assert_close(change(inputs[1:2, :7], keys[1:2]), whole[1:2, :7], rtol=0, atol=0)
    assert not torch.equal(change(inputs, keys + 1), whole)
    assert torch.equal(change(inputs.double(), keys), whole.double())
    assert torch.equal(fs.data.crop_flip(0)(images(height=1, width=1), keys), images(height=1, width=1))


def augmented(**changes):
    clients, _ = digits()
    settings = dict(rounds=3, lr=0.1, steps=[4, 1, 3, 2, 5, 2], batch_size=5, device="cpu", dtype=torch.float64)
    settings |= dict(augment=fs.data.crop_flip(padding=2, fill=0.5)) | changes
    return fs.simulate(
        settings.pop("method", "fedavg"), small_network(settings.pop("dropout", 0.0)), clients, **settings
    )


def whole_batches(outputs, targets):
    """A loss that may not be taken apart, so that ragged batches are grouped by size."""
    return F.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(sampling="shuffle", batch_size=7),
        dict(sampling="shuffle", batch_size=7, loss=whole_batches),
        dict(dropout=0.5),
        dict(method="scaffold"),
        dict(momentum=0.5),
        dict(sampling=lambda client, round, step: range(client + 1), batch_size=None),
        dict(method=fs.algorithms.DlsgdHetero(n=2), world=fs.World(devices=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), steps=3),
    ],
    ids=["replacement", "shuffle", "groups", "dropout", "scaffold", "momentum", "replay", "asynchronous"],
)
def test_augmentation_is_the_same_on_every_backend_and_chunk(changes):
    one = augmented(backend="sequential", **changes)
    for other in (dict(backend="vmap"), dict(backend="vmap", chunk=2), dict(backend="sequential", chunk=1)):
        torch.testing.assert_close(augmented(**changes, **other).x, one.x, rtol=1e-9, atol=1e-9)
    assert float((augmented(**changes, augment=None).x - one.x).norm()) > 1e-3


def test_augmentation_has_a_key_of_its_own():
    """A new one for every client, round and step; the batches themselves stay what they were."""
    drawn, seen = [], []

    def listen(inputs, keys):
        drawn.extend(keys.tolist())
        seen.append(inputs.clone())
        return inputs

    one = augmented(augment=listen, backend="vmap")
    assert len(set(drawn[1:])) == len(drawn) - 1 == 3 * 17  # the first call is the check before the run
    assert torch.equal(one.x, augmented(augment=None, backend="vmap").x)
    keys = drawn[1:]
    drawn.clear()
    augmented(augment=listen, backend="sequential", chunk=1)
    assert sorted(drawn[1:]) == sorted(keys)
    drawn.clear()
    augmented(augment=listen, backend="vmap", seed=1)
    assert not set(drawn[1:]) & set(keys)


def test_only_mini_batches_are_augmented():
    clients, _ = digits()
    clients = clients.to(torch.device("cpu"), torch.float32)
    vector = VectorModel(small_network(), torch.float32)
    each = (fs.losses.cross_entropy.each, "mean")
    everyone, ones = np.arange(6), np.ones(6, dtype=np.int64)
    jobs = Jobs(everyone, 0 * ones, 0 * ones, ones, ones, 0.1 * ones, ones)
    keys = job_keys(0, "train", *jobs[:3], torch.device("cpu"))
    x = vector.x[None]

    def work(augment):
        oracle = oracles.make("vmap", vector, fs.losses.cross_entropy, each)
        return Work(oracle, Sampler(clients, 5, "replacement"), jobs, keys, Local(augment=augment))

    plain, blank = work(None), work(lambda inputs, keys: torch.zeros_like(inputs))
    with torch.no_grad():
        assert torch.equal(plain.gradient(x), blank.gradient(x))
        assert torch.equal(plain.loss(x), blank.loss(x))
        assert torch.equal(plain.smoothness(x, 3), blank.smoothness(x, 3))
        assert not torch.equal(plain.gradient(x, full=False), blank.gradient(x, full=False))
        assert not torch.equal(plain.descend(x), blank.descend(x))


def test_a_checkpoint_remembers_the_augmentation(tmp_path):
    augmented(folder=tmp_path / "run", rounds=2)
    refused(
        "its augment is CropFlip\\(padding=2",
        augmented,
        folder=tmp_path / "run",
        resume=True,
        augment=fs.data.crop_flip(3),
    )
    resumed = augmented(folder=tmp_path / "run", resume=True)
    assert torch.equal(resumed.x, augmented().x)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(augment=3), "augment must be a function \\(inputs, keys\\)"),
        (dict(batch_size=None), "batch_size=None asks for none"),
        (dict(augment=lambda inputs, keys: inputs[..., :4]), "of the shape and type it is given"),
        (dict(augment=lambda inputs: inputs), "augment cannot take the clients' inputs"),
        (dict(augment=fs.data.crop_flip(fill=(1, 2))), "one fill in all or one a channel; .* shape \\(1, 8, 8\\)"),
    ],
)
def test_augmentations_that_cannot_be(changes, words):
    refused(words, augmented, **changes)


def test_crop_flip_settings():
    refused("padding must be a whole number from 0", fs.data.crop_flip, -1)
    refused("fill must be a number", fs.data.crop_flip, 4, "black")


# The real files, where they are


@pytest.mark.parametrize(
    ("name", "shape", "counts", "mean"),
    [
        ("fashion-mnist", (60000, 1, 28, 28), [6000] * 10, [0.28604]),
        ("mnist", (60000, 1, 28, 28), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], [0.13066]),
        ("cifar-10", (50000, 3, 32, 32), [5000] * 10, [0.49140, 0.48216, 0.44653]),
        ("cifar-100", (50000, 3, 32, 32), [500] * 100, [0.50707, 0.48655, 0.44092]),
        ("a9a", (32561, 123), [24720, 7841], None),
    ],
)
def test_real_files(name, shape, counts, mean):
    folder = Path(REAL or "/nonexistent") / files.SOURCES[name].folder
    if not folder.is_dir():
        pytest.skip(f"{name} is not in the folder that FEDSTRIDE_DATA names")
    dataset = fs.data.load(name, normalise=False)
    assert dataset.train.inputs.shape == shape and dataset.train.targets.bincount().tolist() == counts
    assert len(dataset.test.targets) == (16281 if name == "a9a" else 10000)
    if mean is None:
        assert float(dataset.train.inputs.sum(1).mean()) == pytest.approx(13.869, abs=1e-3)
    else:
        assert dataset.train.inputs.mean((0, 2, 3)).tolist() == pytest.approx(mean, abs=1e-4)
