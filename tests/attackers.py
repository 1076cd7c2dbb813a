"""Clients that lie: what some of them send is changed on its way to the server."""

from contextlib import contextmanager

import torch

import fedstride as fs

Simulator = fs.simulate.__globals__["Simulator"]


@contextmanager
def lying(clients, lie):
    """The uploads of some clients are what `lie` makes of them: a function of a field's rows."""
    train = Simulator._train

    def false(self, exchange, message, jobs):
        trained = train(self, exchange, message, jobs)
        liars = torch.as_tensor([client in clients for client in jobs.clients.tolist()])
        changed = [torch.where(liars[:, None].to(value.device), lie(value), value) for value in trained.upload]
        return trained._replace(upload=type(trained.upload)(*changed)) if changed else trained

    Simulator._train = false
    try:
        yield
    finally:
        Simulator._train = train
