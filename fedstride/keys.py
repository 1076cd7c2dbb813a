"""Randomness with a key: every draw is a function of (seed, purpose, client, job, step), never of call order.

The generator is the counter-based finaliser of SplitMix64 on 64-bit integers, written in torch so that a whole cohort
draws in one call and every device gives the same bits. Server-side draws (cohorts, step counts) use numpy's Philox.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstride.transfer import there

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def mix(z: Any) -> Any:
    """Scramble 64-bit integers, in a tensor or a numpy array; neighbouring counters come out unrelated."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(
        FIRST
    )  # the masks turn torch's arithmetic shift into a logical one
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(SECOND)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def fold(keys: Any, values: Any) -> Any:
    """Make new keys from keys and integers, elementwise; tensors or numpy arrays."""
    if isinstance(values, int):
        return mix(keys + _signed((values + 1) * GOLDEN))
    # `| 0` keeps compilers from multiplying the counters of an `arange` in 32 bits.
    return mix(keys + ((values | 0) + 1) * _signed(GOLDEN))


def key(*parts: int | str) -> int:
    """One 64-bit key from integers and words."""
    text = "\x1f".join(f"word:{part}" if isinstance(part, str) else f"number:{part:d}" for part in parts)
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def job_keys(
    seed: int, purpose: str, clients: np.ndarray, versions: np.ndarray, repeats: np.ndarray, device: torch.device
) -> Tensor:
    """One key a job: a client that starts from a version for the n-th time, for one purpose."""
    base = np.full_like(clients, key(seed, purpose))
    return there(fold(fold(fold(base, clients), versions), repeats), device)


def below(keys: Tensor, bound: Tensor) -> Tensor:
    """Integers uniform in [0, bound) from keys; the bound stays under 2^31."""
    return (((keys >> 33) & 0x7FFFFFFF) * bound) >> 31


def draw(key: int, counter: int) -> int:
    """One of 2^64 numbers with equal chances: the finaliser above on plain integers, for draws one at a time."""
    z = (key + (counter + 1) * GOLDEN) & MASK
    z = (z ^ (z >> 30)) * FIRST & MASK
    z = (z ^ (z >> 27)) * SECOND & MASK
    return z ^ (z >> 31)


def generator(*parts: int | str) -> np.random.Generator:
    """Numpy generator for one server-side draw."""
    return np.random.Generator(np.random.Philox(key=key(*parts) & MASK))
