"""Translates keys of a published config.json to those of the model's configuration, and back.

A `Part` translates some keys both ways; most parts are a `ConfigKey`. A key that a file lacks has the
default of transformers' class. A key that no part knows is refused by name, because a model that
ignores it computes something else. Both dialects are read: the hub's (rope_theta, rope_scaling) and
that of transformers 5 (rope_parameters).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...model.config.model_config import ModelConfig
from ..config.run_config import ConfigError

MOST = 10**7  # of any size or count in config.json
_SHOWN = 200  # characters of a foreign value in a message
_TYPES = ("full_attention", "sliding_attention")
# Keys of config.json that change no computation.
_HARMLESS = """
    architectures auto_map model_type transformers_version torch_dtype dtype bos_token_id
    eos_token_id pad_token_id max_position_embeddings use_cache output_router_logits
    output_attentions output_hidden_states return_dict id2label label2id is_encoder_decoder
    problem_type pretraining_tp chunk_size_feed_forward ep_size seq_aux max_window_layers
    tokenizer_class num_nextn_predict_layers num_mtp_layers quantization_config qk_head_dim
    initial_context_length num_key_value_heads head_dim attn_implementation
    experts_implementation unsloth_version unsloth_fixed
"""


class UnfitError(ConfigError):
    """Raised if a model or a config.json is not of a family, or asks for what is not computed."""


@dataclass
class Reader:
    """Reads config.json key by key, and notes which keys were read and which had a default."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]  # of transformers' class; a function computes one from other keys
    known: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)  # what was read, for messages

    def take(self, name: str, kind: type, also: Sequence[str] = (), *, null: bool = False) -> Any:
        """Returns the value of a key, which may have other names, or its default.

        Null asks for the default, or is a value of its own.

        Raises:
            UnfitError: it is missing and has no default, two names differ, or it is of another kind.
        """
        self.known.update((name, *also))
        given = {key: self.values[key] for key in (name, *also) if key in self.values}
        lacks = "is null" if given and not null else "is missing"
        if not null:
            given = {key: value for key, value in given.items() if value is not None}
        if given:
            first = next(iter(given))
            if any(value != given[first] for value in given.values()):
                raise UnfitError(f"{_listed(given)} name the same thing and differ")
            self.asked[first] = value = _of_kind(first, given[first], kind)
            return value
        if name not in self.defaults:
            raise UnfitError(f"{name} {lacks} and has no default")
        value = self.defaults[name]
        if callable(value):
            self.asked[name] = value = value(self)
            return value
        self.notes.append(f"{name} {lacks}: {value!r}, the default of transformers' class")
        self.asked[name] = value
        return value

    def refuse_unknown(self) -> None:
        """Refuses keys that were not read and could change the computation."""
        known = self.known.union(_HARMLESS.split())
        unknown = {
            key: value
            for key, value in self.values.items()
            if key not in known and not key.startswith("_") and _means(value)
        }
        if unknown:
            raise UnfitError(
                f"{_listed(unknown)}: moebius does not know what this changes in the model; if it "
                "changes nothing, remove it from a copy of config.json"
            )


def _means(value: Any) -> bool:
    return not (value is None or value is False or value in ("", [], {}))


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key[:_SHOWN]}={value!r:.{_SHOWN}}" for key, value in values.items())


