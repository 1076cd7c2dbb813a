"""How near a client step comes to what the machine can do."""

import sys
import time
from pathlib import Path

import torch
from models import NETWORKS
from work import BATCH

sys.path.insert(0, str(Path(__file__).parent.parent))

import fedstride as fs


def seconds(call, device: str) -> float:
    """The quickest of several calls."""
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def rates(device: str) -> tuple[float, float]:
    """Operations a second of a large matrix product, bytes a second (read and written) of a large copy."""
    n = 8192 if device == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=device)
    source, target = torch.randn(2, 1 << (28 if device == "cuda" else 26), device=device)
    return (
        2 * n**3 / seconds(lambda: torch.mm(a, b), device),
        2 * source.nbytes / seconds(lambda: target.copy_(source), device),
    )


def traffic(network: torch.nn.Module, inputs: torch.Tensor) -> int:
    """Bytes a client step cannot do without: weights read, then read and written where they move, inputs read;
    gradients are added while they are made, and activations, and weights for the backward pass, left to the caches."""
    return 3 * sum(parameter.nbytes for parameter in network.parameters()) + inputs.nbytes


def cost(model: str) -> tuple[float, float]:
    """Operations and bytes of one client step."""
    network = NETWORKS[model]()
    inputs = torch.randn(BATCH, *((3, 32, 32) if model == "cifar" else (1, 28, 28)))
    return fs.devices.measured_flops(network, inputs), traffic(network, inputs)


def report(device: str, speeds: dict[tuple[str, int], float]) -> None:
    """The share of the nearer limit that each speed (client-steps a second) reaches."""
    product, copy = rates(device)
    print(f"\nThis machine: matrix product {product / 1e9:,.0f} GFLOP/s (float32), copy {copy / 1e9:,.1f} GB/s.\n")
    print("| model | cohort | MFLOP a step | MB a step | limit, client-steps/s | by | reached |")
    print("|---|---|---|---|---|---|---|")
    for (model, cohort), speed in speeds.items():
        flops, moved = cost(model)
        limits = {"products": product / flops, "memory": copy / moved}
        by = min(limits, key=lambda name: limits[name])
        numbers = f"{flops / 1e6:.2f} | {moved / 1e6:.2f} | {limits[by]:,.0f} | {by} | {speed / limits[by]:.0%}"
        print(f"| {model} | {cohort} | {numbers} |")
