"""moebius: expert-parallel pretraining of Mixture-of-Experts Universal Transformers.

For notebooks and scripts (api.py): `recipe` makes a configuration, `build` its untrained model,
`train` trains it, `load` brings a trained one back. They are imported when first used, so that
`import moebius` costs no torch.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import LoadedModel, TrainingFailed, build, load, recipe, train

__version__ = "0.1.0"
__all__ = ["LoadedModel", "TrainingFailed", "__version__", "build", "load", "recipe", "train"]


def __getattr__(name: str) -> Any:
    """Imports a name of `__all__` when it is first used."""
    if name == "train":
        from importlib import import_module

        return import_module(".train", __name__)  # callable, see below
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# `train` is two things: the function, and the room train/, which Python sets as an attribute of the
# package whenever one of its modules is imported. So the room itself can be called.
class _Train(ModuleType):
    """The room train/, which can be called as the function `train` of api.py."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        from . import api

        return api.train(*arguments, **named)


class _Package(ModuleType):
    """The package, which makes its room train/ callable when Python sets it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "train" and isinstance(value, ModuleType):
            value.__class__ = _Train
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
