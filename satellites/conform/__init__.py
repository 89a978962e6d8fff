"""Checks any expert-parallel layer against a single rank and diagnoses faults by measurement.

    python -m moebius_conform mylayers.py:build

satellites/conform/README.md describes the contract and the classes of faults. The package needs torch, numpy
and rich; it imports nothing from moebius.
"""

from .contract import Layer, Shard
from .run import assert_conforms, check

__version__ = "0.3.0"
__all__ = ["Layer", "Shard", "assert_conforms", "check"]
