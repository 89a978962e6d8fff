"""Memory of a rank on CPUs: what was freed is kept, for the next step wants as much again.

glibc gives large freed blocks back to the system, which clears their pages when they are wanted again: in every step, layer and
exchange. Kept, they cost nothing. The price is that a process never becomes smaller.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)
_NEVER = -1


def keep_freed_memory() -> bool:
    """From here on this process keeps what it frees; False where its C library is not glibc, and nothing was changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
