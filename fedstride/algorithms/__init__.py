"""The methods. Every module of this folder is imported, so a new file is a new method."""

import importlib
import pkgutil

from fedstride.algorithm import REGISTRY, Algorithm, make, names

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

CLASSES = {cls.__name__: cls for cls in REGISTRY.values()}

globals().update(CLASSES)  # dir() and completion show them

__all__ = ["make", "names", *CLASSES]


def __getattr__(name: str) -> type[Algorithm]:
    """Tell type checkers what `fs.algorithms.FedAvg` is, and people what there is instead."""
    raise AttributeError(f"fs.algorithms has no class {name!r}; it has {', '.join(sorted(CLASSES))}")
