"""The former place of train/families/keys.py."""

from ...train.families.keys import ConfigKey as Key
from ...train.families.keys import Only, Own

__all__ = ["Key", "Only", "Own"]
