"""FedAsync."""

from typing import NamedTuple

from torch import Tensor, ones_like, where

from fedstride.algorithm import Algorithm, Params, check_choice, check_number, register
from fedstride.schedule import Buffered


class Local(NamedTuple):
    y: Tensor


@register("fedasync")
class FedAsync(Algorithm):
    """Every arriving model is mixed into the server's at once, the older the less.

    Paper: Xie, Koyejo, Gupta, "Asynchronous federated optimization", 2019, Algorithm 1.

    Rule: a client does K_i steps `y <- y - lr (g_i(y) + rho (y - x))`. On its arrival the server takes `x <- (1 - a s)
    x + a s y` with `a = mixing` and s by `staleness` tau, the server updates since the client started: "constant" 1;
    "polynomial" `(1 + tau)^-exponent`; "hinge" 1 up to `after`, then `1 / (slope (tau - after) + 1)`.

    Deviations: under another schedule with several replies at once, `x <- x + a mean(s_i (y_i - x))`.

    Limits: mixing 1, one client, no delay: its own SGD. Rests where clients weigh as often as they arrive.
    """

    weights = "uniform"
    mixing: float = 0.6  # alpha
    staleness: str = "polynomial"
    exponent: float = 0.5  # a
    slope: float = 10.0  # a of the hinge
    after: int = 4  # b
    rho: float = 0.0
    concurrency: int | None = None  # clients at work; None: all

    def __post_init__(self):
        check_number(self, "mixing", 0, 1)
        check_choice(self, "staleness", ("constant", "polynomial", "hinge"))
        for field in ("exponent", "slope", "after", "rho"):
            check_number(self, field)

    @property
    def schedule(self):
        return Buffered(self.concurrency, size=1)

    def factor(self, reply):
        tau = reply.staleness
        if self.staleness == "polynomial":
            return (1 + tau) ** -self.exponent
        if self.staleness == "hinge":
            return where(tau > self.after, 1 / (self.slope * (tau - self.after) + 1), ones_like(tau))
        return None

    def client(self, work, msg, memory):
        if not self.rho:
            return Local(work.descend(msg.x)), memory
        return Local(work.descend(msg.x, lambda g, y, x: g + self.rho * (y - x), rows=(msg.x,))), memory

    def server(self, state, replies):
        kept = 1 - self.mixing * replies.discount
        return Params(kept * state.x + self.mixing * replies.mean("y"))
