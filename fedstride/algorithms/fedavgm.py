"""FedAvgM."""

from typing import NamedTuple

from torch import Tensor, zeros_like

from fedstride.algorithm import Algorithm, Delta, check_number, register


class Momentum(NamedTuple):
    x: Tensor
    u: Tensor


@register("fedavgm")
class FedAvgM(Algorithm):
    """FedAvg with server momentum.

    Paper: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual
    classification", 2019.

    Rule: `u <- beta u + mean(y_i - x)`, `x <- x + server_lr u`.

    Limits: `beta = 0` is FedAvg.
    """

    displacements = True
    server_lr: float = 1.0
    beta: float = 0.9

    def __post_init__(self):
        check_number(self, "server_lr", 0, open=True)
        check_number(self, "beta", 0, 0.9999)

    def init(self, x, fleet):
        return Momentum(x, zeros_like(x))

    def client(self, work, msg, memory):
        return Delta(work.descend(msg.x) - msg.x), memory

    def server(self, state, replies):
        u = self.beta * state.u + replies.mean("dx")
        return Momentum(state.x + self.server_lr * u, u)
