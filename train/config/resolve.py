"""Resolves a recipe or a TOML file with dotted overrides to a configuration.

moebius train smoke model.feed_forward.num_experts=64 mesh.ep=2
"""

import os.path
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from ...data_pipeline.encodings import conversion
from ...data_pipeline.errors import ShardError
from ...data_pipeline.files import fault, read_regular
from ...data_pipeline.manifest import UNFINISHED, is_prepared, read_manifest
from ...data_pipeline.prepare_config import OWN_TEXTS, PrepareConfig
from ...data_pipeline.sources.embedded import EMBEDDED
from ...data_pipeline.words import is_published, is_run, run_and_step, runs_near, some_of
from ...model.config.sections import kinds_first, merge, set_value
from ...plugins import PluginError, a_kind, check_call, distrust, import_own, is_own, nearest, trust
from .errors import ConfigError
from .keys import KINDS, known_keys, toml_value
from .run_config import Config
from .schedule import default_floor
from .suggestions import suggest
from .validation import validated

_TEXT = {"prepare.input", "prepare.sources"}
_SHORT = re.compile(r"(\d+(?:\.\d+)?)([KMBT])", re.I)  # 2B tokens, 0.5T
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class StartSections:
    """Holds what a run that starts from given weights takes from them, as plain values."""

    model: Mapping[str, Any]  # the section
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # keys of `prepare`
    prepare: Mapping[str, Any] | None = None  # the section that made the weights' own data


def resolve(
    name_or_file: str,
    overrides: Sequence[str],
    recipes: Mapping[str, Callable[[], Config]],
    *,
    start: StartSections | None = None,
) -> Config:
    """Returns the configuration of a recipe or a TOML file, with dotted overrides applied.

    Args:
        name_or_file: the recipe or the file.
        overrides: `section.key=value`.
        recipes: the recipes by name.
        start: replaces the model, and the tokenizer unless another one is named.

    Raises:
        ConfigError: no such recipe or file, or a bad override; an unknown key comes with a
            suggestion.
    """
    trust(overrides)
    values, given = base_values(name_or_file, recipes)
    is_of_run = name_or_file.endswith(".json") or (
        start is not None and values.get("prepare") == start.prepare
    )
    has_data = _take_from_folder(values, given, overrides)
    if start is not None:
        _take_start(values, given, overrides, start, has_data=has_data)
    of_file = _section(given, "optim").keys() - {"muon"} if name_or_file.endswith(".toml") else ()
    said = {f"optim.{key}" for key in of_file}
    config = _built_with(values, overrides, origin=name_or_file, said=said)
    keys = _keys_of(overrides)
    _check_folder(config, given, keys, is_of_run=is_of_run)
    of_file = set() if is_of_run else {f"prepare.{key}" for key in _section(given, "prepare")}
    return config if _TEXT.isdisjoint(keys | of_file) else config.naming_text()


