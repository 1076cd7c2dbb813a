"""Who holds which training examples. Every function deals a data set out to clients and returns `fs.Clients`.

The clients share one table of examples, so nothing is copied. Every example goes to at most one client, nobody is left
empty, and the same seed gives the same partition everywhere.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstride.checkpoint import write_whole
from fedstride.clients import Clients
from fedstride.data import Dataset, Examples
from fedstride.errors import FedstrideError
from fedstride.inputs import real, whole
from fedstride.keys import generator

DRAWS = 1000  # of a partition in which somebody has too little, before giving up


def iid(dataset: Dataset | Examples, clients: int, seed: int = 0) -> Clients:
    """Equal shares (to one example) of a shuffled data set."""
    train, rng = _start(dataset, clients, "iid", seed)
    return _deal(train, np.array_split(rng.permutation(len(train.targets)), clients))


def quantity(dataset: Dataset | Examples, clients: int, sigma: float, seed: int = 0) -> Clients:
    """Sizes in proportion to log-normal(0, sigma) draws, labels alike."""
    train, rng = _start(dataset, clients, "quantity", seed)
    draws = rng.normal(0, real("sigma", sigma, 0), clients)
    shares = np.exp(draws - draws.max())
    spare = len(train.targets) - clients  # beyond the one example that everybody has
    return _deal(train, np.split(rng.permutation(len(train.targets)), _cuts(shares, spare) + np.arange(1, clients)))


def dirichlet(
    dataset: Dataset | Examples, clients: int, alpha: float, seed: int = 0, minimum: int = 10, balance: bool = False
) -> Clients:
    """Every class dealt out in shares drawn from Dirichlet(alpha, ..., alpha); a small alpha gives skewed labels.

    minimum: drawn again until everybody has so many examples. balance: the rule of FedaGrac's official code, by which a
    client that already holds an equal share of all the data gets nothing of the later classes.
    """
    train, rng = _start(dataset, clients, "dirichlet", seed)
    minimum = whole("minimum", minimum)
    if not real("alpha", alpha) > 0:
        raise FedstrideError(f"dirichlet needs a positive alpha, not {alpha!r}")
    pools = _by_class(train, rng)
    fair = len(train.targets) / clients
    for _ in range(DRAWS if minimum <= fair else 0):
        held, cuts = np.zeros(clients, dtype=np.int64), []
        for pool in pools:
            shares = rng.dirichlet(np.full(clients, alpha))
            if balance:
                shares *= held < fair
            if not shares.any():  # all would go to those who may not have it
                break
            cuts.append(_cuts(shares, len(pool)))
            held += np.diff(cuts[-1], prepend=0, append=len(pool))
        if len(cuts) == len(pools) and held.min() >= minimum:
            pieces = [np.split(pool, cut) for pool, cut in zip(pools, cuts)]
            return _deal(train, [np.concatenate(parts) for parts in zip(*pieces)])
    raise FedstrideError(
        f"no draw gives each of {clients} clients {minimum} of the {len(train.targets)} examples; use a larger alpha "
        f"than {alpha:g}, fewer clients or a smaller minimum"
    )


def classes(dataset: Dataset | Examples, clients: int, k: int, seed: int = 0) -> Clients:
    """Every client has k random classes, the same number of examples of each; every class has as many owners.

    Where classes differ in size or owners, what is left of the larger ones is used by nobody.
    """
    train, rng = _start(dataset, clients, "classes", seed)
    pools = _by_class(train, rng)
    if not 1 <= whole("k", k) <= len(pools):
        raise FedstrideError(f"k must be a number of classes from 1 to {len(pools)}, not {k!r}")
    places = np.full(len(pools), clients * k // len(pools))  # owners that each class still looks for
    places[rng.permutation(len(pools))[: clients * k % len(pools)]] += 1
    volume = min(len(pool) // owners for pool, owners in zip(pools, places) if owners)
    if volume == 0:
        raise FedstrideError(f"some class has fewer examples than the {places.max()} clients that share it")
    parts = []
    for left in range(clients, 0, -1):
        # Random, in proportion to the places left; but a class with a place for everybody who is left must be taken.
        with np.errstate(divide="ignore"):
            turn = np.where(places == left, 0, rng.exponential(size=len(pools)) / places)
        mine = np.sort(np.argsort(turn)[:k])
        places[mine] -= 1
        parts.append(np.concatenate([pools[c][places[c] * volume :][:volume] for c in mine]))
    return _deal(train, parts)


def shards(dataset: Dataset | Examples, clients: int, per_client: int, seed: int = 0) -> Clients:
    """Sorted by label and cut into equal shards, of which every client gets `per_client` at random (FedAvg's paper)."""
    train, rng = _start(dataset, clients, "shards", seed)
    count = clients * whole("per_client", per_client)
    if count > len(train.targets):
        raise FedstrideError(f"{len(train.targets)} examples cannot be cut into {count} shards")
    pieces = np.array_split(np.concatenate(_by_class(train, rng)), count)
    owned = rng.permutation(count).reshape(clients, per_client)
    return _deal(train, [np.concatenate([pieces[piece] for piece in mine]) for mine in owned])


def fedveca(dataset: Dataset | Examples, clients: int, case: int, seed: int = 0) -> Clients:
    """The three cases of FedVeca's paper.

    1: iid. 2: label l belongs to client l mod `clients`, so that everybody has one label, or a few if there are more
    labels than clients. 3: the lower half of the labels is spread iid over the first half of the clients, the upper
    half goes to the others as in case 2 (five clients: three share 0 to 4, the fourth has 6 and 8, the fifth 5, 7 and
    9). With more clients than labels, those whose numbers are equal modulo the number of labels share one place.
    """
    if case == 1:
        return iid(dataset, clients, seed)
    train, rng = _start(dataset, clients, "FedVeca", seed)
    pools = _by_class(train, rng)
    places = min(clients, len(pools))
    if case not in (2, 3) or (case == 3 and places < 2):
        raise FedstrideError(f"case must be 1, 2 or 3 (which needs two clients and two labels), not {case!r}")
    first = -(-places // 2) if case == 3 else 0
    low = [pool for label, pool in enumerate(pools) if case == 3 and label < (len(pools) - 1) / 2]
    held = [[part] for part in np.array_split(rng.permutation(np.concatenate(low)), first)] if low else []
    held += [[] for _ in range(places - first)]
    for label in range(len(low), len(pools)):
        held[first + label % (places - first)].append(pools[label])
    parts: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * clients
    for place, mine in enumerate(held):
        sharing = range(place, clients, places)
        for client, part in zip(sharing, np.array_split(rng.permutation(np.concatenate(mine)), len(sharing))):
            parts[client] = part
    return _deal(train, parts)


def natural(dataset: Dataset | Examples, column: Sequence[Any] | np.ndarray) -> Clients:
    """One client for each distinct value of a column with one value a training example (a writer, a hospital)."""
    train = _train(dataset, "natural")
    values = np.asarray(column)
    if values.shape != train.targets.shape[:1]:
        raise FedstrideError(f"natural needs one value for each of {len(train.targets)} examples, not {values.shape}")
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return _deal(train, np.split(np.argsort(group, kind="stable"), np.cumsum(sizes)[:-1]))


def counts(clients: Clients) -> np.ndarray:
    """[clients, classes]: how many examples of each class everybody holds."""
    labels = _labels(clients.targets)
    width = int(labels.max()) + 1
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    cells = owner * width + labels[clients.order.cpu().numpy()]
    return np.bincount(cells, minlength=len(clients) * width).reshape(-1, width)


def picture(clients: Clients, path: str | os.PathLike | None = None):
    """Clients against classes, a bubble's area the number of examples: a matplotlib figure, saved where `path` says."""
    try:
        figures = import_module("matplotlib.figure")
    except ImportError:
        raise FedstrideError("a picture needs matplotlib, which is not installed: pip install matplotlib") from None
    table = counts(clients)
    figure = figures.Figure(
        figsize=(np.clip(1.5 + 0.16 * table.shape[0], 4, 18), np.clip(1.2 + 0.25 * table.shape[1], 2.5, 12)),
        layout="constrained",
    )
    axes = figure.add_subplot()
    client, label = np.nonzero(table)
    cell = 72 * min(figure.get_figwidth() / table.shape[0], figure.get_figheight() / table.shape[1])
    largest = np.clip(1.2 * cell, 9, 22) ** 2  # bubbles may overlap where clients are many, but never vanish
    axes.scatter(client, label, s=table[client, label] / table.max() * largest, alpha=0.7, linewidths=0)
    axes.set(xlabel="client", ylabel="class", xlim=(-0.9, table.shape[0] - 0.1), ylim=(-0.9, table.shape[1] - 0.1))
    axes.set_title(f"{table.sum():,} examples; the largest bubble is {table.max():,}", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    if path is not None:
        try:
            data = BytesIO()
            figure.savefig(data, format=Path(path).suffix[1:] or "png", dpi=150)
            write_whole(Path(path), data.getvalue())
        except (OSError, ValueError) as error:
            raise FedstrideError(f"cannot save the picture as {path}: {error}") from None
    return figure


def _start(dataset: Any, clients: int, rule: str, seed: int) -> tuple[Examples, np.random.Generator]:
    """The training examples and the generator of one partition."""
    train = _train(dataset, rule)
    if whole("clients", clients) > len(train.targets):
        raise FedstrideError(f"{len(train.targets)} examples are too few for {clients} clients")
    return train, generator(whole("seed", seed, 0), "partition", rule)


def _train(dataset: Any, rule: str) -> Examples:
    if not isinstance(dataset, (Dataset, Examples)):
        raise FedstrideError(f"{rule} needs a data set, such as fs.data.load('digits'), not {type(dataset).__name__}")
    return dataset.train if isinstance(dataset, Dataset) else dataset


def _labels(targets: torch.Tensor) -> np.ndarray:
    if targets.dim() != 1 or targets.is_floating_point() or int(targets.min()) < 0:
        raise FedstrideError("partitions by class need targets that are whole numbers from 0, one an example")
    return targets.cpu().numpy()


def _by_class(train: Examples, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows of every class that occurs, shuffled, in the order of the labels."""
    labels = _labels(train.targets)
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def _cuts(shares: np.ndarray, total: int) -> np.ndarray:
    """Where to cut `total` things into pieces in proportion to the shares, to the nearest thing."""
    ends = np.cumsum(shares)
    return np.rint(ends[:-1] / ends[-1] * total).astype(np.int64)


def _deal(train: Examples, parts: Sequence[np.ndarray]) -> Clients:
    return Clients(train.inputs, train.targets, torch.as_tensor(np.concatenate(parts)), [len(part) for part in parts])
