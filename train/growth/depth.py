"""Makes loops out of layers: `prelude=0:4 core=4:10 coda=14:16 loops=4` (arXiv 2511.07384).

Ranges a:b name layers by number, without b. Layers between the three are left out. The core runs R
times, and every loop reads the prelude's output e beside its state s:

    s ← W·[s, e],  W = [I | 0] at the start, and s = e before the first loop

With one loop this is the model without the layers that were left out. More loops change the
function, so training may begin with few (model.loops.depth.kind=growing).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ...distributed.checkpoint.grown import Take
from ...model.config.model_config import ModelConfig
from ..config.errors import ConfigError
from ..families.table import shapes_of
from .growth import Given, Growth, count_of

_MOST_LOOPS = 256
_ADAPTER = "loops.injection.adapter.weight"


def depth(model: ModelConfig, words: Mapping[str, str], given: Given) -> Growth:
    """Returns a model whose core repeats, made of a model's layers.

    Args:
        model: applies every layer once.
        words: `prelude`, `core` and `coda`, ranges a:b of layers, and `loops`, R; prelude and coda
            can be missing.
        given: is not read.

    Raises:
        ConfigError: the model has loops already, or the ranges do not fit it or each other.
    """
    if model.num_repeats > 1 or model.halting or not model.loops.is_plain:
        raise ConfigError(
            f"the model has loops already, R = {model.num_repeats}; set model.num_layers for others"
        )
    if not 0 < (loops := count_of(words.get("loops", ""))) <= _MOST_LOOPS:
        raise ConfigError(f"say how often the core runs, up to {_MOST_LOOPS}, for example loops=4")
    parts = _parts(words, model.num_layers)
    layers = [layer for part in parts for layer in part]
    prelude, core, coda = map(len, parts)
    changes: dict[str, Any] = {"loops.prelude": prelude, "loops.coda": coda, "order": "abab"}
    changes |= {"layers_per_group": len(layers), "num_layers": prelude + loops * core + coda}
    changes["loops.inject"] = "linear"
    grown = model.changed(changes | _listed_layers(model, layers))
    lost = sorted({*range(model.num_layers)} - {*layers})
    return Growth(
        grown,
        tuple(_takes(model, grown, layers)),
        "with one loop, the logits are those of the layers that are left, to 1e-6",
        is_exact=loops == 1 and not lost,
        notes=(f"layers left out: {', '.join(map(str, lost))}",) if lost else (),
    )


def _parts(words: Mapping[str, str], num_layers: int) -> list[range]:
    """Returns the layers of prelude, core and coda; only layers between them are in none."""
    parts = [range(0)] * 3
    for place, name in enumerate(("prelude", "core", "coda")):
        match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", words.get(name, ""))
        parts[place] = range(*map(int, match.groups())) if match else range(0)
        if (name in words and not parts[place]) or parts[place].stop > num_layers:
            raise ConfigError(
                f"{name} is a range of the model's {num_layers} layers, counted from 0 and without "
                f"its end, for example {name}=0:{num_layers}"
            )
    named = [part for part in parts if part]
    if any(part.stop > after.start for part, after in pairwise(named)):
        raise ConfigError(
            "prelude, core and coda share layers or are out of order; each begins where the one "
            "before it ends, or after layers that are left out"
        )
    first, last = named[0].start, named[-1].stop - 1
    if (first, last) != (0, num_layers - 1):
        raise ConfigError(
            f"the parts begin with layer {first} and end with layer {last}: layers 0 and "
            f"{num_layers - 1} stay, and only layers between the parts can be left out"
        )
    return parts


def _listed_layers(model: ModelConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Returns the keys that list layers, with the new numbers of these."""
    changes: dict[str, Any] = {}
    if model.experts is not None and model.experts.sparse_layers != "all":
        sparse = tuple(new for new, old in enumerate(layers) if model.has_experts(old))
        changes = (
            {"feed_forward.sparse_layers": sparse} if sparse else {"feed_forward.kind": "dense"}
        )
    listed: Any = getattr(model.attention, "window_layers", "all")
    if listed != "all":
        windows = tuple(new for new, old in enumerate(layers) if old in listed)
        changes |= {"attention.window_layers": windows or "all"}
        changes |= {} if windows else {"attention.window": None}
    return changes


def _takes(model: ModelConfig, grown: ModelConfig, layers: Sequence[int]) -> Iterator[Take]:
    """Yields the layers that have other numbers now, and the matrix [I | 0]."""
    for name, shape in shapes_of(grown).items():
        if match := re.match(r"group\.(\d+)\.", name):
            source = f"group.{layers[int(match[1])]}.{name[match.end() :]}"
            start = (0,) * len(shape)
            yield Take(name, start, shape, source, start, tuple(range(len(shape))))
    width = model.d_model
    yield Take(_ADAPTER, (0, 0), (width, width), eye=1.0)
    yield Take(_ADAPTER, (0, width), (width, width))
