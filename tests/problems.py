"""Heterogeneous quadratics with known answers: F_i(x) = 1/2 (x - c_i)' A_i (x - c_i), as least squares on real data."""

import signal
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

import fedstride as fs

STEPS = [1, 6, 3, 5, 2, 4]
LR = 0.15


@dataclass
class Quadratics:
    """Six clients of different size, curvature and minimiser."""

    seed: int = 0
    sizes: tuple[int, ...] = (6, 9, 14, 5, 20, 11)
    d: int = 4
    shared: bool = False  # all clients equal
    a: list[np.ndarray] = field(default_factory=list)
    c: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        pairs = []
        for n in self.sizes:
            if self.shared and pairs:
                pairs.append(pairs[0])
                self.a.append(self.a[0])
                self.c.append(self.c[0])
                continue
            left = np.linalg.qr(rng.normal(size=(n, self.d)))[0]
            right = np.linalg.qr(rng.normal(size=(self.d, self.d)))[0]
            spectrum = rng.uniform(1, 3, self.d)
            x = np.sqrt(n) * left * np.sqrt(spectrum) @ right.T
            self.a.append(x.T @ x / n)
            self.c.append(3 * rng.normal(size=self.d))
            pairs.append((x, x @ self.c[-1]))
        self.clients = fs.Clients.from_arrays(pairs)
        self.weights = {
            "data": self.clients.sizes / self.clients.sizes.sum(),
            "uniform": np.full(len(self.clients), 1 / len(self.clients)),
        }

    def model(self) -> nn.Module:
        model = nn.Linear(self.d, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(torch.as_tensor(np.linspace(-1, 1, self.d)))
        return model

    def optimum(self, weights: str = "data") -> np.ndarray:
        return self.balance([np.eye(self.d)] * len(self.a), weights)

    def balance(self, factors: list[np.ndarray], weights: str = "data") -> np.ndarray:
        """The x with sum w_i P_i A_i (x - c_i) = 0."""
        matrices = [w * p @ a for w, p, a in zip(self.weights[weights], factors, self.a)]
        return np.linalg.solve(sum(matrices), sum(m @ c for m, c in zip(matrices, self.c)))

    def path(self, lr: float, steps: int, a: np.ndarray) -> np.ndarray:
        """sum over k < steps of (I - lr a)^k, so that B = lr path a."""
        eye = np.eye(self.d)
        return (eye - np.linalg.matrix_power(eye - lr * a, steps)) @ np.linalg.inv(lr * a)

    def run(self, algorithm, **changes) -> fs.Result:
        """A float64 run with exact gradients and unequal steps, unless told otherwise."""
        settings = dict(
            loss=fs.losses.least_squares, rounds=250, lr=LR, steps=STEPS, batch_size=None, weights="data",
            dtype=torch.float64, device="cpu",
        )  # fmt: skip
        settings |= changes
        return fs.simulate(algorithm, self.model().to(settings["dtype"]), self.clients, **settings)

    def distance(self, result: fs.Result, point: np.ndarray) -> float:
        return float(np.linalg.norm(result.x.cpu().numpy() - point))


def digits(clients: int = 6, per_client: int = 20) -> tuple[fs.Clients, tuple]:
    """A small classification fleet with skewed labels; the last part of the data is for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = np.argsort(labels[: clients * per_client], kind="stable")
    parts = np.array_split(order, clients)
    # Unequal sizes: client i leaves out its first i examples.
    pairs = [(images[part[i:]], labels[part[i:]]) for i, part in enumerate(parts)]
    return fs.Clients.from_arrays(pairs), (images[1500:], labels[1500:])


def small_network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout), nn.Flatten(),
        nn.Linear(64, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 10),
    )  # fmt: skip


OPTIONS = {"dlsgd-homo": {"n": 2}, "dlsgd-hetero": {"n": 3}, "fedbuff": {"n": 2}, "asysg": {"n": 2}}


def flower_description(method, clients, **more):
    """A small experiment with unequal steps, for runs that also go over a network."""
    options = {name: min(value, clients) for name, value in OPTIONS.get(method, {}).items()}
    fields = dict(
        partition={"name": "dirichlet", "clients": clients, "alpha": 1.0}, model={"name": "mlp", "hidden": 8},
        method={"name": method, **options}, rounds=3, lr=0.05, steps=[1, 4, 2, 3][:clients],
        batch_size=5, dtype="float64", device="cpu",
    )  # fmt: skip
    return fs.Experiment(**fields | more)


def simulated(experiment, trace=None):
    """The same in the simulator, in the order of a trace if there is one."""
    method, model, clients, _, settings = experiment.prepare()
    if trace is not None:
        settings |= {"schedule": fs.schedule.Replay(trace)}
    return fs.simulate(method, model, clients, **settings)


def add(replies, jobs, upload):
    """Take in uploads, all of them used."""
    replies.add(jobs, replies.reduce(jobs, upload, np.ones(len(jobs.clients), dtype=bool), 0))


def heed_ctrl_c():
    """For a process that is sent one: tests that run in the background ignore it, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
