"""Rounds work in the memory of the rounds before."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
import fedstride as fs

inputs, targets = torch.randn(100, 20, 784), torch.randint(0, 10, (100, 20))
clients, faults = fs.Clients.from_arrays(list(zip(inputs, targets))), []
fs.simulate(
    "fedavg", torch.nn.Linear(784, 10), clients, rounds=12, steps=2,
    progress=lambda row: faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt),
)
print(sorted(b - a for a, b in zip(faults[4:], faults[5:]))[3])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_rounds_need_no_fresh_pages():
    """A process of its own, since the setting is for good; one matrix of the cohort would be 766 pages."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100
