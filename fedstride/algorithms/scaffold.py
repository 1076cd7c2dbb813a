"""SCAFFOLD."""

from typing import NamedTuple

from torch import Tensor, zeros_like

from fedstride.algorithm import Algorithm, check_choice, check_number, register
from fedstride.descent import shifted


class State(NamedTuple):
    x: Tensor
    c: Tensor


class Control(NamedTuple):
    c: Tensor  # c_i


class Upload(NamedTuple):
    dx: Tensor
    dc: Tensor


@register("scaffold")
class Scaffold(Algorithm):
    """Control variates cancel the drift of local steps.

    Paper: Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020,
    Algorithm 1.

    Rule: `y <- y - lr (g_i(y) - c_i + c)`, K_i steps. Option I: `c_i+ = grad F_i(x)` over all local data; option II:
    `c_i+ = c_i - c + (x - y) / (K_i lr)`, the mean of the round's gradients. Server: `x <- x + server_lr mean(y_i -
    x)`, `c <- c + sum over reporters of w_i (c_i+ - c_i)`, so that `c = sum w_i c_i` always.

    Deviations: the paper's 1/|S| and 1/N become the run's weights. Under local momentum, option II divides by the
    momentum's own reach instead of K_i: c_i is then the momentum-weighted mean of the round's gradients.

    Limits: exact for any K_i, with part of the fleet too. Identical clients give FedAvg after the first round.
    """

    exact = True
    fixed_fleet = True  # c sums over it
    server_lr: float = 1.0  # eta_g
    option: str = "II"

    def __post_init__(self):
        check_number(self, "server_lr", 0, open=True)
        check_choice(self, "option", ("I", "II"))

    @property
    def full_gradients(self):
        return 1 if self.option == "I" else 0

    @property
    def traffic(self):
        return (2, 2)

    def init(self, x, fleet):
        return State(x, zeros_like(x))

    def init_client(self, x):
        return Control(zeros_like(x))

    def message(self, state):
        return state

    def client(self, work, msg, memory):
        drift = msg.c - memory.c
        y = work.descend(msg.x, shifted, rows=(drift,))
        c = work.gradient(msg.x) if self.option == "I" else (msg.x - y) / (work.travel * work.lr) - drift
        return Upload(y - msg.x, c - memory.c), Control(c)

    def server(self, state, replies):
        return State(state.x + self.server_lr * replies.mean("dx"), state.c + replies.total("dc"))
