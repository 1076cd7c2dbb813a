"""Beyond one machine: workers as Ray actors train the jobs of a run, or whole runs side by side."""

from fedstride.scale.pool import Pool

__all__ = ["Pool"]
