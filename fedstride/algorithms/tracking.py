"""Gradient tracking: Algorithm 2 of the o(1/t) paper, and what FedLin and FedTrack share with it."""

from typing import NamedTuple

import torch
from torch import Tensor, zeros_like

from fedstride.algorithm import Algorithm, Delta, Exchange, check_choice, check_number, register
from fedstride.descent import shifted


class State(NamedTuple):
    x: Tensor
    gf: Tensor  # sum w_i of everybody's last gradient
    mean_smoothness: Tensor
    max_smoothness: Tensor


class Anchor(NamedTuple):
    x: Tensor  # the model of this round
    g: Tensor  # the local gradient there


class Change(NamedTuple):
    dg: Tensor


class Smoothness(NamedTuple):
    smoothness: Tensor  # L_i


class Reference(NamedTuple):
    gf: Tensor
    mean_smoothness: Tensor | None = None  # travel only where theory sets the step
    max_smoothness: Tensor | None = None


class GradientTracking(Algorithm):
    """Abstract: an exchange of gradients at x, then local steps along `g_i(y) - g_i(x) + gf`."""

    exact = True
    fixed_fleet = True  # gf sums over it
    weights = "uniform"
    local_options = frozenset({"weight_decay"})

    @property
    def traffic(self):
        return (2, 2)

    @property
    def exchanges(self):
        return (
            Exchange(self.message, self.anchor, self.refer, "gradient"),
            Exchange(self.reference, self.client, self.server),
        )

    def init(self, x, fleet):
        return State(x, zeros_like(x), x.new_zeros(()), x.new_zeros(()))

    def init_client(self, x):
        return Anchor(x, zeros_like(x))

    def anchor(self, work, msg, memory):
        g = work.gradient(msg.x, full=False)  # the same sample serves as g_i(x) and inside gf
        return Change(g - memory.g), Anchor(work.rows(msg.x), g)

    def refer(self, state, replies):  # who does not answer is represented by the last gradient
        return state._replace(gf=state.gf + replies.total("dg"))

    def reference(self, state):
        return Reference(state.gf)

    def rate(self, work, msg):
        raise NotImplementedError

    def client(self, work, msg, memory):
        y = work.descend(memory.x, shifted, rows=(msg.gf - memory.g,), lr=self.rate(work, msg))
        return Delta(y - memory.x), memory

    def server(self, state, replies):
        return state._replace(x=state.x + replies.mean("dx"))


@register("tracking")
class Tracking(GradientTracking):
    """Gradient tracking with the large steps that the o(1/t) analysis allows.

    Paper: the o(1/t) paper, Algorithm 2.

    Rule: `v_0 = gf`, `y <- y - alpha v`, `v <- v + g_i(y_new) - g_i(y_old)`, tau steps; `x <- mean(y)`; then `gf <-
    mean g_i(x)`. Steps: `step="given"` takes the run's lr; "exact" takes `scale * min(1 / max L_j, 2 / (5 L tau -
    L))`, bound (8) for exact gradients; "stochastic" takes `scale * min(1 / max L_j, 1 / (12 tau L))`; L is the mean
    of the clients' smoothness constants, which a prologue measures at the starting point.

    Deviations: the memory-less form `v = g_i(y) - g_i(x) + gf`, equal with exact gradients, because the recursion would
    pile up noise over mini-batches. The printed (34), (46)-(47) and Lemma 2 have misprints that do not touch the rule.

    Limits: tau = 1 is gradient descent; at equal steps and step size it is FedLin.
    """

    full_only = True
    inspects = property(lambda self: self.step != "given")  # everybody's smoothness
    step: str = "given"
    scale: float = 1.0

    def __post_init__(self):
        check_choice(self, "step", ("given", "exact", "stochastic"))
        check_number(self, "scale", 0, open=True)

    @property
    def prologue(self):
        return () if self.step == "given" else (Exchange(self.message, self.measure, self.smooth, "smoothness"),)

    def reference(self, state):
        return Reference(state.gf) if self.step == "given" else Reference(*state[1:])

    def measure(self, work, msg, memory):
        return Smoothness(work.smoothness(msg.x)), memory

    def smooth(self, state, replies):
        each = replies.each("smoothness")
        return state._replace(mean_smoothness=each.mean(), max_smoothness=each.max())

    def rate(self, work, msg):
        if self.step == "given":
            return work.lr
        tau, mean = work.target, msg.mean_smoothness
        bound = 2 / (5 * mean * tau - mean) if self.step == "exact" else 1 / (12 * tau * mean)
        return self.scale * torch.minimum(bound, 1 / msg.max_smoothness)
