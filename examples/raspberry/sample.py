"""Writes readings to try this with: FOLDER/K/readings.csv, the K-th client's part of the experiment's data set."""

import sys
from pathlib import Path

import numpy as np

from fedstride.experiment import Experiment

folder, count = Path(sys.argv[1]), int(sys.argv[2])
clients, _, _ = Experiment.load(Path(__file__).parent / "experiment.toml").fleet()
for number in range(count):
    inputs, targets = clients.data(number)
    (folder / str(number)).mkdir(parents=True, exist_ok=True)
    table = np.column_stack([inputs.reshape(len(inputs), -1).numpy(), targets.numpy()])
    np.savetxt(folder / str(number) / "readings.csv", table, delimiter=",", fmt="%.9g")
