"""FedAvg in pfl-research 0.6.0 on the work of `peers.py`; runs in an environment of its own.

usage: pfl_research.py FOLDER, or the same under torchrun for several processes
"""

import os
import sys
import time

os.environ["PFL_PYTORCH_DEVICE"] = "cpu"

import torch
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


class Network(torch.nn.Module):
    """A network with the methods pfl asks for."""

    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.network = network

    def loss(self, inputs, targets, eval=False):
        """Training loss."""
        return torch.nn.functional.cross_entropy(self.network(inputs), targets)

    def metrics(self, inputs, targets):
        """Evaluation, which the work has none of."""
        return {}


class Stopwatch(TrainingProcessCallback):
    """Notes when the first round begins and every round ends."""

    def __init__(self):
        self.times: list[float] = []

    def on_train_begin(self, *, model):
        """Take the time."""
        self.times.append(time.time())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Take the time."""
        self.times.append(time.time())
        return False, Metrics()


def main(folder: str) -> None:
    job = work.read(folder)
    users = [Dataset(raw_data=list(pair), user_id=user) for user, pair in enumerate(zip(job.inputs, job.targets))]
    order = iter([user for cohort in job.cohorts for user in cohort])
    network = Network(job.module())
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    watch = Stopwatch()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=len(job.cohorts), evaluation_frequency=10**9,
            train_cohort_size=len(job.cohorts[0]), val_cohort_size=0,
        ),
        backend=SimulatedBackend(FederatedDataset(users.__getitem__, lambda: next(order)), val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=work.BATCH
        ),
        model_eval_params=None,
        callbacks=[watch],
    )  # fmt: skip
    if os.environ.get("RANK", "0") == "0":
        work.finish(folder, watch.times, network)


if __name__ == "__main__":
    main(*sys.argv[1:])
