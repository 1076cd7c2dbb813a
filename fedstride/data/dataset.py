"""What a data set is, and how to make one from arrays or from other people's tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstride.clients import Clients
from fedstride.errors import FedstrideError


class Examples(NamedTuple):
    """Inputs and targets, one row an example; it is the pair that `simulate(test=...)` takes."""

    inputs: Tensor
    targets: Tensor  # whole numbers from 0 for classes, floats for regression


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Examples to train on and to test with, and what is known about them."""

    name: str
    train: Examples
    test: Examples | None
    classes: tuple[str, ...]  # their names in the order of the targets; none for regression
    mean: tuple[float, ...] = (0.0,)  # inputs are (raw - mean) / std, with one pair of numbers for all channels or
    std: tuple[float, ...] = (1.0,)  # one for each; raw pixels lie in [0, 1]

    def __repr__(self) -> str:
        test = f" + {len(self.test.inputs)}" if self.test else ""
        shape = tuple(self.train.inputs.shape[1:])
        kind = f"{len(self.classes)} classes" if self.classes else "regression"
        return f"Dataset({self.name!r}, {len(self.train.inputs)}{test} examples of shape {shape}, {kind})"

    @property
    def black(self) -> tuple[float, ...]:
        """What a raw zero has become in each channel: the border that `crop_flip` should draw."""
        return tuple((0 - m) / s for m, s in zip(self.mean, self.std))

    def normalised(self, mean: Sequence[float], std: Sequence[float]) -> "Dataset":
        """The same examples with inputs (inputs - mean) / std, one pair of numbers in all or one a channel."""
        inputs = self.train.inputs
        channels = inputs.shape[1] if inputs.dim() > 1 else 1
        if len(mean) != len(std) or len(mean) not in (1, channels) or not all(s > 0 for s in std):
            raise FedstrideError(
                f"normalised needs one mean and one positive std, or {channels} of each, not {mean!r} and {std!r}"
            )
        if not inputs.is_floating_point():
            raise FedstrideError(f"normalised needs inputs that are floats, not {inputs.dtype}")
        shape = (-1, *[1] * (inputs.dim() - 2))
        m, s = (torch.tensor(values, dtype=inputs.dtype).view(shape) for values in (mean, std))

        def scaled(part: Examples) -> Examples:
            return Examples((part.inputs - m).div_(s), part.targets)

        return replace(
            self,
            train=scaled(self.train),
            test=scaled(self.test) if self.test else None,
            mean=tuple(np.add(self.mean, np.multiply(self.std, mean)).tolist()),
            std=tuple(np.multiply(self.std, std).tolist()),
        )


def from_arrays(
    train: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    *,
    name: str = "arrays",
    classes: Sequence[str] | None = None,
) -> Dataset:
    """Your own pairs (inputs, targets) of arrays or tensors, taken as they are.

    Whole-number targets in one column are classes, named by their numbers unless `classes` gives names.
    """
    first = _examples("train", train)
    second = None if test is None else _examples("test", test)
    if second and second.inputs.shape[1:] != first.inputs.shape[1:]:
        raise FedstrideError(
            f"test has examples of shape {tuple(second.inputs.shape[1:])}, train of {tuple(first.inputs.shape[1:])}"
        )
    labelled = first.targets.dim() == 1 and not first.targets.is_floating_point()
    if classes is None:
        classes = [str(label) for label in range(int(first.targets.max()) + 1)] if labelled else []
    for part, examples in (("train", first), ("test", second)):
        if examples and classes and not 0 <= int(examples.targets.min()) <= int(examples.targets.max()) < len(classes):
            wrong = [label for label in examples.targets.unique().tolist() if not 0 <= label < len(classes)]
            raise FedstrideError(
                f"{name} has label {wrong[0]} in its {part} targets; classes go from 0 to {len(classes) - 1}"
            )
    return Dataset(name, first, second, tuple(classes))


def from_huggingface(dataset: Any, *, inputs: str, targets: str, test: Any = None) -> Dataset:
    """A table of Hugging Face `datasets`, by the names of the two columns to use.

    dataset: a `datasets.Dataset` or anything else with columns, a dict of splits with a "train" (and a "test"), or the
    name of a set on the hub. Images become floats in [0, 1] with their channels first.
    """
    if isinstance(dataset, str):
        try:
            load_dataset = import_module("datasets").load_dataset
        except ImportError:
            raise FedstrideError(
                f"{dataset!r} is a name on the Hugging Face hub, which needs the package datasets: pip install datasets"
            ) from None
        dataset = load_dataset(dataset)
    if isinstance(dataset, Mapping) and "train" in dataset:
        dataset, test = dataset["train"], dataset.get("test") if test is None else test
    names = getattr((getattr(dataset, "features", None) or {}).get(targets), "names", None)
    name = getattr(getattr(dataset, "info", None), "dataset_name", None) or "huggingface"
    pairs = (None if table is None else _columns(table, inputs, targets) for table in (dataset, test))
    return from_arrays(*pairs, name=name, classes=names)  # type: ignore[arg-type]


def from_flower(partitions: Any, *, inputs: str, targets: str) -> Clients:
    """The clients of Flower Datasets: a `FederatedDataset` with one partitioner, a partitioner, or a list of tables."""
    if isinstance(partitions, (list, tuple)):
        tables = list(partitions)
    elif hasattr(partitions, "load_partition"):
        tables = [partitions.load_partition(0)]  # a FederatedDataset hands the data to its partitioners only now
        partitioners = getattr(partitions, "partitioners", None)
        (counter,) = [partitions] if partitioners is None else partitioners.values()
        tables += [partitions.load_partition(client) for client in range(1, counter.num_partitions)]
    else:
        raise FedstrideError(
            f"from_flower needs a FederatedDataset or a partitioner of Flower Datasets (pip install flwr-datasets), or "
            f"a list of tables, not {type(partitions).__name__}"
        )
    return Clients.from_arrays([_columns(table, inputs, targets) for table in tables])


def pixels(images: np.ndarray) -> Tensor:
    """Bytes [n, height, width] or [n, channels, height, width] as floats in [0, 1] with a channel dimension."""
    floats = torch.from_numpy(images.astype(np.float32, order="C")).div_(255)
    return floats[:, None] if floats.dim() == 3 else floats


def _examples(part: str, pair: Any) -> Examples:
    try:
        table = Clients.from_arrays([pair])
    except FedstrideError as error:
        raise FedstrideError(str(error).replace("client 0", part)) from None
    targets = table.targets if table.targets.is_floating_point() else table.targets.to(torch.int64)
    return Examples(table.inputs, targets)


def _columns(table: Any, inputs: str, targets: str) -> tuple[Any, Any]:
    """Two columns of a table as arrays."""
    names = getattr(table, "column_names", None) or (list(table) if isinstance(table, Mapping) else [])
    arrays = []
    for name in (inputs, targets):
        if name not in names:
            raise FedstrideError(f"the table has no column {name!r}; its columns are {', '.join(names) or 'not known'}")
        try:
            arrays.append(np.stack([np.asarray(one) for one in table[name]]))
        except ValueError:
            raise FedstrideError(f"column {name!r} is empty or has examples of different shapes") from None
    data, labels = arrays
    if data.dtype == np.uint8 and data.ndim == 4 and data.shape[-1] in (1, 3, 4):
        data = np.moveaxis(data, -1, 1)
    if data.dtype == np.uint8 and data.ndim in (3, 4):
        return pixels(data), labels
    return data.astype(np.float32) if data.dtype.kind == "f" else data, labels
