"""Memory that is asked for again every round stays with the process.

glibc gives what is freed at the end of the heap back to the system, and fresh pages cost more than what is written to
them: a fifth to a fourth of a small model's round went there (docs/performance.md).
"""

import ctypes
import functools
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h has them
BLOCK = 1 << 25  # larger blocks are mapped one by one; the largest that every glibc accepts
KEPT = 1 << 28  # free bytes that the process keeps at most


@functools.cache
def keep() -> None:
    """From now on, keep freed memory, as far as the C library has a setting for that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, BLOCK)
        mallopt(M_TRIM_THRESHOLD, KEPT)
