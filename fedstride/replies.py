"""What the server sees of a round's replies: weighted means, totals, scalars, and rows only where a method asks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstride.errors import FedstrideError
from fedstride.sampling import Jobs


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
    good = torch.ones(count, dtype=torch.bool)
    for value in upload or ():
        good &= torch.isfinite(value.sum(dim=1)).cpu()
    return good.numpy()


class Replies:
    """A streaming reduction over the replies of one exchange.

    * `mean(f)`: the round's aggregation factors, which sum to one and count multiplicity; each term is also multiplied
      by the method's own `factor`, such as a discount for staleness, if it has one.
    * `total(f)`: sum over distinct reporters of the *fleet* weight w_i times f_i. Every server vector that sums client
      memories moves by it; a mean would be wrong under unequal weights and partial participation.
    * `each(f)`: one number a reporter, for scalar fields and for the columns of `Header`.
    * `rows(f)`: one vector a reporter, only for methods that declare `needs_rows`.
    """

    def __init__(
        self,
        weights: Tensor,
        d: int,
        by_weight: bool,
        keep_rows: bool,
        version: int = 0,
        factor: Factor = lambda header: None,
    ):
        self._weights = weights  # [N], float64
        self._version = version  # server updates so far
        self._factor = factor
        self._d = d  # length of the model's vector
        self._by_weight = by_weight  # the draw carried the weights already
        self._keep_rows = keep_rows
        self._clients: list[Tensor] = []
        self._factors: list[Tensor] = []
        self._discounts: list[Tensor] = []
        self._scalars: dict[str, list[Tensor]] = {name: [] for name in Header._fields}
        self._rows: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}  # field -> [2, d]: by aggregation factor, by fleet weight; or [1, d]

    def reduce(self, jobs: Jobs, upload: Any, used: np.ndarray, size: int) -> Reduced:
        """The used ones of a batch of uploads, summed by their factors; nothing is taken in yet."""
        if not used.all():
            jobs, mask = jobs.take(used), torch.as_tensor(used, device=self._weights.device)
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
        both = self.factor_rows(jobs)
        sums = {name: both.to(value.dtype) @ value for name, value in vectors.items()}
        return Reduced(used, size, scalars, vectors if self._keep_rows else {}, sums)

    def factor_rows(self, jobs: Jobs) -> Tensor:
        """[2, R]: what every reply's vectors are multiplied with in `mean` and `total`; one row where both agree."""
        weights, factors, header = self._columns(jobs)
        discount = self._factor(header)
        both = torch.stack([factors if discount is None else factors * discount, weights])
        return both[:1] if torch.equal(both[0], both[1]) else both

    def _columns(self, jobs: Jobs) -> tuple[Tensor, Tensor, Header]:
        """[R] each: fleet weights, aggregation factors before they are divided by their sum, and the header."""
        device = self._weights.device
        weights = self._weights[torch.as_tensor(jobs.clients, device=device)]
        times = torch.as_tensor(jobs.times, device=device, dtype=torch.float64)
        columns = (jobs.steps, jobs.targets, jobs.lr, jobs.versions + 1, self._version - jobs.versions)
        header = Header(*(torch.as_tensor(column, device=device, dtype=torch.float64) for column in columns))
        return weights, times if self._by_weight else times * weights, header

    def add(self, jobs: Jobs, upload: Reduced) -> None:
        """Take in a batch; the jobs are those of the used uploads."""
        _, factors, header = self._columns(jobs)
        discount = self._factor(header)
        self._clients.append(torch.as_tensor(jobs.clients, device=self._weights.device))
        self._factors.append(factors)
        self._discounts.append(torch.ones_like(factors) if discount is None else discount)
        for name, values in (header._asdict() | upload.scalars).items():
            self._scalars.setdefault(name, []).append(values)
        for name, value in upload.rows.items():
            self._rows.setdefault(name, []).append(value)
        for name, more in upload.sums.items():
            self._sums[name] = self._sums[name] + more if name in self._sums else more

    def __len__(self) -> int:
        return sum(len(part) for part in self._clients)

    @property
    def clients(self) -> Tensor:
        """[R]: who reported."""
        return torch.cat(self._clients)

    @property
    def factors(self) -> Tensor:
        """[R]: the aggregation factors, which sum to one."""
        factors = torch.cat(self._factors)
        return factors / factors.sum()

    @property
    def discount(self) -> Tensor:
        """The mean of the method's own factors."""
        return (self.factors * torch.cat(self._discounts)).sum()

    @property
    def weights(self) -> Tensor:
        """[R]: the reporters' fleet weights."""
        return self._weights[self.clients]

    def each(self, field: str) -> Tensor:
        """[R]: a scalar field of every reporter."""
        return torch.cat(self._scalars[field])

    def rows(self, field: str) -> Tensor:
        """[R, d]: a vector field of every reporter."""
        return torch.cat(self._rows[field])

    def mean(self, field: str) -> Tensor:
        """Mean of a field by aggregation factors."""
        if field in self._sums:
            return self._sums[field][0] / float(torch.cat(self._factors).sum())
        values = self.each(field)
        return ((self.factors * torch.cat(self._discounts)).to(values.dtype) * values).sum()

    def total(self, field: str) -> Tensor:
        """Sum of a field by fleet weights."""
        if field in self._sums:
            return self._sums[field][-1]
        values = self.each(field)
        return (self.weights.to(values.dtype) * values).sum()
