"""The former place of train/families/family.py."""

from ...train.families.family import Arrangement as Layout
from ...train.families.family import Family, Rule

__all__ = ["Family", "Layout", "Rule"]
