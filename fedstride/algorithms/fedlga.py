"""FedLGA."""

from typing import NamedTuple

from torch import Tensor

from fedstride.algorithm import Algorithm, Delta, check_choice, check_number, register
from fedstride.errors import FedstrideError


class State(NamedTuple):
    x: Tensor
    unfinished: int = 0
    squared_gradient: float = 0.0  # largest |g|^2 among the unfinished


@register("fedlga")
class FedLGA(Algorithm):
    """The server approximates what unfinished devices would have sent.

    Paper: Li et al., "FedLGA: toward system-heterogeneity of federated learning via local gradient approximation", IEEE
    Transactions on Cybernetics 2023, Algorithms 1 and 2.

    Rule: D_i = y_i - x after S_i of S steps. K_2 are the complete clients. An unfinished one is corrected by `D_i <-
    D_i + kappa g <g, v>` with `g = -D_i / (lr S_i)`, `v = mean over K_2 of D - D_i`; `x <- x + server_lr mean(D_i)`.

    Options: `variant` "paper", "taylor" (`D_i - lr (S - S_i) (g + g <g, v>)`), "rescale" (`D_i S / S_i`); kappa and
    clip belong to "paper". `clip` caps kappa at 1 / |g|^2, which is the print while |g|^2 <= 1 and cannot diverge
    beyond; `clip=False` is the print to the letter. `empty` K_2: "none" (no correction that round) or "rescaled_mean"
    (v uses the mean of D_i S / S_i). `decay` gamma: the local step is lr (1 - gamma)^(round - 1).

    Deviations: clip is on by default, because along g the print multiplies the deviation by 1 - |g|^2 and blows up
    beyond 2. On quadratics the printed correction is worse than none as soon as |g|^2 is of order one, and rescaling
    better than both; the rows report |g|^2. g is the mean gradient of the path; Eq. (6) names one the server lacks.

    Limits: all complete, or kappa = 0: FedAvg with a server step. The correction is parallel to D_i.
    """

    weights = "uniform"
    local_options = frozenset({"weight_decay", "clip"})
    server_lr: float = 1.0  # eta_g
    variant: str = "paper"
    kappa: float = 1.0
    clip: bool = True
    empty: str = "none"
    decay: float = 0.0  # gamma

    def __post_init__(self):
        check_number(self, "server_lr", 0, open=True)
        check_choice(self, "variant", ("paper", "taylor", "rescale"))
        check_number(self, "kappa")
        if self.variant != "paper" and self.kappa != 1:
            raise FedstrideError(f"fedlga: kappa belongs to the variant 'paper'; {self.variant!r} has none")
        check_choice(self, "empty", ("none", "rescaled_mean"))
        check_number(self, "decay", 0, 0.9999)

    @property
    def needs_rows(self):
        return True

    def init(self, x, fleet):
        return State(x)

    def client(self, work, msg, memory):
        lr = work.lr * (1 - self.decay) ** (work.round - 1)
        return Delta(work.descend(msg.x, lr=lr) - msg.x), memory

    def server(self, state, replies):
        dx, factors = replies.rows("dx"), replies.factors[:, None].to(state.x.dtype)
        lr = replies.each("lr") * (1 - self.decay) ** (replies.each("round") - 1)
        steps, target, lr = (
            column.to(dx.dtype)[:, None] for column in (replies.each("steps"), replies.each("target"), lr)
        )
        slow = steps < target
        g = -dx / (lr * steps)
        square = g.square().sum(1, keepdim=True)
        if self.variant == "rescale":
            dx = dx * target / steps
        elif slow.any() and (not slow.all() or self.empty == "rescaled_mean"):
            complete = factors * ~slow if not slow.all() else factors
            mean = (complete * dx * target / steps).sum(0) / complete.sum()
            along = (g * (mean - dx)).sum(1, keepdim=True)
            kappa = self.kappa * (1 / square).clamp(max=1) if self.clip else self.kappa
            change = kappa * g * along if self.variant == "paper" else -lr * (target - steps) * (g + g * along)
            dx = dx + slow * change
        largest = float((square * slow).max())
        return State(state.x + self.server_lr * (factors * dx).sum(0), int(slow.sum()), largest)

    def report(self, state):
        return {"unfinished": state.unfinished, "squared_gradient": state.squared_gradient}
