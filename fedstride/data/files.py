"""Data sets by name: found in a folder, downloaded where missing, checked, and read.

The folder is the one that the environment variable FEDSTRIDE_DATA names, otherwise `~/.cache/fedstride`; every set has
its official layout below it.
"""

import gzip
import hashlib
import io
import os
import sys
import tarfile
import urllib.request
import zlib
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedstride.checkpoint import write_whole
from fedstride.data.dataset import Dataset, Examples, from_arrays, pixels
from fedstride.errors import FedstrideError, unknown
from fedstride.keys import generator


class Source(NamedTuple):
    """The files of one set."""

    folder: str  # below the data folder
    address: str  # of the folder the files come from, or of an archive that holds them
    files: dict[str, str]  # names and SHA-256


SOURCES = {
    "fashion-mnist": Source(
        "fashion-mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
    "mnist": Source(  # the mirror that torchvision uses, since the original address no longer serves the files
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "cifar-10": Source(
        "cifar-10-batches-bin",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        {
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
    ),
    "cifar-100": Source(
        "cifar-100-binary",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        {
            "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
    ),
    "a9a": Source(
        "a9a",
        "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/",
        {
            "a9a": "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
            "a9a.t": "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
        },
    ),
}
NAMES = ("digits", *SOURCES, "svmlight")
# Mean and standard deviation as the papers' official code has them: Fashion-MNIST with MNIST's, CIFAR-10 with the mean
# of the images' own deviations. CIFAR-100 has the usual ones, because no paper states its own.
CONSTANTS = {
    "fashion-mnist": ((0.1307,), (0.3081,)),
    "mnist": ((0.1307,), (0.3081,)),
    "cifar-10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar-100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}
DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR_10 = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
CIFAR_100 = tuple(
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
    "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
    "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
    "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm".split()
)


def load(
    name: str = "digits",
    *,
    normalise: bool = True,
    path: str | os.PathLike | None = None,
    test: str | os.PathLike | None = None,
    features: int | None = None,
) -> Dataset:
    """A data set by name: digits (comes with scikit-learn), fashion-mnist, mnist, cifar-10, cifar-100, a9a, svmlight.

    normalise: subtract and divide by the papers' constants (`Dataset.mean`, `.std`); False leaves pixels in [0, 1].
    path, test, features: for svmlight, a file to train on, another to test with, and the number of features.
    """
    if name not in NAMES:
        raise FedstrideError(unknown("data set", name, NAMES))
    if (name == "svmlight") != (path is not None) or (path is None and (test, features) != (None, None)):
        raise FedstrideError("path, test and features belong to load('svmlight', path=...), which needs a path")
    if name == "digits":
        return _digits()
    if name == "svmlight":
        assert path is not None
        paths = [Path(one) for one in (path, test) if one is not None]
        return _svmlight("svmlight", paths, [_read(one) for one in paths], features)
    data = _fetch(name)
    if name == "a9a":
        return _svmlight(name, list(data), list(data.values()), 123)
    dataset = _cifar(name, data) if name.startswith("cifar") else _idx(name, data)
    return dataset.normalised(*CONSTANTS[name]) if normalise else dataset


def folder() -> Path:
    """Where data sets are looked for."""
    return Path(os.environ.get("FEDSTRIDE_DATA") or "~/.cache/fedstride").expanduser()


def _fetch(name: str) -> dict[str, bytes]:
    """The contents of a set's files by their paths, in the order of the table."""
    source = SOURCES[name]
    place = folder() / source.folder
    missing = [file for file in source.files if not (place / file).is_file()]
    if missing:
        _download(name, source, place, missing)
    found = {str(place / file): _read(place / file) for file in source.files}
    for (path, data), right in zip(found.items(), source.files.values()):
        if hashlib.sha256(data).hexdigest() != right:
            raise FedstrideError(f"{path} does not match its checksum; delete it, and it will be downloaded again")
    return found


def _download(name: str, source: Source, place: Path, missing: list[str]) -> None:
    """Bring the missing files; each appears whole and right, or not at all."""
    sys.stderr.write(f"downloading {name} from {source.address}\n")
    try:
        if source.address.endswith(".tar.gz"):
            with tarfile.open(fileobj=io.BytesIO(_get(source.address))) as archive:
                members = {file: archive.extractfile(f"{source.folder}/{file}") for file in missing}
                found = {file: member.read() for file, member in members.items() if member}
        else:
            found = {file: _get(source.address + file) for file in missing}
        for file in missing:
            if hashlib.sha256(found[file]).hexdigest() != source.files[file]:
                raise FedstrideError(f"{file} as downloaded from {source.address} does not match its checksum")
        place.mkdir(parents=True, exist_ok=True)
        for file, data in found.items():
            own = place / f"{file}.{os.getpid()}"  # another process may be downloading the same file
            write_whole(own, data)
            os.replace(own, place / file)
    except (OSError, HTTPException, KeyError, EOFError, zlib.error, tarfile.TarError) as error:
        raise FedstrideError(
            f"{name} is not complete in {place} and could not be downloaded ({error}); put {', '.join(missing)} there, "
            f"from {source.address}"
        ) from None


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FedstrideError(f"cannot read {path}: {error.strerror}") from None


def _digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels; a fifth of them, the same always, is for testing."""
    datasets = _sklearn("the digits come")
    images, labels = datasets.load_digits(return_X_y=True)
    inputs = torch.as_tensor((images / 16).astype(np.float32)).view(-1, 1, 8, 8)
    targets = torch.as_tensor(labels)
    order = torch.as_tensor(generator(0, "digits").permutation(len(labels)))
    train, test = (Examples(inputs[part], targets[part]) for part in (order[360:], order[:360]))
    return from_arrays(train, test, name="digits")


def _idx(name: str, files: dict[str, bytes]) -> Dataset:
    """The format of MNIST: big-endian sizes, then bytes, all in gzip."""
    classes = FASHION if name == "fashion-mnist" else DIGITS
    paths, arrays = list(files), []
    for path, dimensions in zip(paths, (3, 1, 3, 1)):
        try:
            raw = gzip.decompress(files[path])
        except (OSError, EOFError, zlib.error):
            raise FedstrideError(f"{path} is damaged: it is not a complete gzip file") from None
        magic, start = bytes([0, 0, 8, dimensions]), 4 + 4 * dimensions
        if raw[:4] != magic or len(raw) < start:
            raise FedstrideError(f"{path} is not an idx file: it begins with {raw[:4].hex()}, not with {magic.hex()}")
        shape = np.frombuffer(raw, ">i4", dimensions, 4)
        body = np.frombuffer(raw, np.uint8, offset=start)
        if body.size != shape.prod():
            raise FedstrideError(f"{path} is damaged: it holds {body.size} values, its header says {shape.prod()}")
        arrays.append(body.reshape(shape))
    for i in (0, 2):
        if len(arrays[i]) != len(arrays[i + 1]):
            raise FedstrideError(f"{paths[i]} has {len(arrays[i])} images, {paths[i + 1]} {len(arrays[i + 1])} labels")
    train, test = (Examples(pixels(arrays[i]), _labels(paths[i + 1], arrays[i + 1], classes)) for i in (0, 2))
    return Dataset(name, train, test, classes)


def _cifar(name: str, files: dict[str, bytes]) -> Dataset:
    """The binary version: one label byte (CIFAR-100: coarse, then fine), then 32 x 32 red, green and blue bytes."""
    head, classes = (1, CIFAR_10) if name == "cifar-10" else (2, CIFAR_100)
    images, labels = [], []
    for path, data in files.items():
        if not data or len(data) % (head + 3072):
            raise FedstrideError(f"{path} is damaged: {len(data)} bytes are not a number of {head + 3072}-byte records")
        records = np.frombuffer(data, np.uint8).reshape(-1, head + 3072)
        labels.append(_labels(path, records[:, head - 1], classes))
        images.append(records[:, head:].reshape(-1, 3, 32, 32))
    train = Examples(pixels(np.concatenate(images[:-1])), torch.cat(labels[:-1]))
    return Dataset(name, train, Examples(pixels(images[-1]), labels[-1]), classes)


def _labels(path: str, labels: np.ndarray, classes: tuple[str, ...]) -> torch.Tensor:
    if labels.max(initial=0) >= len(classes):
        raise FedstrideError(f"{path} is damaged: it has label {labels.max()}; there are {len(classes)} classes")
    return torch.from_numpy(labels.astype(np.int64))


def _svmlight(name: str, paths: Sequence[str | Path], contents: list[bytes], features: int | None) -> Dataset:
    """Text `label index:value ...`; labels that are whole numbers become classes in their order (-1, 1 become 0, 1)."""
    datasets = _sklearn("svmlight files are read")
    try:
        loaded = datasets.load_svmlight_files([io.BytesIO(data) for data in contents], n_features=features)
    except ValueError as error:
        raise FedstrideError(
            f"{' or '.join(map(str, paths))} is not an svmlight file: {str(error).splitlines()[0]}"
        ) from None
    inputs = [torch.as_tensor(matrix.toarray().astype(np.float32)) for matrix in loaded[::2]]
    raw = loaded[1::2]
    if not (raw[0] % 1 == 0).all():
        return from_arrays(*zip(inputs, [values.astype(np.float32) for values in raw]), name=name)
    values = np.unique(raw[0])
    for path, labels in zip(paths, raw):
        for label in np.setdiff1d(labels, values):
            raise FedstrideError(f"{path} has label {label:g}, which the training file does not have")
    targets = [np.searchsorted(values, labels) for labels in raw]
    return from_arrays(*zip(inputs, targets), name=name, classes=[f"{value:g}" for value in values])


def _sklearn(what: str):
    try:
        from sklearn import datasets
    except ImportError:
        raise FedstrideError(f"{what} with scikit-learn, which is not installed: pip install scikit-learn") from None
    return datasets
