"""The former place of train/families/: documented imports from here still work."""

import sys

from ...train.families import family, keys, mixtral

for _module in (family, keys, mixtral):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
