"""FedaGrac with the paper's saving of uploads."""

from typing import NamedTuple

import torch
from torch import Tensor, zeros_like

from fedstride.algorithm import Algorithm, Delta, Exchange, register
from fedstride.algorithms.calibration import (
    Message,
    Reference,
    calibrated,
    check_fields,
    ends_at_one,
    recomputed,
    sends_first,
)


class State(NamedTuple):
    x: Tensor
    nu: Tensor
    mean_steps: Tensor
    weights: Tensor  # [N]
    local: Tensor  # [N, d]: everybody's nu_i
    sent: Tensor  # [N, d]: everybody's last v_i


class Memory(NamedTuple):
    nu: Tensor
    first: Tensor


@register("fedagrac-saving")
class FedaGracSaving(Algorithm):
    """FedaGrac in which the server recomputes what slow clients would upload.

    Paper: as FedaGrac; Section 4's remark on communication.

    Rule: the server keeps every nu_i and gets avg itself, `avg = (x - y) / (lr K_i) - calibration (nu - nu_i)`; the
    second exchange goes only to clients that owe a first gradient (the fast ones in mode "std", nobody in mode "avg").

    Deviations: nu always sums over everybody's last v_i, which the server has anyway: `nu_scope="all"` of FedaGrac. The
    same trajectory as that to rounding, unless a slow client is there for the first exchange and away for the second:
    there it keeps its old v_i, here the server has the new one already. The server needs 2 N vectors of memory.
    """

    fixed_fleet = True  # the server keeps a row a client
    local_options = frozenset({"weight_decay", "clip"})
    calibration: float | tuple = 1.0  # lambda
    mode: str = "std"
    start: str = "full_grad"

    def __post_init__(self):
        check_fields(self)

    @property
    def exact(self):
        return ends_at_one(self)

    @property
    def needs_rows(self):
        return True

    @property
    def traffic(self):  # at most: slow clients in mode "std" send one vector
        return (2, 2)

    @property
    def prologue(self):
        return (Exchange(self.message, self.begin, self.begun, "begin"),) if self.start == "full_grad" else ()

    @property
    def exchanges(self):
        train = Exchange(self.message, self.client, self.server)
        return train, Exchange(lambda state: (), self.reference, self.combine, "reference", self.owes)

    def init(self, x, fleet):
        table = x.new_zeros(fleet.clients, len(x))
        return State(x, zeros_like(x), x.new_zeros(()), fleet.weights.to(x.dtype), table, table)

    def init_client(self, x):
        return Memory(zeros_like(x), zeros_like(x))

    def message(self, state):
        return Message(state.x, state.nu)

    def begin(self, work, msg, memory):
        g = work.gradient(msg.x)
        return Reference(g), Memory(g, g)

    def begun(self, state, replies):
        local = state.local.index_copy(0, replies.clients, replies.rows("v"))
        return self.combine(state._replace(local=local), replies)

    def client(self, work, msg, memory):
        y, avg, first = calibrated(self, work, msg, memory.nu)
        return Delta(y - msg.x), Memory(avg, first)

    def server(self, state, replies):
        who, steps = replies.clients, replies.each("steps")
        avg = recomputed(self, replies, state.nu, state.local[who])
        later = sends_first(self.mode, steps, replies.mean("steps"))[:, None]
        sent = state.sent.index_copy(0, who, torch.where(later, state.sent[who], avg))
        nu, local = state.weights @ sent, state.local.index_copy(0, who, avg)
        return State(state.x + replies.mean("dx"), nu, replies.mean("steps"), state.weights, local, sent)

    def owes(self, state, jobs):
        return sends_first(self.mode, torch.as_tensor(jobs.steps), state.mean_steps.cpu()).numpy()

    def reference(self, work, msg, memory):
        return Reference(memory.first), memory

    def combine(self, state, replies):
        sent = state.sent.index_copy(0, replies.clients, replies.rows("v"))
        return state._replace(nu=state.weights @ sent, sent=sent)
