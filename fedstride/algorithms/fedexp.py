"""FedExP."""

from typing import NamedTuple

from torch import Tensor

from fedstride.algorithm import Algorithm, check_number, register


class State(NamedTuple):
    x: Tensor
    server_lr: float = 1.0  # eta_g of the last round


class Upload(NamedTuple):
    dx: Tensor
    square: Tensor  # |dx|^2


@register("fedexp")
class FedExP(Algorithm):
    """The server steps further the more the clients' displacements disagree in direction.

    Paper: Jhunjhunwala, Wang, Joshi, "FedExP: speeding up federated averaging via extrapolation", ICLR 2023.

    Rule: FedAvg's local steps; `x <- x + eta_g mean(D_i)` with `eta_g = max(1, mean |D_i|^2 / (2 (|mean D_i|^2 +
    epsilon)))`.

    Deviations: means by the run's weights instead of 1/M; the model is the last iterate, not the mean of the last
    two.

    Limits: identical displacements give eta_g = 1, FedAvg. Biased like FedAvg.
    """

    epsilon: float = 1e-3

    def __post_init__(self):
        check_number(self, "epsilon")

    def init(self, x, fleet):
        return State(x)

    def client(self, work, msg, memory):
        dx = work.descend(msg.x) - msg.x
        return Upload(dx, dx.square().sum(1, keepdim=True)), memory

    def server(self, state, replies):
        dx = replies.mean("dx")
        server_lr = max(1.0, float(replies.mean("square") / (2 * (dx.square().sum() + self.epsilon))))
        return State(state.x + server_lr * dx, server_lr)

    def report(self, state):
        return {"server_lr": state.server_lr}
