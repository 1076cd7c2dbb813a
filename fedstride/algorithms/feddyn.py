"""FedDyn."""

from typing import NamedTuple

from torch import Tensor, zeros_like

from fedstride.algorithm import Algorithm, Delta, check_choice, check_number, register


class State(NamedTuple):
    x: Tensor
    h: Tensor
    mean: Tensor  # mean of the local models


class Dual(NamedTuple):
    q: Tensor  # q_i, the local gradient at the last solution


@register("feddyn")
class FedDyn(Algorithm):
    """Dynamic regularisation: every client's objective is bent until all agree.

    Paper: Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, Algorithm 1.

    Rule: `y <- y - lr (g_i(y) - q_i + alpha (y - x))`, K_i steps as an inexact solve; `q_i <- q_i - alpha (y - x)`.
    Server: `h <- h - alpha sum over reporters of w_i (y_i - x)`, `x <- mean(y_i) - h / alpha`; `h = sum w_i q_i`
    always.

    Deviations: weights w_i in both places instead of 1/M, so that the limit is the weighted optimum. The authors' code
    evaluates the plain mean of the local models: `deploy="mean"`; the algorithm's own model is `deploy="x"`. Under an
    asynchronous schedule displacements are added to the newest model: `x <- x + mean(y_i - x_then) - h / alpha`.

    Limits: exact for any K_i, with part of the fleet too; small alpha is slow.
    """

    exact = True
    fixed_fleet = True  # h sums over it
    alpha: float = 0.1
    deploy: str = "x"

    def __post_init__(self):
        check_number(self, "alpha", 0, open=True)
        check_choice(self, "deploy", ("x", "mean"))

    def init(self, x, fleet):
        return State(x, zeros_like(x), x)

    def init_client(self, x):
        return Dual(zeros_like(x))

    def client(self, work, msg, memory):
        bend = lambda g, y, q, x: g - q + self.alpha * (y - x)  # noqa: E731
        dx = work.descend(msg.x, bend, rows=(memory.q, msg.x)) - msg.x
        return Delta(dx), Dual(memory.q - self.alpha * dx)

    def server(self, state, replies):
        h = state.h - self.alpha * replies.total("dx")
        mean = state.x + replies.mean("dx")
        return State(mean - h / self.alpha, h, mean)

    def model(self, state):
        return state.x if self.deploy == "x" else state.mean
