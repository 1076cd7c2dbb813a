"""Data sets by name, from arrays and from tables; synthetic fleets; augmentation."""

from fedstride.data.augment import crop_flip
from fedstride.data.dataset import Dataset, Examples, from_arrays, from_flower, from_huggingface
from fedstride.data.files import load
from fedstride.data.generated import least_squares, synthetic

__all__ = [
    "Dataset",
    "Examples",
    "crop_flip",
    "from_arrays",
    "from_flower",
    "from_huggingface",
    "least_squares",
    "load",
    "synthetic",
]
