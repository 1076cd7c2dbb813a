"""Measuring the global model."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from fedstride.clients import Clients
from fedstride.errors import FedstrideError
from fedstride.inputs import check_labels
from fedstride.losses import LossFunction
from fedstride.results import COUNTERS
from fedstride.vector import VectorModel

Metric = Callable[[Tensor, Tensor], Any]

TAKEN = (*COUNTERS, "local_loss", "loss", "train_loss", "penalty")  # what a row says by itself


class Evaluation:
    """Loss, accuracy and the user's own metrics on test data; on request the training loss over all clients."""

    def __init__(
        self,
        model: VectorModel,
        loss: LossFunction,
        test: tuple[Any, Any] | None,
        metrics: dict[str, Metric] | None,
        training: tuple[Clients, Tensor] | None,
        weight_decay: float = 0.0,
    ):
        self._model, self._loss, self._training, self._weight_decay = model, loss, training, weight_decay
        self._metrics = metrics or {}
        if self._metrics and test is None:
            raise FedstrideError("metrics need test data; pass test=(inputs, targets)")
        self._test: tuple[Tensor, Tensor] | None = None
        self.classifies = False  # whether rows have an accuracy
        if metrics is not None and not isinstance(metrics, dict):
            raise FedstrideError(f"metrics must be a dict of names and functions (outputs, targets), not {metrics!r}")
        for name, metric in self._metrics.items():
            if name in TAKEN:
                raise FedstrideError(f"a metric must not be called {name!r}: every row has that already")
            if not callable(metric):
                raise FedstrideError(f"the metric {name!r} must be a function (outputs, targets), not {metric!r}")
        if test is not None:
            try:
                data = Clients.from_arrays([test]).to(model.x.device, model.x.dtype)
                self._test = data.inputs, data.targets
                outputs = model.predict(model.x, data.inputs[:2])
                loss(outputs, data.targets[:2])
                labels = data.targets.dim() == 1 and not data.targets.is_floating_point()
                self.classifies = labels and outputs.dim() == 2 and outputs.shape[1] > 1
                check_labels(data, loss, outputs)
            except FedstrideError as error:
                raise FedstrideError(str(error).replace("client 0", "test")) from None
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise FedstrideError(f"the test data do not fit model and loss: {str(error).splitlines()[0]}") from None
            self._try(outputs)

    def _try(self, outputs: Tensor) -> None:
        """Mistakes in metrics come out before the first round: on two examples, or, where one needs more, on all."""
        inputs, targets = self._test  # type: ignore[misc]
        try:
            self._measured(outputs, targets[: len(outputs)])
        except FedstrideError:
            self._measured(self._model.predict(self._model.x, inputs), targets)

    def _measured(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """The user's own metrics."""
        numbers = {}
        for name, metric in self._metrics.items():
            try:
                value = metric(outputs, targets)
            except Exception as error:  # it is the user's code
                raise FedstrideError(f"the metric {name!r} fails on the test data: {_first(error)}") from error
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise FedstrideError(f"the metric {name!r} must give one number, not {str(value)[:80]}") from None
        return numbers

    def __call__(self, x: Tensor) -> dict[str, float]:
        """The numbers for one row."""
        numbers: dict[str, float] = {}
        if self._test is not None:
            inputs, targets = self._test
            outputs = self._model.predict(x, inputs)
            numbers["loss"] = float(self._loss(outputs, targets))
            if self.classifies:
                numbers["accuracy"] = float((outputs.argmax(1) == targets).double().mean())
            numbers |= self._measured(outputs, targets)
        if self._training is not None:
            clients, weights = self._training
            outputs = self._model.predict(x, clients.inputs)
            losses = []
            for client in range(len(clients)):
                rows = clients.order[clients.offsets[client] : clients.offsets[client + 1]]
                losses.append(float(self._loss(outputs[rows], clients.targets[rows])))
            numbers["train_loss"] = float(np.dot(weights.cpu().numpy(), losses))
        if numbers and self._weight_decay:  # what is minimised is loss plus penalty
            numbers["penalty"] = self._weight_decay / 2 * float(x.double().square().sum())
        return numbers


def _first(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
