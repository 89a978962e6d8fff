"""Memory of a rank on CPUs: what was freed is kept, for the next step wants as much again.

glibc gives large freed blocks back to the system, which clears their pages when they are wanted
again: in every step, layer and exchange. Kept, they cost nothing. The price: a process never
becomes smaller, and where sizes vary, pieces too small for anybody lie between those in use
(tests/distributed/process/test_host_memory.py draws sizes up to 64 MiB, and bounds it at as much
again). What other threads than the first allocate beyond 64 MiB at a time is given back as before.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)
_NEVER = -1


def keep_freed_memory() -> bool:
    """Lets this process keep from here on the memory that it frees.

    Another allocator that was preloaded has rules of its own, which this does not change.

    Returns:
        Whether the C library could be told so: False for any but glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return (
        mallopt is not None
        and bool(mallopt(_MMAP_MAX, 0))
        and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
    )
