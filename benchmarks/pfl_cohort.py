"""The peer: FedAvg in pfl-research 0.6.0 on the work of `oracle.py`. Runs in an environment of its own.

usage: pfl_cohort.py MODEL CLIENTS BATCH STEPS ROUNDS      (PFL_PYTORCH_DEVICE=cuda for a GPU)
prints client-steps per second, from the median round
"""

import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from models import NETWORKS
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Network(torch.nn.Module):
    """A network with the two methods pfl asks for."""

    def __init__(self, name: str):
        super().__init__()
        self.network = NETWORKS[name]()

    def loss(self, inputs, targets, eval=False):
        """Training loss."""
        return torch.nn.functional.cross_entropy(self.network(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs, targets):
        """Evaluation metrics."""
        return {"loss": Weighted(float(self.loss(inputs, targets)) * len(targets), len(targets))}


class Stopwatch(TrainingProcessCallback):
    """Notes when every round ends."""

    def __init__(self):
        self.times: list[float] = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Take the time."""
        self.times.append(time.perf_counter())
        return False, Metrics()


def main(name: str, clients: int, batch: int, steps: int, rounds: int) -> None:
    device = os.environ["PFL_PYTORCH_DEVICE"]
    torch.manual_seed(0)
    users = [
        [torch.randn(steps * batch, 1, 28, 28, device=device), torch.randint(0, 10, (steps * batch,), device=device)]
        for _ in range(clients)
    ]
    draw = np.random.RandomState(0)
    data = FederatedDataset(lambda user: Dataset(raw_data=users[user], user_id=user), lambda: draw.randint(clients))
    network = Network(name).to(device)
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    watch = Stopwatch()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=clients, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.05, local_batch_size=batch),
        model_eval_params=None,
        callbacks=[watch],
    )
    print(f"{clients * steps / statistics.median(np.diff(watch.times)):.0f}")


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:6]))
