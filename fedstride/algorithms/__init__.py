"""The methods. Every module of this folder is imported, so a new file is a new method."""

import importlib
import pkgutil

from fedstride.algorithm import REGISTRY, make, names  # REGISTRY: name -> class

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

globals().update({cls.__name__: cls for cls in REGISTRY.values()})

__all__ = ["make", "names", *(cls.__name__ for cls in REGISTRY.values())]
