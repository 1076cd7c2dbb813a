"""What the server sees of a round's replies: weighted means, totals, scalars, and rows only where a method asks."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
        self._sums: dict[str, Tensor] = {}  # field -> [2, d]: by aggregation factor, by fleet weight

    def add(self, jobs: Jobs, upload: Any) -> None:
        """Take in the accepted replies of a batch."""
        device = self._weights.device
        clients = torch.as_tensor(jobs.clients, device=device)
        weights = self._weights[clients]
        times = torch.as_tensor(jobs.times, device=device, dtype=torch.float64)
        factors = times if self._by_weight else times * weights
        self._clients.append(clients)
        self._factors.append(factors)
        columns = (jobs.steps, jobs.targets, jobs.lr, jobs.versions + 1, self._version - jobs.versions)
        header = Header(*(torch.as_tensor(column, device=device, dtype=torch.float64) for column in columns))
        for name, values in header._asdict().items():
            self._scalars[name].append(values)
        discount = self._factor(header)
        self._discounts.append(torch.ones_like(factors) if discount is None else discount)
        both = torch.stack([factors if discount is None else factors * discount, weights])
        for name, value in zip(upload._fields if upload else (), upload):
            if name in Header._fields:
                raise FedstrideError(f"an upload field must not be called {name!r}: every reply has that already")
            if value.shape[1] == 1:
                self._scalars.setdefault(name, []).append(value[:, 0])
                if self._d > 1:  # a model of one parameter has vectors that look like scalars: they are both
                    continue
            if self._keep_rows:
                self._rows.setdefault(name, []).append(value)
            more = both.to(value.dtype) @ value
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
            return self._sums[field][1]
        values = self.each(field)
        return (self.weights.to(values.dtype) * values).sum()
