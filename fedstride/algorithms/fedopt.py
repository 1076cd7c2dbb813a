"""FedAdagrad, FedAdam, FedYogi: the server treats the mean displacement as a gradient."""

from typing import NamedTuple

import torch
from torch import Tensor, full_like, zeros_like

from fedstride.algorithm import Algorithm, Delta, check_number, register

ADAPTIVE = """{title}

    Paper: Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2.

    Rule: `D = mean(y_i - x)`, `m <- beta1 m + (1 - beta1) D`, `{rule}`, `x <- x + server_lr m / (sqrt(v) + epsilon)`.

    Deviations: none; there is no bias correction, and v starts at epsilon^2 as in the paper unless `v0` is given.
    """


class Moments(NamedTuple):
    x: Tensor
    m: Tensor
    v: Tensor


class _Adaptive(Algorithm):
    """What the three adaptive methods share; each gives its own second moment."""

    displacements = True
    server_lr: float
    beta1: float
    beta2: float
    epsilon: float
    v0: float | None

    def __post_init__(self):
        check_number(self, "server_lr", 0, open=True)
        check_number(self, "beta1", 0, 1)
        check_number(self, "epsilon", 0, open=True)
        check_number(self, "beta2", 0, 1)
        if self.v0 is not None:
            check_number(self, "v0")

    def init(self, x, fleet):
        return Moments(x, zeros_like(x), full_like(x, self.epsilon**2 if self.v0 is None else self.v0))

    def client(self, work, msg, memory):
        return Delta(work.descend(msg.x) - msg.x), memory

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        raise NotImplementedError

    def server(self, state, replies):
        dx = replies.mean("dx")
        m = self.beta1 * state.m + (1 - self.beta1) * dx
        v = self.second(state.v, dx.square())
        return Moments(state.x + self.server_lr * m / (v.sqrt() + self.epsilon), m, v)


@register("fedadagrad")
class FedAdagrad(_Adaptive):
    __doc__ = ADAPTIVE.format(title="Adagrad on the server.", rule="v <- v + D^2")

    server_lr: float = 0.1
    beta1: float = 0.0
    beta2 = 1.0  # not used: v only grows
    epsilon: float = 1e-3  # tau
    v0: float | None = None  # start of v; None: epsilon^2

    def second(self, v, square):
        return v + square


@register("fedadam")
class FedAdam(_Adaptive):
    __doc__ = ADAPTIVE.format(title="Adam on the server.", rule="v <- beta2 v + (1 - beta2) D^2")

    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3  # tau
    v0: float | None = None  # start of v; None: epsilon^2

    def second(self, v, square):
        return self.beta2 * v + (1 - self.beta2) * square


@register("fedyogi")
class FedYogi(_Adaptive):
    __doc__ = ADAPTIVE.format(title="Yogi on the server.", rule="v <- v - (1 - beta2) D^2 sign(v - D^2)")

    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3  # tau
    v0: float | None = None  # start of v; None: epsilon^2

    def second(self, v, square):
        return v - (1 - self.beta2) * square * torch.sign(v - square)
