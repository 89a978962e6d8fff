"""CRC32, as zlib and gzip have it, by the fastest library that is installed.

zlib-ng folds 64 bytes at a time (PCLMULQDQ, or the instructions of ARM): 25 GB/s on one core, where
Python's own zlib makes 1 to 4. Where there is no wheel of it, zlib counts; both give the same number,
so nothing but the time depends on it. `ENGINE` tells which.
"""

try:
    from zlib_ng.zlib_ng import crc32

    ENGINE = "zlib-ng"
except ImportError:
    from zlib import crc32

    ENGINE = "zlib"

__all__ = ["ENGINE", "crc32"]
