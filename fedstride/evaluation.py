"""Measuring the global model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstride.clients import Clients
from fedstride.errors import FedstrideError
from fedstride.losses import LossFunction
from fedstride.vector import VectorModel

Metric = Callable[[Tensor, Tensor], Any]


class Evaluation:
    """Loss, accuracy and the user's own metrics on test data; on request the training loss over all clients."""

    def __init__(
        self,
        model: VectorModel,
        loss: LossFunction,
        test: tuple[Any, Any] | None,
        metrics: dict[str, Metric] | None,
        training: tuple[Clients, Tensor] | None,
    ):
        self._model, self._loss, self._training = model, loss, training
        self._metrics = metrics or {}
        if self._metrics and test is None:
            raise FedstrideError("metrics need test data; pass test=(inputs, targets)")
        self._test = None
        if test is not None:
            inputs, targets = (torch.as_tensor(part) for part in test)
            if len(inputs) != len(targets) or len(inputs) == 0:
                raise FedstrideError(f"test has {len(inputs)} inputs but {len(targets)} targets")
            x = model.x
            self._test = tuple(
                part.to(x.device, x.dtype if part.is_floating_point() else None) for part in (inputs, targets)
            )

    def __call__(self, x: Tensor) -> dict[str, float]:
        """The numbers for one row."""
        numbers: dict[str, float] = {}
        if self._test is not None:
            inputs, targets = self._test
            outputs = self._model.predict(x, inputs)
            numbers["loss"] = float(self._loss(outputs, targets))
            if outputs.dim() == 2 and outputs.shape[1] > 1 and targets.dim() == 1 and not targets.is_floating_point():
                numbers["accuracy"] = float((outputs.argmax(1) == targets).double().mean())
            numbers |= {name: float(metric(outputs, targets)) for name, metric in self._metrics.items()}
        if self._training is not None:
            clients, weights = self._training
            outputs = self._model.predict(x, clients.inputs)
            losses = []
            for client in range(len(clients)):
                rows = clients.order[clients.offsets[client] : clients.offsets[client + 1]]
                losses.append(float(self._loss(outputs[rows], clients.targets[rows])))
            numbers["train_loss"] = float(np.dot(weights.double().cpu().numpy(), losses))
        return numbers
