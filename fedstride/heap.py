"""Memory that is asked for again every round stays with the process.

glibc gives what is freed at the end of the heap back to the system, and fresh pages cost more than what is written to
them: a fifth to a fourth of a small model's round went there (docs/performance.md).
"""

import ctypes
import functools
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h has them
MAPPED = 1 << 25  # blocks from here on are mapped one by one, always afresh; the largest that every glibc accepts
BLOCK = MAPPED - (1 << 12)  # so much a tensor may have and be kept, with what aligning it takes
KEPT = 1 << 28  # free bytes that the process keeps at most


@functools.cache
def keep() -> None:
    """From now on, keep freed memory, as far as the C library has a setting for that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)
        mallopt(M_TRIM_THRESHOLD, KEPT)