def _of_kind(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if kind is float and math.isfinite(value):
            return float(value)
        if kind is int and 0 <= value <= MOST and value == int(value):
            return int(value)
    elif value is None or (kind not in (int, float) and isinstance(value, kind)):
        return value
    wanted = {int: f"a whole number up to {MOST:,}", float: "a finite number"}
    raise UnfitError(f"{name}={value!r:.{_SHOWN}} must be {wanted.get(kind, f'a {kind.__name__}')}")


_OURS = re.compile(r"(?:\w+\.)*([a-z]\w*)(=(?:\([^)]*\)|[^\s,:;]+))?")


def in_words_of(origins: Mapping[str, Mapping[str, Any]], fault: Any) -> str:
    """Returns pydantic's complaint about a model in the words of config.json.

    Advice goes, because a folder cannot follow it. So do our keys that the family fixes.

    Args:
        origins: of our dotted keys, the keys of config.json that they were read from, with values.
        fault: an entry of `ValidationError.errors()`.
    """
    by_name: dict[str, Mapping[str, Any]] = {}
    for ours, theirs in origins.items():
        by_name.setdefault(ours.rpartition(".")[2], theirs)

    def translated(match: re.Match[str]) -> str:
        theirs = by_name.get(match[1])
        if match[2] is not None:
            return _listed(theirs) if theirs else "FIXED"
        return " and ".join(theirs) if theirs and "_" in match[1] else match[0]

    said = str(fault["msg"]).removeprefix("Value error, ").partition(";")[0]
    place = next((str(part) for part in reversed(fault["loc"]) if str(part) in by_name), "")
    if "=" not in said and place:
        said = f"{place}={fault['input']}: {said}"
    words = re.sub(r" (?:(?:with|of) )?FIXED", "", _OURS.sub(translated, said))
    words = words.replace("FIXED", "the family")
    words = re.sub(r"(\S+=\S+) with \1", r"\1", words)
    return words.replace("Input should be", "must be")


class Dotted:
    """Reads a model's configuration by dotted keys, each value in one of its spellings."""

    def __init__(self, model: ModelConfig) -> None:
        self.values = plain = model.model_dump()
        attention, forward = plain["attention"], plain["feed_forward"]
        plain["norm_eps"] = plain["norm_eps"] or 1e-6  # of model/layers.py
        factors = {"True": model.d_model**0.5, "False": 1.0}
        plain["scale_embedding"] = factors.get(str(model.scale_embedding), model.scale_embedding)
        if attention.get("num_kv_heads", 0) is None:
            attention["num_kv_heads"] = attention["num_heads"]
        if attention.get("scale", 0) is None:
            attention["scale"] = (attention["d_head"] + attention.get("d_rotary", 0)) ** -0.5
        if attention.get("window") is None:
            attention["window_layers"] = ()
        elif attention["window_layers"] == "all":
            attention["window_layers"] = tuple(range(model.layers_per_group))
        if model.attention.rotary_channels:
            attention["positions"]["width"] = model.attention.rotary_channels
        forward["sparse_layers"] = model.sparse_members
        shared = forward.get("num_shared_experts")
        forward["d_shared_expert"] = shared and (forward["d_shared_expert"] or forward["d_expert"])

    def __getitem__(self, path: str) -> Any:
        found: Any = self.values
        for name in path.split("."):
            if not isinstance(found, dict) or name not in found:
                raise UnfitError(f"the model has no {path}")
            found = found[name]
        return found


class Own(NamedTuple):
    """A part of one family, as two functions."""

    read: Callable[[Reader], dict[str, Any]]
    write: Callable[[Dotted], dict[str, Any]]


@dataclass(frozen=True)
class ConfigKey:
    """Maps one key of config.json to one of the model."""

    name: str
    ours: str  # dotted
    kind: type = int
    choices: Mapping[Any, Any] | None = None  # the model's value for each published one
    also: tuple[str, ...] = ()  # other names, which are read and not written
    null: bool = False  # whether null is a value

    def read(self, reader: Reader) -> dict[str, Any]:
        """Returns the value under our key."""
        value = reader.take(self.name, self.kind, self.also, null=self.null)
        if self.choices is None:
            return {self.ours: value}
        if value not in self.choices:
            known = ", ".join(map(repr, self.choices))
            raise UnfitError(f"{self.name}={value!r:.{_SHOWN}} is none of {known}")
        return {self.ours: self.choices[value]}

    def write(self, model: Dotted) -> dict[str, Any]:
        """Returns the published key with the value of ours."""
        value = model[self.ours]
        if self.choices is None:
            return {self.name: value}
        for theirs, ours in self.choices.items():
            if ours == value:
                return {self.name: theirs}
        raise UnfitError(f"{self.ours}={value!r} has no {self.name}")


@dataclass(frozen=True)
class Only:
    """Accepts one value of a key, the default of transformers' class; no other is computed here."""

    name: str
    value: Any

    def read(self, reader: Reader) -> dict[str, Any]:
        """Refuses any other value of the key."""
        reader.known.add(self.name)
        found = reader.values.get(self.name, self.value)
        if found != self.value and (_means(found) or _means(self.value)):
            raise UnfitError(
                f"{self.name}={found!r:.{_SHOWN}} is not computed here, only {self.value!r} is: use a "
                "model that was trained with it"
            )
        return {}

    def write(self, model: Dotted) -> dict[str, Any]:
        """Returns the key with its one value."""
        return {self.name: self.value}


_ROUTER = "feed_forward.router."
BALANCE_KEYS = ("router_aux_loss_coef", "output_router_logits")


@dataclass(frozen=True)
class Balance:
    """Maps the coefficient of the balancing loss that transformers' class adds.

    The class adds it only with `output_router_logits`, over one pool of all layers, and its value is
    top-k at perfect balance, where that of a layer here is 1.
    """

    name: str
    is_added: bool = True  # False: the class adds none, whatever the file says

    def read(self, reader: Reader) -> dict[str, Any]:
        """Returns the coefficient if the class adds the loss, else 0."""
        reader.known.update((self.name, "output_router_logits"))
        said = reader.values.get(self.name)
        weight = 0.0 if said is None and not self.is_added else reader.take(self.name, float)
        is_on = self.is_added and reader.take("output_router_logits", bool)
        words = "none, as transformers' class adds none"
        if weight and is_on:
            words = (
                f"{self.name}={weight}, pooled over all layers as in transformers' class; other "
            )
            words += "trainers divide by the experts per token"
        elif self.is_added:
            words += (
                f" with output_router_logits=false; model.{_ROUTER}balance={weight} trains with it"
            )
        elif weight:
            words += f" and {self.name}={weight} is not used"
        reader.notes.append(f"balancing loss: {words}")
        pool = {f"{_ROUTER}balance_pool": True} if self.is_added else {}
        return {f"{_ROUTER}balance": weight if is_on else 0.0} | pool

    def write(self, model: Dotted) -> dict[str, Any]:
        """Returns the coefficient with which the class adds as much; 0 if it cannot."""
        weight = model[f"{_ROUTER}balance"]
        kinds = [model[f"{_ROUTER}balance_{key}"] for key in ("form", "choices")]
        if not self.is_added:
            return {}
        if not model[f"{_ROUTER}balance_pool"]:
            weight = weight / model[f"{_ROUTER}top_k"] if kinds == ["load", "all"] else 0.0
        return {self.name: weight, "output_router_logits": weight > 0}


@dataclass(frozen=True)
class Windows:
    """Maps sliding_window and the layers that have it, by layer_types or by their number."""

    step: int = 2  # without a list every so many layers have it, from the first
    switch: bool = False  # use_sliding_window turns it on; below max_window_layers if listed
    listed: bool = True  # layer_types is written
    begins: bool = False  # with max_window_layers, where otherwise the layers with a window end

    def read(self, reader: Reader) -> dict[str, Any]:
        """Returns the window and its layers."""
        reader.known.update(("layer_types", "sliding_window"))
        count = reader.take("num_hidden_layers", int)
        is_used = reader.take("use_sliding_window", bool) if self.switch else True
        having = range(count if is_used else 0)
        if is_used and self.switch and self.listed:
            bound = reader.take("max_window_layers", int)
            having = having[bound:] if self.begins else having[:bound]
        usual = [_TYPES[n in having and n % self.step == 0] for n in range(count)]
        types = reader.values.get("layer_types") or usual
        is_list = isinstance(types, list) and len(types) == count
        if not is_list or any(each not in _TYPES for each in types):
            names = " or ".join(_TYPES)
            raise UnfitError(f"layer_types={types!r:.{_SHOWN}} must name {count} layers {names}")
        layers = tuple(n for n in range(count) if types[n] == _TYPES[True])
        window = reader.take("sliding_window", int, null=True) if is_used else None
        if not layers or (window is None and types is usual):
            return {}
        if not window:
            raise UnfitError(
                f"sliding_window={window} is no width, and layers {list(layers)} have a sliding window"
            )
        return {"attention.window": window, "attention.window_layers": layers}

    def write(self, model: Dotted) -> dict[str, Any]:
        """Returns the window with its layers."""
        window, layers = model["attention.window"], model["attention.window_layers"]
        count = model["num_layers"]
        if layers and not self.listed and len(layers) < count:
            raise UnfitError("some layers have a window, and others have none")
        found: dict[str, Any] = {"sliding_window": window}
        if self.listed:
            found["layer_types"] = [_TYPES[n in layers] for n in range(count)]
        if self.switch:
            bound = layers[0] if self.begins and layers else count
            found |= {"use_sliding_window": window is not None, "max_window_layers": bound}
        return found


_ROPE = {  # defaults of rope_parameters
    **dict(rope_type="default", beta_fast=32.0, beta_slow=1.0, truncate=True, factor=None),
    **dict(mscale=0.0, mscale_all_dim=0.0, attention_factor=None),
}
# Of two kinds of rope_parameters: the keys of YarnConfig
_STRETCH = {"factor": "factor", "original_max_position_embeddings": "original_positions"}
_YARN = _STRETCH | {name: name for name in ("beta_fast", "beta_slow", "truncate")}
_LLAMA3 = _STRETCH | {"low_freq_factor": "beta_slow", "high_freq_factor": "beta_fast"}


@dataclass(frozen=True)
class Rotary:
    """Maps rotary positions: rope_theta and rope_scaling, or rope_parameters, with their scaling."""

    theta: float = 10000.0
    share: float = 1.0  # of a head's channels that rotate, without partial_rotary_factor
    scaling: Mapping[str, Any] | None = None  # of transformers' class
    latent: bool = False  # multi-head latent attention, whose width is fixed and scale has m²

    def read(self, reader: Reader) -> dict[str, Any]:
        """Returns width, base, scaling and the factors that follow from it."""
        rope = self._parameters(reader)
        kind, base = rope.take("rope_type", str, ("type",)), rope.take("rope_theta", float)
        if base <= 1:
            raise UnfitError(f"rope_theta={base} must be above 1")
        found = {"positions.kind": "rotary", "positions.base": base}
        share = rope.take("partial_rotary_factor", float)
        if share != 1:
            reader.asked["partial_rotary_factor"] = share
        if share != self.share == 1:
            raise UnfitError(f"partial_rotary_factor={share} is not computed here, only 1 is")
        if not self.latent:
            found["positions.width"] = int(reader.take("head_dim", int) * share)
        if kind == "yarn":
            found |= self._yarn(rope, reader)
        elif kind == "llama3":
            found["positions.yarn"] = _llama3(rope)
        elif kind != "default":
            raise UnfitError(
                f"rope_type={kind!r:.{_SHOWN}}: only default, yarn and llama3 are computed here"
            )
        rope.refuse_unknown()
        reader.notes += [note for note in rope.notes if note.startswith("rope_theta")]
        return {f"attention.{key}": value for key, value in found.items()}

    def _parameters(self, reader: Reader) -> Reader:
        """Returns a reader of the parameters in either dialect."""
        reader.known.update(("rope_theta", "partial_rotary_factor"))
        values: dict[str, Any] = {}
        for name in ("rope_scaling", "rope_parameters"):
            reader.known.add(name)
            values |= _of_kind(name, reader.values.get(name), dict) or {}
        values = values or dict(self.scaling or {})
        for name in ("rope_theta", "partial_rotary_factor"):
            value = reader.values.get(name)
            if value is not None and values.setdefault(name, value) != value:
                raise UnfitError(
                    f"{name}={value!r:.{_SHOWN}} and {values[name]!r:.{_SHOWN}} differ"
                )
        usual = {"rope_theta": self.theta, "partial_rotary_factor": self.share}
        longest = reader.values.get("max_position_embeddings")
        return Reader(values, _ROPE | usual | {"original_max_position_embeddings": longest})

    def _yarn(self, rope: Reader, reader: Reader) -> dict[str, Any]:
        original = rope.take("original_max_position_embeddings", int)
        factor, amplitude = rope.take("factor", float), rope.take("attention_factor", float)
        if not isinstance(original, int) or original < 1:
            raise UnfitError("YaRN needs original_max_position_embeddings")
        factor = factor or reader.take("max_position_embeddings", int) / original
        mscale, all_dim = rope.take("mscale", float), rope.take("mscale_all_dim", float)
        if amplitude is None:
            both = mscale and all_dim
            amplitude = _m(factor, mscale) / _m(factor, all_dim) if both else _m(factor)
        yarn = {"factor": factor, "original_positions": original}
        yarn |= {name: rope.take(name, float) for name in ("beta_fast", "beta_slow")}
        yarn["truncate"] = rope.take("truncate", bool)
        found = {"positions.yarn": yarn, "positions.amplitude": amplitude}
        if self.latent and all_dim:
            width = sum(reader.take(f"qk_{part}_head_dim", int) for part in ("nope", "rope"))
            found["scale"] = width**-0.5 * _m(factor, all_dim) ** 2
        return found

    def write(self, model: Dotted) -> dict[str, Any]:
        """Returns the positions in both dialects."""
        base, yarn = model["attention.positions.base"], model["attention.positions.yarn"]
        width, d_head = model["attention.positions.width"], model["attention.d_head"]
        share = {} if self.share == 1 else {"partial_rotary_factor": width / d_head}
        scaling = None if yarn is None else self._scaling(model, yarn)
        both = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": base} | share
        return {"rope_theta": base, "rope_scaling": scaling, "rope_parameters": both} | share

    def _scaling(self, model: Dotted, yarn: Mapping[str, Any]) -> dict[str, Any]:
        if yarn["ramp"] == "turns":
            return {"rope_type": "llama3"} | {name: yarn[_LLAMA3[name]] for name in _LLAMA3}
        found = {"rope_type": "yarn"} | {name: yarn[_YARN[name]] for name in _YARN}
        usual = _m(yarn["factor"])
        if self.latent:
            width = model["attention.d_head"] + model["attention.d_rotary"]
            all_dim = _solved(model["attention.scale"], width, yarn["factor"])
            found |= {"mscale": all_dim, "mscale_all_dim": all_dim} if all_dim else {}
            usual = 1.0 if all_dim else usual
        amplitude = model["attention.positions.amplitude"]
        return found if amplitude == usual else found | {"attention_factor": amplitude}


Part = Own | ConfigKey | Only | Balance | Windows | Rotary


def _llama3(rope: Reader) -> dict[str, Any]:
    """Returns Llama 3.1's scaling as keys of YaRN.

    Raises:
        UnfitError: a key is missing or no scaling.
    """
    kinds = dict.fromkeys(_LLAMA3, float) | {"original_max_position_embeddings": int}
    given = {name: rope.take(name, kind) for name, kind in kinds.items()}
    are_numbers = all(isinstance(value, int | float) and value > 0 for value in given.values())
    if not are_numbers or given["low_freq_factor"] >= given["high_freq_factor"]:
        raise UnfitError(
            f"rope_type='llama3' with {_listed(given)}: all must be above 0, and low_freq_factor "
            "below high_freq_factor"
        )
    return {ours: given[name] for name, ours in _LLAMA3.items()} | {"ramp": "turns"}


def _m(factor: float, scale: float = 1.0) -> float:
    """Returns YaRN's m: 0.1·scale·ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _solved(scale: float, width: int, factor: float) -> float:
    """Returns the mscale_all_dim that gives a softmax scale exactly; of few digits if possible."""
    ratio = scale * width**0.5
    exact = (ratio**0.5 - 1) / (0.1 * math.log(factor)) if factor > 1 and ratio > 1 else 0.0
    for digits in (3, 6, 9, 12, 15):
        if width**-0.5 * _m(factor, round(exact, digits)) ** 2 == scale:
            return round(exact, digits)
    raise UnfitError(f"attention.scale={scale} does not follow from YaRN")
