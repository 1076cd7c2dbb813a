"""Synthetic fleets, born partitioned."""

import numpy as np
import torch

from fedstride.clients import Clients
from fedstride.data.dataset import Examples
from fedstride.errors import FedstrideError
from fedstride.inputs import real, whole
from fedstride.keys import generator


def least_squares(
    clients: int = 20,
    *,
    rows: int = 500,
    features: int = 100,
    rho: float = 0.0,
    targets: str = "interpolating",
    seed: int = 0,
) -> Clients:
    """The least squares of the o(1/t) paper, f_i(x) = 1/2 ||A_i x - b_i||^2, for `fs.losses.least_squares_sum`.

    A_i = i^rho B_i (i counted from 1) with the entries of B_i uniform in [0, 1], and the first two columns of A_1
    equal. targets: "interpolating" is b_i = A_i x_0 with every entry of x_0 equal to 10, so that one x suits all
    clients; "random" draws b_i uniform in [0, 1].
    """
    clients, rows, features = whole("clients", clients), whole("rows", rows), whole("features", features)
    rho, seed = real("rho", rho), whole("seed", seed, 0)
    if targets not in ("interpolating", "random"):
        raise FedstrideError(f"targets must be 'interpolating' or 'random', not {targets!r}")
    pairs = []
    for client in range(clients):
        rng = generator(seed, "least squares", client)
        a = (client + 1) ** rho * rng.uniform(size=(rows, features))
        if client == 0 and features > 1:
            a[:, 1] = a[:, 0]
        pairs.append((a, a.sum(1) * 10 if targets == "interpolating" else rng.uniform(size=rows)))
    return Clients.from_arrays(pairs)


def synthetic(
    alpha: float, beta: float, *, clients: int = 30, features: int = 60, classes: int = 10, seed: int = 0
) -> tuple[Clients, Examples]:
    """FedProx's synthetic(alpha, beta): a fleet, and the tenth of everybody's data that is kept for testing.

    Client k labels by argmax(W_k x + b_k), the entries of W_k and b_k normal around u_k ~ N(0, alpha); its inputs are
    normal with variances j^-1.2 around a v_k whose entries are normal around B_k ~ N(0, beta). So alpha says how much
    models differ between clients, beta how much data do. Sizes are log-normal(4, 2) plus 50. As in the official code,
    alpha and beta are standard deviations; the paper's notation reads as if they were variances.
    """
    alpha, beta, seed = real("alpha", alpha, 0), real("beta", beta, 0), whole("seed", seed, 0)
    clients, features, classes = whole("clients", clients), whole("features", features), whole("classes", classes)
    pairs, held = [], []
    for client in range(clients):
        rng = generator(seed, "synthetic", client)
        n = int(rng.lognormal(4, 2)) + 50
        u, centre = rng.normal(0, alpha), rng.normal(rng.normal(0, beta), 1, features)
        w, b = rng.normal(u, 1, (features, classes)), rng.normal(u, 1, classes)
        x = centre + rng.normal(size=(n, features)) * np.arange(1, features + 1) ** -0.6
        x, y = x.astype(np.float32), (x @ w + b).argmax(1)
        cut = int(0.9 * n)
        pairs.append((x[:cut], y[:cut]))
        held.append((torch.as_tensor(x[cut:]), torch.as_tensor(y[cut:])))
    return Clients.from_arrays(pairs), Examples(*(torch.cat(parts) for parts in zip(*held)))
