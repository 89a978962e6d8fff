"""The former place of train/families/mixtral.py."""

from ...train.families.mixtral import MIXTRAL

__all__ = ["MIXTRAL"]
