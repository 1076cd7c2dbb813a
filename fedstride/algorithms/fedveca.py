"""FedVeca."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedstride.algorithm import Algorithm, Exchange, Params, check_choice, check_number, check_whole, register

LISTED = 100  # larger fleets' rows hold only the mean of tau


class State(NamedTuple):
    x: Tensor
    x_before: Tensor  # x_{k-1}
    gradient: Tensor  # grad F(x_{k-1})
    candidate: Tensor  # awaits judgement, where the global loss decides
    tau: Tensor  # [N]: everybody's next number of steps
    k: int = 0
    best: float = float("inf")  # F_m
    smoothness: float = 0.0  # L, running maximum
    premise: float = 0.0  # lr tau_{k+1} L
    a_min: float = 0.0
    streak: int = 0  # roll-backs in a row, now and at most
    longest: int = 0


class Upload(NamedTuple):
    gradient: Tensor  # grad F_i(x_k)
    mean: Tensor  # G_i
    loss: Tensor
    beta: Tensor
    delta: Tensor  # without its denominator, which the server knows


class Carry(NamedTuple):
    s: Tensor
    total: Tensor
    beta: Tensor
    delta: Tensor


class Verdict(NamedTuple):
    loss: Tensor


@register("fedveca")
class FedVeca(Algorithm):
    """The server adapts every client's number of steps to how bent and how scattered its path was.

    Paper: Luo et al., "FedVeca: federated vectorized averaging on non-IID data with adaptive bi-directional global
    objective", Algorithms 1 and 2.

    Rule: a client does tau_i steps and sends `grad F_i(x)`, `G_i = mean g_s`, its loss at the end, `beta_i = max_s
    ||grad F_i(x) - g_s|| / ||x - y_s||` and `delta_i = max_s ||g_0 + ... + g_s||^2 / ((s + 1) ||grad F(x_{k-1})||^2)`,
    s from 1. Server: `x <- x - lr tau_k mean(G_i)`, `tau_k = mean tau_i` (FedNova's step); with `A_i = lr beta_i^2
    delta_i`, `tau_i <- floor(A_i / (A_i - alpha min A))`, kept in [2, tau_max].

    Options: `rollback` takes x back when the loss is above the best seen: of the local end points (`loss="local"`, the
    paper) or of the candidate itself (`loss="global"`, one more exchange); `reset_after` roll-backs in a row (0: never)
    the best loss is forgotten. `delta_terms` "line17" or "assumption" (s terms, without g_s); `norm_at` "previous"
    (the paper) or "current" for the denominator of delta.

    Deviations: roll-back is off by default: in the printed form it stalls. The floor gets 1e-3 and float64, or equal
    clients get 19 or 20 by chance of rounding. The server divides by ||grad F||^2, so its norm need not travel. After
    clipping tau_k is computed anew. 0/0 in L (x_0 = 0, or after a roll-back) is skipped. A_i = min A = 0 gives tau_max;
    who did a single step keeps tau. The premise `lr tau L >= 1` is reported, never enforced, and L with it; both count
    the slope between this round's model and the last one's, which the paper's server uses a round later.

    Limits: fixed tau and no roll-back is FedNova; equal A_i give equal tau (20 for alpha 0.95) and FedAvg's step.
    """

    assigns = True
    fixed_fleet = True  # tau has an entry a client
    common_lr = True
    inspects = True  # beta and delta of every client
    full_gradients = 1
    local_options = frozenset({"weight_decay"})
    alpha: float = 0.95
    tau_max: int = 50
    tau_start: int = 2
    adapt: bool = True  # False: tau stays at tau_start
    rollback: bool = False
    loss: str = "local"
    reset_after: int = 0
    delta_terms: str = "line17"
    norm_at: str = "previous"

    def __post_init__(self):
        check_number(self, "alpha", 0, 1, open=True)
        check_whole(self, "tau_max", 2)
        check_whole(self, "tau_start", 2 if self.adapt else 1, self.tau_max)
        check_whole(self, "reset_after", 0)
        check_choice(self, "loss", ("local", "global"))
        check_choice(self, "delta_terms", ("line17", "assumption"))
        check_choice(self, "norm_at", ("previous", "current"))

    @property
    def traffic(self):
        return (2 if self.rollback and self.loss == "global" else 1, 2)

    @property
    def exchanges(self):
        train = Exchange(self.message, self.client, self.server)
        judge = Exchange(lambda state: Params(state.candidate), self.judge, self.decide, "judge")
        return (train, judge) if self.rollback and self.loss == "global" else (train,)

    def init(self, x, fleet):
        return State(x, x, torch.zeros_like(x), x, torch.full_like(fleet.sizes, self.tau_start))

    def assign(self, state, clients, rng):
        return state.tau.cpu().numpy()[clients]

    def client(self, work, msg, memory):
        def direction(g, y, carry, gradient, x):
            total, s = carry.total + g, carry.s
            path, terms = (total, s + 1) if self.delta_terms == "line17" else (carry.total, s.clamp(min=1))
            bend = (gradient - g).norm(dim=1, keepdim=True) / (x - y).norm(dim=1, keepdim=True)
            spread = path.square().sum(1, keepdim=True) / terms
            beta = torch.where(s > 0, torch.maximum(carry.beta, bend.nan_to_num(0, 0)), carry.beta)
            delta = torch.where(s > 0, torch.maximum(carry.delta, spread), carry.delta)
            return g, Carry(s + 1, total, beta, delta)

        gradient = work.gradient(msg.x)
        start = Carry(work.column(), work.zeros(msg.x), work.column(), work.column())
        y, carry = work.descend(msg.x, direction, rows=(gradient, msg.x), carry=start)
        loss = work.loss(y) if self.rollback and self.loss == "local" else work.column()
        return Upload(gradient, carry.total / work.steps, loss, carry.beta, carry.delta), memory

    def server(self, state, replies):
        gradient, lr = replies.mean("gradient"), float(replies.mean("lr"))
        candidate = state.x - lr * replies.mean("steps").to(state.x.dtype) * replies.mean("mean")
        # L_k: at k = 0 from x_0 alone, else from the last two points.
        moved, change = (state.x - state.x_before, gradient - state.gradient) if state.k else (state.x, gradient)
        slope = float(change.norm() / moved.norm()) if float(moved.norm()) > 0 else 0.0
        tau, a_min = state.tau, state.a_min
        norm = float((gradient if self.norm_at == "current" else state.gradient).double().norm())
        several = replies.each("steps") > 1
        if self.adapt and state.k > 0 and norm > 0 and bool(several.any()):
            a = lr * replies.each("beta").double() ** 2 * replies.each("delta").double() / norm**2
            a, who = a[several], replies.clients[several]
            a_min = float(a.min())
            ratio = torch.where(a > 0, a / (a - self.alpha * a_min), float(self.tau_max))
            wanted = torch.floor(ratio + 1e-3).clamp(2, self.tau_max).to(tau.dtype)
            tau = tau.index_copy(0, who, wanted)
        smoothness = max(state.smoothness, slope)
        tau_next = float((replies.factors * tau[replies.clients]).sum())
        state = state._replace(
            x_before=state.x, gradient=gradient, candidate=candidate, tau=tau, k=state.k + 1, a_min=a_min,
            premise=lr * tau_next * smoothness, smoothness=smoothness,
        )  # fmt: skip
        if not self.rollback:
            return state._replace(x=candidate)
        return self.decide(state, replies) if self.loss == "local" else state

    def judge(self, work, msg, memory):
        return Verdict(work.loss(msg.x)), memory

    def decide(self, state, replies):
        loss = float(replies.mean("loss"))
        if loss <= state.best:
            return state._replace(x=state.candidate, best=loss, streak=0)
        streak = state.streak + 1
        best = float("inf") if self.reset_after and streak >= self.reset_after else state.best
        return state._replace(best=best, streak=streak, longest=max(streak, state.longest))

    def report(self, state):
        numbers = {"tau": state.tau.tolist()} if len(state.tau) <= LISTED else {}
        numbers |= {
            "tau_mean": float(state.tau.double().mean()),
            "smoothness": state.smoothness,
            "premise": state.premise,
        }
        numbers |= {"alpha_bound": min(1.0, 2 * state.smoothness / state.a_min) if state.a_min else 1.0}
        return numbers | ({"rollbacks": state.streak, "longest_rollback": state.longest} if self.rollback else {})
