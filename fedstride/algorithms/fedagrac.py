"""FedaGrac."""

from typing import NamedTuple

import torch
from torch import Tensor, zeros_like

from fedstride.algorithm import Algorithm, Delta, Exchange, check_choice, register
from fedstride.algorithms.calibration import Message, Reference, calibrated, check_fields, ends_at_one, sends_first


class State(NamedTuple):
    x: Tensor
    nu: Tensor  # global reference
    mean_steps: Tensor  # Kbar of the round


class Limit(NamedTuple):
    mean_steps: Tensor


class Memory(NamedTuple):
    nu: Tensor  # local reference nu_i
    first: Tensor  # first gradient of the round
    sent: Tensor  # v_i as last sent


@register("fedagrac")
class FedaGrac(Algorithm):
    """Calibrated local steps: a predicted direction keeps fast and slow clients on one course.

    Paper: Wu et al., "From deterioration to acceleration: a calibration approach to rehabilitating step asynchronism
    in federated optimization", IEEE TPDS 2023, Algorithm 1.

    Rule: `y <- y - lr (g_i(y) + calibration (nu - nu_i))`, K_i steps; `nu_i <- avg`, the mean of the raw gradients.
    Server: `x <- mean(y_i)`, `nu <- mean(v_i)`; v_i is the first gradient of a fast client (K_i > Kbar = mean K_i) and
    avg of a slow one. `mode`: "std" is this rule, "avg" sends avg always (SCAFFOLD-like), "first" the first gradient
    always, "reverse" the opposite of "std". `calibration`: a number, or stages ((1, 0.1), (51, 0.5), (151, 1.0)) of
    first round and value.

    Options: `start` "full_grad" (paper: a prologue collects full gradients) or "zeros" (the authors' code). `nu_scope`
    "participants" (the authors' code), or "all": absent clients count with their last v_i. `local_ref` "avg" (line 11)
    or "sent" (Eq. 4).

    In practice: with mini-batches a fast client's first gradient is that of one batch, and its noise acts on every
    local step, times the calibration; the paper's networks take 0.01 to 0.05. Mode "avg" is the quiet one.

    Deviations: K_i = Kbar counts as slow, with a tolerance of 1e-9 for rounding. Fewer steps than planned: actual K_i.

    Limits: calibration 0 is FedAvg; "avg" with calibration 1, zeros and uniform weights is SCAFFOLD II. Exact at
    calibration 1, with part of the fleet only for nu_scope "all".
    """

    local_options = frozenset({"weight_decay", "clip"})
    calibration: float | tuple = 1.0  # lambda
    mode: str = "std"
    start: str = "full_grad"
    nu_scope: str = "participants"
    local_ref: str = "avg"

    def __post_init__(self):
        check_fields(self)
        check_choice(self, "nu_scope", ("participants", "all"))
        check_choice(self, "local_ref", ("avg", "sent"))

    @property
    def exact(self):
        return ends_at_one(self)

    @property
    def exact_partial(self):
        return self.exact and self.nu_scope == "all"

    @property
    def fixed_fleet(self):
        return self.start == "full_grad" or self.nu_scope == "all"

    @property
    def traffic(self):
        return (2, 2)

    @property
    def prologue(self):
        return (Exchange(self.message, self.begin, self.combine, "begin"),) if self.start == "full_grad" else ()

    @property
    def exchanges(self):
        return (
            Exchange(self.message, self.client, self.server),
            Exchange(lambda state: Limit(state.mean_steps), self.reference, self.combine, "reference"),
        )

    def init(self, x, fleet):
        return State(x, zeros_like(x), x.new_zeros(()))

    def init_client(self, x):
        return Memory(*(zeros_like(x) for _ in range(3)))

    def message(self, state):
        return Message(state.x, state.nu)

    def begin(self, work, msg, memory):
        g = work.gradient(msg.x)
        return Reference(g), Memory(g, g, g)

    def client(self, work, msg, memory):
        y, avg, first = calibrated(self, work, msg, memory.nu)
        return Delta(y - msg.x), Memory(avg, first, memory.sent)

    def server(self, state, replies):
        return State(state.x + replies.mean("dx"), state.nu, replies.mean("steps"))

    def reference(self, work, msg, memory):
        v = torch.where(sends_first(self.mode, work.steps, msg.mean_steps), memory.first, memory.nu)
        upload = v - memory.sent if self.nu_scope == "all" else v
        return Reference(upload), Memory(v if self.local_ref == "sent" else memory.nu, memory.first, v)

    def combine(self, state, replies):
        nu = state.nu + replies.total("v") if self.nu_scope == "all" else replies.mean("v")
        return state._replace(nu=nu)