def base_values(
    name_or_file: str, recipes: Mapping[str, Callable[[], Config]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the plain values of a recipe or a TOML file, and the file's own values alone.

    The user has named the names in them, but not those of a file that lies in a run.
    """
    if name_or_file.endswith(".toml"):
        return _read_toml(Path(name_or_file), recipes)
    values = _recipe_values(name_or_file, recipes, where=name_or_file)
    if name_or_file.endswith(".json"):
        return values, values
    trust(values)
    return values, {}


def _take_from_folder(
    values: dict[str, Any], given: Mapping[str, Any], overrides: Sequence[str]
) -> bool:
    """Takes unset values from the prepared folder `data.directory`; returns whether there is one.

    It determines all of `prepare`, and the minimum vocabulary of its tokens.
    """
    asked: dict[str, Any] = {"data": dict(_section(values, "data"))}
    for override in overrides:
        if override.partition("=")[0].strip() == "data.directory":
            _apply(asked, override)
    directory = asked["data"].get("directory")
    if not isinstance(directory, str) or not directory:
        return False
    try:
        if not is_prepared(directory):
            return False
    except OSError:  # an impossible path, reported on opening the folder
        return False
    try:
        header = read_manifest(directory).header
        known = PrepareConfig.of_folder(header)
    except ShardError as error:
        raise ConfigError(f"data.directory: {error}") from None
    if known is None:
        return True
    distrust(header.spec, Path(directory))
    said = _section(given, "prepare")
    values["prepare"] = known.model_dump(mode="json")
    _choose_input(values, said.keys())
    values["prepare"] |= said
    if "vocab_size" not in _section(given, "model"):
        least = max(known.num_token_ids, _section(values, "model").get("vocab_size", 0))
        values["model"] = dict(_section(values, "model")) | {"vocab_size": least}
    return True


def _take_start(
    values: dict[str, Any],
    given: Mapping[str, Any],
    overrides: Sequence[str],
    start: StartSections,
    *,
    has_data: bool,
) -> None:
    """Replaces the model, and the tokenizer unless the data or another one is named."""
    values["model"] = deepcopy(start.model)  # overrides change its sections in place
    said = {f"prepare.{key}" for key in _section(given, "prepare")}
    said |= _keys_of(overrides)
    prepare = dict(_section(values, "prepare"))
    is_same_data = prepare == start.prepare and not any(key.startswith("prepare.") for key in said)
    if not (has_data or is_same_data):
        tokenizer = dict(start.tokenizer)
        if "prepare.tokenizer" in said:
            tokenizer = {key: tokenizer[key] for key in ("vocab_size",)}
        values["prepare"] = prepare | {
            k: v for k, v in tokenizer.items() if f"prepare.{k}" not in said
        }


def _check_folder(
    config: Config, given: Mapping[str, Any], keys: Collection[str], *, is_of_run: bool
) -> None:
    """Refuses a `data.directory` without data, unless the text to prepare there is named, too."""
    name, folder = config.data.directory, Path(config.data.directory)
    try:
        if not name or is_prepared(folder):
            return
        what, is_file = _without_data(folder), folder.is_file()
    except OSError:  # an impossible path, reported on opening the folder
        return
    if is_file:
        raise ConfigError(
            f"data.directory={name!r} is a file, not a prepared folder: to train on its text, leave "
            f"data.directory out and write prepare.input={name}"
        )
    # what a file names is not meant for a folder that only the command line names
    by_file = "data.directory" not in keys and _section(given, "prepare").keys() & {"input"}
    is_other = is_of_run or config.prepare.input in ((EMBEDDED,), (OWN_TEXTS,))
    if is_other and _TEXT.isdisjoint(keys) and not by_file:
        raise ConfigError(
            f"data.directory={name!r} {what}: name a folder that `moebius prepare` has made, or also "
            f"the text to prepare there, prepare.input=FILES (prepare.input={EMBEDDED} is Python's "
            "documentation)"
        )


def _without_data(folder: Path) -> str:
    """Describes a folder that holds no prepared data, and names those beside it that do."""
    there = [one.name for one in islice(folder.glob("*"), 2)]
    if there == [UNFINISHED]:
        return "has no finished data yet, so `moebius prepare` must go on first"
    if there:
        return f"holds {there[0]!r} and no prepared data"
    beside = [one.name for one in islice(folder.parent.glob("*"), 1000) if is_prepared(one)]
    what = "is empty" if folder.exists() else "does not exist"
    return f"{what} (prepared there: {some_of(beside, folder.name)})" if beside else what


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a section, or an empty one for a bad value, which validation reports later."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _recipe_values(
    name: str, recipes: Mapping[str, Callable[[], Config]], *, where: str
) -> dict[str, Any]:
    """Returns the plain values of a recipe from the table or of `package.module:function`."""
    if name in recipes:
        return recipes[name]().model_dump(mode="json")
    if name.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{where}: moebius reads TOML, not YAML: `moebius config RECIPE > mine.toml` writes a file "
            "to begin with"
        )
    if os.path.exists(name):  # False for a name that no file can have; Path's raises OSError
        raise ConfigError(f"{where}: {_what_takes(Path(name))}")
    if where == name and re.match(r"[\w.]+=", name):
        raise ConfigError(f"{name:.200}: name a recipe first, for example smoke {name:.200}")
    if "/" in name and not is_own(name):
        missing = f"there is no file or run folder {name!r:.200}"
        raise ConfigError(f"{where}: {missing}{runs_near(Path(name))}")
    if not is_own(name):
        answer = suggest(name, ())
        hint = f"{answer}." if answer else nearest(name, recipes) or "."
        raise ConfigError(
            f"{where}: there is no recipe {name!r:.200}{hint} `moebius models` lists "
            "the recipes; name one, a file that ends in .toml, or a function of your own as "
            "package.module:function"
        )
    wants = "a function without arguments that returns a Config"
    try:
        recipe = import_own(name, where=where, wants=wants)
        check_call(recipe, (), {}, name, wants)
    except PluginError as error:
        raise ConfigError(str(error)) from error
    built = recipe()
    if not isinstance(built, Config):
        by = "" if where == name else f"{name} "
        raise ConfigError(f"{where}: {by}returned {a_kind(built)}, not a Config")
    return built.model_dump(mode="json")


def _what_takes(path: Path) -> str:
    """Says which commands take a path that is no configuration."""
    if is_published(path) and not is_run(path):
        return (
            f"holds published weights and is not a recipe; `moebius train --from {path}` trains them, "
            "and `moebius models` lists the recipes of the published sizes"
        )
    if is_run(path):
        return (
            f"is a run, not a recipe; `moebius resume {path}` continues it, `moebius eval {path}` "
            f"measures it, and {path}/config.json is its configuration"
        )
    if path.is_dir() and run_and_step(path)[1] is not None:
        return f"is a checkpoint, not a recipe; --from {path} starts a run from its weights"
    if path.is_dir():
        return (
            "is a folder without a run, not a recipe; for prepared data write "
            f"own_text data.directory={path}, for text own_text prepare.input={path}"
        )
    return (
        "is neither a recipe nor a TOML file; a configuration's name ends in .toml, and text is "
        f"given as own_text prepare.input={path}"
    )


def _keys_of(overrides: Sequence[str]) -> set[str]:
    return {override.partition("=")[0].strip() for override in overrides}


def _choose_length(values: dict[str, Any], given: Collection[str], *, where: str) -> None:
    """Removes what else says how long the run is, if one of its keys was given.

    Raises:
        ConfigError: two of them were given.
    """
    train = values.get("train")
    if not isinstance(train, dict):
        return  # reported later
    lengths = ("steps", "tokens", "epochs")
    said = [key for key in lengths if f"train.{key}" in given and train.get(key) is not None]
    if len(said) > 1:
        both = " and ".join(f"train.{key}" for key in said)
        raise ConfigError(f"{where}: {both} each say how long the run is: give one of them")
    for key in {"tokens", "epochs"}.difference(said) if said else ():
        train.pop(key, None)


def _choose_optim(
    values: dict[str, Any], before: Mapping[str, Any], given: Collection[str]
) -> None:
    """Removes a recipe's decay under another schedule, and Muon's settings under another optimizer."""
    optim = values.get("optim")
    if not isinstance(optim, dict):
        return  # reported later
    dropped = []
    if optim.get("schedule", "cosine") != (former := before.get("schedule", "cosine")):
        is_chosen = optim.get("final_fraction") != default_floor(former)  # it means the same in all
        dropped += ["decay_steps", "decay_shape", *([] if is_chosen else ["final_fraction"])]
    if before.get("kind") == "muon" and optim.get("kind") != "muon":
        dropped += ["muon"]
    for key in dropped:
        if not any(name.startswith(f"optim.{key}") for name in given):
            optim.pop(key, None)


def _built_with(
    values: dict[str, Any], overrides: Sequence[str], *, origin: str, said: Collection[str] = ()
) -> Config:
    """Builds the configuration of plain values with overrides applied; a file has `said` some keys."""
    keys = _keys_of(overrides)
    _choose_input(values, {key.removeprefix("prepare.") for key in keys})
    before = dict(_section(values, "optim"))
    for override in sorted(overrides, key=lambda text: kinds_first(text.partition("=")[0])):
        _apply(values, override)
    _choose_length(values, keys, where="overrides")
    if _section(values, "train").get("tokens") is not None:
        values["train"].pop("steps", None)  # follows from the tokens
    _choose_optim(values, before, {*keys, *said})
    return validated(Config, values, origin=origin)


def as_overrides(values: Mapping[str, object], *given: str | Sequence[str]) -> list[str]:
    """Returns keywords of Python as overrides (`section.key=value`), then the given ones or lists of them.

    Raises:
        ConfigError: a keyword's value is none that a configuration can have.
    """
    words = [word for each in given for word in ([each] if isinstance(each, str) else each)]
    return [*_as_overrides(values), *words]


def _as_overrides(values: Mapping[str, object], section: str = "") -> Iterator[str]:
    for name, value in values.items():
        key = section + name.replace("__", ".")
        if isinstance(value, Mapping):
            yield from _as_overrides(value, f"{key}.")
            continue
        try:
            yield f"{key}={toml_value(value)}"
        except TypeError:
            raise ConfigError(
                f"{key}: {value!r} is not a configuration value; give a number, a text, True or "
                "False, None, or a list of them"
            ) from None


def resolve_prepare(
    file: Path | None,
    overrides: Sequence[str],
    recipes: Mapping[str, Callable[[], Config]],
    *,
    options: Mapping[str, Any],
) -> PrepareConfig:
    """Returns only the section `prepare`, of a TOML file or the defaults, with changes.

    Args:
        file: its other sections are ignored.
        overrides: `prepare.key=value`; they take precedence over everything else.
        recipes: possible bases of the file.
        options: values of the section that replace the file's.

    Raises:
        ConfigError: the file cannot be read, or the section is invalid.
    """
    found = _read_toml(file, recipes)[0] if file else {"prepare": {}}
    if "prepare" not in found:
        raise ConfigError(f"{file}: has no section [prepare]; its sections are {some_of(found)}")
    section = found["prepare"]
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: prepare = {section!r} is not a section")
    values = {"prepare": dict(section)}
    keys = {key.removeprefix("prepare.") for key in _keys_of(overrides)}
    _choose_input(values, keys | options.keys())
    values["prepare"] |= options
    for override in overrides:
        if not override.startswith("prepare."):
            raise ConfigError(f"override {override!r}: {_hint_to_prepare(override)}")
        _apply(values, override)
    origin = str(file) if file else "prepare"
    return validated(_PrepareAlone, values, origin=origin).prepare


def _hint_to_prepare(override: str) -> str:
    """Returns what to type instead of an override of `moebius prepare` without its section."""
    key, equals, value = override.partition("=")
    known = [key for key, _ in known_keys(_PrepareAlone)]
    if not equals:
        return f"to prepare text, write --input {override}"
    if (whole := f"prepare.{key}") in known:
        return f"write the whole key, {whole}={value}"
    return (
        f"`moebius prepare` only takes the section prepare{suggest(key, known)}: write "
        "prepare.key=value, for example prepare.segment_tokens=1000000"
    )


class _PrepareAlone(BaseModel):
    """Holds the section `prepare` without the other sections."""

    prepare: PrepareConfig


def _read_toml(
    path: Path, recipes: Mapping[str, Callable[[], Config]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a file's values merged into its recipe's, and the file's values alone."""
    try:
        values = tomllib.loads(read_regular(path).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        advice = conversion(error.object, str(path), "NEW.toml")
        raise ConfigError(f"{path}: is not UTF-8. {advice}") from None
    except ValueError as error:  # the TOML, or a number of 5,000 digits
        raise ConfigError(f"{path}: is not valid TOML: {fault(error)}") from None
    except RecursionError:
        raise ConfigError(
            f"{path}: is nested too deeply; a configuration only has sections in sections"
        ) from None
    runs = [folder for folder in path.absolute().parents if (folder / "config.json").exists()]
    if run := next(filter(is_run, runs), None):
        distrust(values, run)
    else:
        trust(values)
    base = values.pop("recipe", None)
    said = {f"{name}.{key}" for name in ("train", "optim") for key in _section(values, name)}
    if base is None:
        _choose_length(values, said, where=str(path))
        return dict(values), values
    if not isinstance(base, str):
        raise ConfigError(f"{path}: recipe = {base!r} is not the name of a recipe")
    recipe = _recipe_values(base, recipes, where=str(path))
    trust(recipe)
    merged = merge(recipe, values, KINDS)
    _choose_length(merged, said, where=str(path))
    _choose_optim(merged, recipe["optim"], said)
    _choose_input(merged, _section(values, "prepare").keys())
    return merged, values


def _choose_input(values: dict[str, Any], given: Collection[str]) -> None:
    """Removes the recipe's input if the other kind of input was given."""
    for chosen, other in (("sources", "input"), ("input", "sources")):
        if chosen in given and other not in given and isinstance(values.get("prepare"), dict):
            values["prepare"].pop(other, None)


def _apply(values: dict[str, Any], override: str) -> None:
    """Applies one `section.key=value`; the value is read as TOML, or as plain text otherwise.

    Sections may be nested: `model.feed_forward.router.top_k=2`. A new `kind` drops the old one's
    keys, except those that mean the same in both (`Section.kept`).
    """
    path, equals, text = override.partition("=")
    *sections, key = path.split(".")
    if not equals or not sections or not all((*sections, key)):
        hint = suggest(path, (known for known, _ in known_keys(Config))) if equals else ""
        usage = "write section.key=value, for example train.steps=200"
        advice = f"there is no key {path!r}{hint}" if hint else usage
        if path in Config.model_fields:
            advice = f"{path} is a section; `moebius config {path}` lists its keys"
        raise ConfigError(f"override {override!r}: {advice}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = None if text == "none" and path not in _keys_with_the_word_none() else text
    except RecursionError:
        raise ConfigError(f"override {path}=…: the value is nested too deeply") from None
    except ValueError as error:  # a number of 5,000 digits
        raise ConfigError(f"override {path}=…: {fault(error)}") from None
    counts = "tokens" in path or path == "train.start_when"
    if counts and isinstance(value, str) and (short := _SHORT.fullmatch(value)):
        value = round(float(short[1]) * _UNITS[short[2].upper()])
    try:
        set_value(values, path, value, KINDS)
    except ValueError as error:
        raise ConfigError(f"override {override!r}: {error}") from None


def _keys_with_the_word_none() -> set[str]:
    """Returns the keys for which "none" is a choice instead of an absent value."""
    return {key for key, field in known_keys(Config) if "none" in get_args(field.annotation)}
