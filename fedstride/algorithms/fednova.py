"""FedNova."""

from typing import NamedTuple

from torch import Tensor, zeros_like

from fedstride.algorithm import Algorithm, check_number, register


class State(NamedTuple):
    x: Tensor
    u: Tensor  # server momentum, in units of gradients


class Upload(NamedTuple):
    d: Tensor  # displacement per unit of a_i
    reach: Tensor  # what tau_eff averages


class Carry(NamedTuple):
    v: Tensor  # momentum buffer
    weight: Tensor  # sum of the weights of all gradients in v
    norm: Tensor  # |a_i|_1 so far


@register("fednova")
class FedNova(Algorithm):
    """Averages displacements per step, so that a client with many steps does not outvote the others.

    Paper: Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization",
    NeurIPS 2020.

    Rule: a client's displacement is `D_i = -lr_i sum_k a_{i,k} g_k`. The server takes `x <- x + tau_eff sum w_i D_i /
    (lr_i |a_i|_1)` with `tau_eff = sum w_i lr_i |a_i|_1`; where all have the same lr, it cancels. Plain SGD has
    |a_i|_1 = K_i; momentum rho and a proximal term mu change it by the recurrence `weight <- rho weight + 1`, `norm <-
    (1 - lr mu) norm + weight`. Server momentum, with the mean lr of the round: `u <- m u + step / lr`, `x <- x + lr u`.

    Deviations: with mu > 0, tau_eff averages K_i, as the authors' optimiser does. Public code updates the norm by the
    momentum line and the proximal line in turn, which is not |a_i|_1 when both are on; the recurrence above is. Local
    momentum is a field of the method, because it changes |a_i|_1.

    Limits: equal steps and plain SGD give FedAvg. Not exact at a fixed step: it removes the O(1) bias of FedAvg and
    keeps one proportional to lr; it rests at `(sum (w_i / K_i) B_i)^-1 sum (w_i / K_i) B_i c_i`.
    """

    local_options = frozenset({"weight_decay", "clip"})

    momentum: float = 0.0  # rho
    mu: float = 0.0
    server_momentum: float = 0.0

    def __post_init__(self):
        check_number(self, "momentum", 0, 0.9999)
        check_number(self, "mu")
        check_number(self, "server_momentum", 0, 0.9999)

    def init(self, x, fleet):
        return State(x, zeros_like(x))

    def client(self, work, msg, memory):
        def direction(g, y, carry, x, lr):
            weight = self.momentum * carry.weight + 1
            norm = (1 - lr * self.mu) * carry.norm + weight
            v = carry.v.mul_(self.momentum).add_(g) if self.momentum else g
            step = v + self.mu * (y - x) if self.mu else v
            return step, Carry(v if self.momentum else carry.v, weight, norm)

        if self.momentum or self.mu:
            buffer = work.zeros(msg.x) if self.momentum else work.column()
            start = Carry(buffer, work.column(), work.column())
            y, carry = work.descend(msg.x, direction, rows=(msg.x, work.lr), carry=start)
            norm = carry.norm
        else:  # as FedAvg does, so its clients can be of one batch with FedAvg's
            y, norm = work.descend(msg.x), work.steps
        reach = work.steps if self.mu else norm
        return Upload((y - msg.x) / (work.lr * norm), work.lr * reach), memory

    def server(self, state, replies):
        step = replies.mean("reach") * replies.mean("d")
        if not self.server_momentum:
            return State(state.x + step, state.u)
        lr = replies.mean("lr").to(step.dtype)
        u = self.server_momentum * state.u + step / lr
        return State(state.x + lr * u, u)
