"""What the server sees of a round's replies: weighted means, totals, scalars, and rows only where a method asks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstride.errors import FedstrideError
from fedstride.sampling import Jobs
from fedstride.transfer import there


class Header(NamedTuple):
    """What every reply carries: [R] columns of numbers."""

    steps: Tensor  # local steps done
    target: Tensor  # steps asked for
    lr: Tensor
    round: Tensor  # of the model it started from, counted from 1
    staleness: Tensor  # server updates since that model


Factor = Callable[[Header], Tensor | None]


class Reduced(NamedTuple):
    """A batch of uploads as the server needs them: no longer one vector a client, unless the method asks for that."""

    used: np.ndarray  # [C]: whose upload is used; the others are not in what follows
    bytes: int  # that travelled, of all C
    scalars: dict[str, Tensor]  # [R] each
    rows: dict[str, Tensor]  # [R, d] each, only where the method needs them
    sums: dict[str, Tensor]  # [2, d] each: by aggregation factor, by fleet weight; [1, d] where these are the same


def joined(parts: Sequence[Reduced], places: Sequence[np.ndarray]) -> Reduced:
    """Parts of a batch as one; `places` says which rows of the batch a part was. Sums are added in the order given."""
    if len(parts) == 1:
        return parts[0]
    back = np.concatenate(places).argsort()
    used = np.concatenate([part.used for part in parts])
    # Of the rows one part after the other, the used ones in the order of the batch.
    order = torch.as_tensor((used.cumsum() - 1)[back][used[back]])
    columns: list[dict[str, Tensor]] = []
    for together in ([part.scalars for part in parts], [part.rows for part in parts]):
        found = {name: [column[name] for column in together if name in column] for name in _names(together)}
        columns.append({name: torch.cat(values)[order.to(values[0].device)] for name, values in found.items()})
    sums: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.sums.items():
            sums[name] = sums[name] + value if name in sums else value
    return Reduced(used[back], sum(part.bytes for part in parts), columns[0], columns[1], sums)


def _names(columns: list[dict[str, Tensor]]) -> list[str]:
    return list(dict.fromkeys(name for column in columns for name in column))


def finite(upload: Any, count: int) -> np.ndarray:
    """[C]: whose upload has only finite numbers. A row's sum is not finite if any of its entries is not."""
    if isinstance(upload, Reduced):
        return upload.used
    if not upload:
        return np.ones(count, dtype=bool)
    return np.isfinite(torch.stack([value.sum(dim=1) for value in upload]).cpu().numpy()).all(axis=0)


def finite_and_losses(upload: Any, losses: Tensor | None, count: int) -> tuple[np.ndarray, Tensor | None]:
    """`finite`, and the losses [C] of training, read in one go where they lie with the upload: a GPU is waited for."""
    if isinstance(upload, Reduced) or not upload or losses is None or losses.device != upload[0].device:
        return finite(upload, count), losses
    read = torch.stack([*(value.sum(dim=1) for value in upload), losses]).cpu().numpy()
    return np.isfinite(read[:-1]).all(axis=0), torch.from_numpy(read[-1])


class Columns(NamedTuple):
    """The numbers of a batch of replies: [R] each."""

    clients: np.ndarray
    weights: np.ndarray  # of the fleet
    factors: np.ndarray  # of the aggregation, before they are divided by their sum
    discounts: np.ndarray | None  # the method's own factors; None: all are one
    header: Header  # on the CPU


