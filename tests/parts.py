"""Reaches into a model: torch knows every attribute of a module as `Tensor | Module`, a test knows
which it is.
"""

from typing import Any

from torch import nn


def layers(model: nn.Module) -> list[Any]:
    """Returns the layers of the model's group, of type Any: their attributes are looked up as they are."""
    return list(model.get_submodule("group").children())
