"""FedAvg with local step sizes: Algorithm 1 of the o(1/t) paper."""

from typing import NamedTuple

import torch
from torch import Tensor, zeros

from fedstride.algorithm import Algorithm, Delta, Exchange, check_choice, check_number, register


class State(NamedTuple):
    x: Tensor
    mean_smoothness: Tensor
    max_smoothness: Tensor


class Own(NamedTuple):
    smoothness: Tensor  # L_i


@register("localsteps")
class LocalSteps(Algorithm):
    """Every client takes the step size that its own smoothness allows.

    Paper: the o(1/t) paper, Algorithm 1.

    Rule: `y <- y - alpha_i grad f_i(y)`, tau steps; `x <- mean(y)`. `step="local"` takes `scale / L_i` (4); "universal"
    takes scale times bound (3), `min(1 / (tau max L_i), 8 tau / (L (2 tau + e (tau - 1))^2 + 4 e L tau (tau - 1)))`,
    with L the mean of the L_i; "given" takes the run's lr, which may be one number a client. L_i are measured at the
    start by power iteration, so the run's lr is not used unless it is "given".

    Deviations: the strong-growth constant e is `growth`, by default `max L_i / L`, the printed kind (a ratio of largest
    eigenvalues); the smallest valid one is `max_i ||H_i H^-1||`, to be given by hand. The printed `L_i = i^rho ||B'B||`
    of its second experiment should have 2 rho; with the printed value the run diverges.

    Limits: exact only if all clients share a minimiser (interpolation); otherwise biased like FedAvg.
    """

    weights = "uniform"
    local_options = frozenset({"weight_decay"})
    step: str = "local"
    scale: float = 1.0
    growth: float | None = None  # eta of the paper

    def __post_init__(self):
        check_choice(self, "step", ("local", "universal", "given"))
        check_number(self, "scale", 0, open=True)
        if self.growth is not None:
            check_number(self, "growth", 0, open=True)

    @property
    def inspects(self):  # everybody's smoothness
        return self.step != "given"

    @property
    def prologue(self):
        return () if self.step == "given" else (Exchange(self.message, self.measure, self.smooth, "smoothness"),)

    def init(self, x, fleet):
        return State(x, x.new_zeros(()), x.new_zeros(()))

    def init_client(self, x):
        return Own(zeros((), dtype=x.dtype, device=x.device))

    def message(self, state):
        return state

    def measure(self, work, msg, memory):
        own = work.smoothness(msg.x)
        return Own(own), Own(own)

    def smooth(self, state, replies):
        each = replies.each("smoothness")
        return state._replace(mean_smoothness=each.mean(), max_smoothness=each.max())

    def client(self, work, msg, memory):
        lr = work.lr
        if self.step == "local":
            # A client without curvature has no bound; the run's own rate will do.
            lr = torch.where(memory.smoothness > 0, self.scale / memory.smoothness, work.lr)
        elif self.step == "universal":
            tau, mean, most = work.target, msg.mean_smoothness, msg.max_smoothness
            e = most / mean if self.growth is None else self.growth
            bound = 8 * tau / (mean * (2 * tau + e * (tau - 1)) ** 2 + 4 * e * mean * tau * (tau - 1))
            lr = self.scale * torch.minimum(1 / (tau * most), bound)
        return Delta(work.descend(msg.x, lr=lr) - msg.x), memory

    def server(self, state, replies):
        return state._replace(x=state.x + replies.mean("dx"))
