"""Exports checkpoints to other formats.

Importing a module of this package makes the package the attribute `export` of moebius, where the
function of that name was. So the package can be called like the function.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> str:
        # by name, for this package is below api.py, which imports it
        return import_module("..api", __name__).export(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
