"""What FedaGrac and its saving form share: the calibrated steps, and who sends which reference."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedstride.algorithm import check_choice
from fedstride.descent import shifted
from fedstride.errors import FedstrideError

SENDS_FIRST = {"std": (False, True), "avg": (False, False), "first": (True, True), "reverse": (True, False)}


class Message(NamedTuple):
    x: Tensor
    nu: Tensor


class Reference(NamedTuple):
    v: Tensor


def calibration_at(calibration, round):
    """The calibration rate of every entry of `round`: a constant, or the last stage that has begun."""
    stages = calibration if isinstance(calibration, (tuple, list)) else ((0, calibration),)
    value = torch.zeros_like(round, dtype=torch.float64)
    for first, level in stages:
        value = torch.where(round >= first, float(level), value)
    return value


def ends_at_one(method):
    """Whether the last stage is full calibration, which makes the method exact."""
    return float(calibration_at(method.calibration, torch.tensor(1e9))) == 1


def check_fields(method):
    """Refuse impossible settings in words."""
    check_choice(method, "mode", tuple(SENDS_FIRST))
    check_choice(method, "start", ("full_grad", "zeros"))
    staged = isinstance(method.calibration, (tuple, list))
    try:
        stages = [
            (int(first), float(rate)) for first, rate in (method.calibration if staged else ((1, method.calibration),))
        ]
        firsts = [first for first, _ in stages]
        good = (
            firsts[:1] == [1] and sorted(set(firsts)) == firsts and all(0 <= rate < float("inf") for _, rate in stages)
        )
    except (TypeError, ValueError):
        good = False
    if not good:
        raise FedstrideError(
            f"{method.name}: calibration must be a number from 0, or stages ((1, rate), (first round, rate), ...) in "
            f"ascending order, not {method.calibration!r}"
        )


def sends_first(mode, steps, mean_steps):
    """Who sends the first gradient; K_i = Kbar is slow, whatever the rounding of the mean."""
    slow, fast = SENDS_FIRST[mode]
    return torch.where(steps > mean_steps * (1 + 1e-9), fast, slow)


def calibrated(method, work, msg, nu):
    """Local steps along g + calibration (nu - nu_i); returns y, the mean and the first of the raw gradients.

    The mean follows from where the steps end, as no local momentum is allowed: x - y = K lr (mean + shift).
    """
    shift = calibration_at(method.calibration, work.round).to(nu.dtype) * (msg.nu - nu)
    y, first = work.descend(msg.x, shifted, rows=(shift,), first=True)
    return y, (msg.x - y) / (work.steps * work.lr) - shift, first


def recomputed(method, replies, nu, local):
    """The mean of every reporter's raw gradients, from its displacement: -dx / (lr K_i) - calibration (nu - nu_i)."""
    reach = (replies.each("steps") * replies.each("lr")).to(nu.dtype)[:, None]
    rate = calibration_at(method.calibration, replies.each("round")).to(nu.dtype)[:, None]
    return -replies.rows("dx") / reach - rate * (nu - local)