class Replies:
    """A streaming reduction over the replies of one exchange.

    * `mean(f)`: the round's aggregation factors, which sum to one and count multiplicity; each term is also multiplied
      by the method's own `factor`, such as a discount for staleness, if it has one.
    * `total(f)`: sum over distinct reporters of the *fleet* weight w_i times f_i. Every server vector that sums client
      memories moves by it; a mean would be wrong under unequal weights and partial participation.
    * `each(f)`: one number a reporter, for scalar fields and for the columns of `Header`.
    * `rows(f)`: one vector a reporter, only for methods that declare `needs_rows`.

    Numbers stay on the CPU until a method asks for them: on a GPU every little transfer holds up the next round.
    """

    def __init__(
        self,
        weights: np.ndarray,
        d: int,
        by_weight: bool,
        keep_rows: bool,
        version: int = 0,
        factor: Factor = lambda header: None,
        device: torch.device | str = "cpu",
    ):
        self._weights = weights  # [N]
        self._version = version  # server updates so far
        self._factor = factor
        self._d = d  # length of the model's vector
        self._by_weight = by_weight  # the draw carried the weights already
        self._keep_rows = keep_rows
        self._device = device
        self._columns: list[Columns] = []
        self._latest: tuple[Jobs, Columns] | None = None  # those of the batch that was reduced last
        self._scalars: dict[str, list[Tensor]] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}  # field -> [2, d]: by aggregation factor, by fleet weight; or [1, d]

    def reduce(self, jobs: Jobs, upload: Any, used: np.ndarray, size: int) -> Reduced:
        """The used ones of a batch of uploads, summed by their factors; nothing is taken in yet."""
        if not used.all():
            jobs, mask = jobs.take(used), there(used, self._device)
            upload = type(upload)(*(value[mask] for value in upload))
        scalars: dict[str, Tensor] = {}
        vectors: dict[str, Tensor] = {}
        for name, value in zip(upload._fields if upload else (), upload):
            if name in Header._fields:
                raise FedstrideError(f"an upload field must not be called {name!r}: every reply has that already")
            if value.shape[1] == 1:
                scalars[name] = value[:, 0]
                if self._d > 1:  # a model of one parameter has vectors that look like scalars: they are both
                    continue
            vectors[name] = value
        sums: dict[str, Tensor] = {}
        if vectors:
            both = self.factor_rows(jobs, next(iter(vectors.values())).dtype)
            sums = {name: both.to(value.dtype) @ value for name, value in vectors.items()}
        return Reduced(used, size, scalars, vectors if self._keep_rows else {}, sums)

    def factor_rows(self, jobs: Jobs, dtype: torch.dtype | None = None) -> Tensor:
        """[2, R]: what every reply's vectors are multiplied with in `mean` and `total`; one row where both agree."""
        _, weights, factors, discounts, _ = self._numbers(jobs)
        factors = factors if discounts is None else factors * discounts
        same = np.array_equal(factors, weights)
        return there(factors[None] if same else np.stack([factors, weights]), self._device, dtype)

    def _numbers(self, jobs: Jobs) -> Columns:
        if self._latest is not None and self._latest[0] is jobs:
            return self._latest[1]
        weights, times = self._weights[jobs.clients], jobs.times.astype(np.float64)
        header = Header(
            *torch.from_numpy(
                np.stack([jobs.steps, jobs.targets, jobs.lr, jobs.versions + 1, self._version - jobs.versions])
            )
        )
        discount = self._factor(header)
        columns = Columns(
            jobs.clients, weights, times if self._by_weight else times * weights,
            None if discount is None else discount.numpy(), header,
        )  # fmt: skip
        self._latest = jobs, columns
        return columns

    def _there(self, numbers: np.ndarray) -> Tensor:
        return there(numbers, self._device)

    def add(self, jobs: Jobs, upload: Reduced) -> None:
        """Take in a batch; the jobs are those of the used uploads."""
        self._columns.append(self._numbers(jobs))
        for name, values in upload.scalars.items():
            self._scalars.setdefault(name, []).append(values)
        for name, value in upload.rows.items():
            self._rows.setdefault(name, []).append(value)
        for name, more in upload.sums.items():
            self._sums[name] = self._sums[name] + more if name in self._sums else more

    def __len__(self) -> int:
        return sum(len(part.clients) for part in self._columns)

    @property
    def shares(self) -> np.ndarray:
        """[R]: the aggregation factors, which sum to one."""
        factors = np.concatenate([part.factors for part in self._columns])
        return factors / factors.sum()

    @property
    def discounts(self) -> np.ndarray:
        """[R]: the method's own factors."""
        parts = (np.ones(len(p.clients)) if p.discounts is None else p.discounts for p in self._columns)
        return np.concatenate(list(parts))

    def header(self, field: str) -> np.ndarray:
        """[R]: a column of the header."""
        return np.concatenate([getattr(part.header, field).numpy() for part in self._columns])

    @property
    def clients(self) -> Tensor:
        """[R]: who reported."""
        return self._there(np.concatenate([part.clients for part in self._columns]))

    @property
    def factors(self) -> Tensor:
        """[R]: `shares` where the vectors are."""
        return self._there(self.shares)

    @property
    def discount(self) -> float:
        """The mean of the method's own factors."""
        return float((self.shares * self.discounts).sum())

    @property
    def weights(self) -> Tensor:
        """[R]: the reporters' fleet weights."""
        return self._there(np.concatenate([part.weights for part in self._columns]))

    def each(self, field: str) -> Tensor:
        """[R]: a scalar field of every reporter."""
        if field in Header._fields:
            return self._there(self.header(field))
        return torch.cat(self._found(self._scalars, field))

    def rows(self, field: str) -> Tensor:
        """[R, d]: a vector field of every reporter."""
        if field in self._sums and not self._keep_rows:
            raise FedstrideError(f"a method that looks at the rows of {field!r} must declare needs_rows = True")
        return torch.cat(self._found(self._rows, field))

    def _found(self, values: dict[str, list[Tensor]], field: str) -> list[Tensor]:
        if field not in values:
            known = [*self._sums, *self._scalars, *Header._fields]
            raise FedstrideError(f"the uploads have no field {field!r} of that kind; they have {', '.join(known)}")
        return values[field]

    def mean(self, field: str) -> Tensor:
        """Mean of a field by aggregation factors."""
        if field in self._sums:
            return self._sums[field][0] / sum(float(part.factors.sum()) for part in self._columns)
        values = self.each(field)
        return (self._there(self.shares * self.discounts).to(values.dtype) * values).sum()

    def total(self, field: str) -> Tensor:
        """Sum of a field by fleet weights."""
        if field in self._sums:
            return self._sums[field][-1]
        values = self.each(field)
        return (self.weights.to(values.dtype) * values).sum()
