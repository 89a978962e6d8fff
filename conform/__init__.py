"""Checks of anybody's expert-parallel layer against one rank, with a diagnosis by measurement.

    python -m moebius.conform mylayers.py:build

See docs/conform.md for the contract and the classes of faults. This room needs torch, numpy and
rich, and nothing else of moebius.
"""

from .contract import Layer, Shard
from .run import assert_conforms, check

__all__ = ["Layer", "Shard", "assert_conforms", "check"]
