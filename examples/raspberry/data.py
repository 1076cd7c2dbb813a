"""This device's examples: readings.csv beside this file, a row an example, its class in the last column."""

from pathlib import Path

import numpy as np


def load():
    """Inputs and targets."""
    table = np.loadtxt(Path(__file__).parent / "readings.csv", delimiter=",", ndmin=2)
    return table[:, :-1].astype("float32"), table[:, -1].astype("int64")
