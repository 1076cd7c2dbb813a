"""Scaffnew (ProxSkip)."""

from typing import NamedTuple

import numpy as np
from torch import Tensor, zeros_like

from fedstride.algorithm import Algorithm, Delta, Exchange, Params, check_number, register


class Memory(NamedTuple):
    y: Tensor  # where the client stands
    h: Tensor  # control variate h_i
    owed: Tensor  # p / lr of the steps that led to y, if it was uploaded and used; else 0


@register("scaffnew")
class Scaffnew(Algorithm):
    """Communicates only when a shared coin says so.

    Paper: Mishchenko et al., "ProxSkip: yes! Local gradient steps provably lead to communication acceleration!
    Finally!", ICML 2022, Algorithm 2.

    Rule: `y <- y - lr (g_i(y) - h_i)`; with probability p the clients average, `x = mean(y)`, and set
    `h_i <- h_i + (p / lr) (x - y_i)`. `sum w_i h_i = 0` always. One round is one communication.

    Deviations: the method assigns the steps itself, a geometric number with mean 1/p, the same for all, so the run's
    `steps` is ignored. A round is two exchanges with one vector each way in all: the mean comes down and settles h_i,
    then the client trains and sends; so a client whose upload was lost or refused skips that update of h_i. In virtual
    time the second exchange begins when the slowest client has settled, and both take the latency of the links, so a
    round is longer than one of FedAvg with the same steps and bytes.

    Limits: exact with everyone in every round; p = 1 is gradient descent.
    """

    exact = True
    full_only = True
    assigns = True
    common_lr = True
    local_options = frozenset({"weight_decay"})
    p: float = 0.1

    def __post_init__(self):
        check_number(self, "p", 1e-6, 1)

    @property
    def exchanges(self):
        return (
            Exchange(self.message, self.settle, lambda state, replies: state, "settle"),
            Exchange(lambda state: (), self.client, self.server),
        )

    def assign(self, state, clients, rng):
        return np.full(len(clients), rng.geometric(self.p))

    def init_client(self, x):
        return Memory(x, zeros_like(x), x.new_zeros(()))

    def settle(self, work, msg, memory):
        h = memory.h + memory.owed * (msg.x - memory.y)
        return (), Memory(work.rows(msg.x), h, zeros_like(memory.owed))

    def client(self, work, msg, memory):
        y = work.descend(memory.y, lambda g, y, h: g - h, rows=(memory.h,))
        return Delta(y - memory.y), Memory(y, memory.h, self.p / work.lr)

    def server(self, state, replies):
        return Params(state.x + replies.mean("dx"))
