"""A small comparison on disk, as `fedstride compare` leaves it; run as a script with a folder, a large one."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedstride as fs

A = fs.algorithms
SMALL = {"fedavg": A.FedAvg(), "fedveca": A.FedVeca(), "fedbuff": A.FedBuff()}


def digits(count, alpha, seed):
    """Clients with Dirichlet classes, test data, and clients x classes counts."""
    data, rng = load_digits(), np.random.default_rng(seed)
    x, y = (data.data / 16).astype(np.float32), data.target.astype(np.int64)
    order = rng.permutation(len(y))
    held, order = order[:400], order[400:]
    owner = np.empty(len(y), dtype=int)
    for name in range(10):
        rows = order[y[order] == name]
        owner[rows] = rng.choice(count, len(rows), p=rng.dirichlet(np.full(count, alpha)))
    parts = [order[owner[order] == client] for client in range(count)]
    parts = [rows if len(rows) else order[:5] for rows in parts]
    return [(x[rows], y[rows]) for rows in parts], (x[held], y[held])


def study(folder, methods=SMALL, seeds=2, rounds=6, count=6, steps=(2, 8), alpha=0.5, hidden=None, lr=0.1):
    """Write LABEL/seed-K for every method and seed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.toml").write_text(f'data = "digits"\nclients = {count}\nrounds = {rounds}\nseeds = {seeds}\n')
    for seed in range(seeds):
        parts, test = digits(count, alpha, seed)
        work = np.random.default_rng(seed).integers(*steps, count).tolist()
        for label, method in methods.items():
            place = folder / label / f"seed-{seed}"
            if place.exists():
                continue
            torch.manual_seed(seed)
            layers = [nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)] if hidden else [nn.Linear(64, 10)]
            result = fs.simulate(
                method,
                nn.Sequential(*layers),
                fs.Clients.from_arrays(parts),
                rounds=rounds * (4 if label in ("fedbuff", "dlsgd-hetero") else 1),
                steps=work,
                lr=lr,
                seed=seed,
                test=test,
                train_loss=True,
                timeline=True,
                folder=place,
                world=fs.World(devices=fs.devices.lognormal(0.01, 0.8), links=fs.links.bandwidth(2e6, 8e6, 0.02)),
            )
            with torch.no_grad():
                hits = [(result.model(torch.as_tensor(x)).argmax(1).numpy() == y).mean() for x, y in parts]
            counts = [np.bincount(y, minlength=10).tolist() for _, y in parts]
            sizes = [len(y) for _, y in parts]
            fleet = {"classes": list("0123456789"), "counts": counts, "accuracy": hits, "sizes": sizes}
            (place / "clients.json").write_text(json.dumps(fleet))
            (place / "experiment.toml").write_text(f'method = "{label}"\nseed = {seed}\nrounds = {rounds}\n')
    return folder


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = "fedavg fednova scaffold feddyn fedagrac fedlga localsteps centralised".split()
    methods = {name: fs.algorithm.make(name) for name in names}
    methods |= {"fedveca": A.FedVeca(), "fedprox mu=0.1": A.FedProx(mu=0.1), "fedbuff": A.FedBuff(n=5, concurrency=10)}
    methods |= {"dlsgd-hetero": A.DlsgdHetero(n=5, server_lr=1.0)}
    study(sys.argv[1], methods, seeds=3, rounds=60, count=20, steps=(2, 30), alpha=0.3, hidden=32)
