"""Starts a run from weights that exist: what `--from` names, as a source and a configuration.

    runs/a                     the newest checkpoint of a run
    runs/a@step_00000100       that of a step; runs/a@100 is the same
    runs/a/checkpoints/…       a checkpoint

The new run has the source's model and tokenizer, and its own data, schedule, optimizer and mesh.
Everything is checked here, before a run folder or a rank exists.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..data_pipeline.manifest import is_prepared, read_manifest
from ..data_pipeline.tokenizers.hub import open_tokenizer
from ..data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from ..distributed.checkpoint.format import find_checkpoint, open_checkpoint
from ..distributed.checkpoint.source import Source
from ..model.config.model_config import ModelConfig
from ..model.transformer import Transformer
from ..plugins import runs_near, some_of
from ..train.config.resolve import StartSections, base_values, resolve
from ..train.config.run_config import Config, ConfigError
from ..train.recipes.smoke import RECIPES

_STEP = re.compile(r"(.+)@(?:step_)?(\d+)")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Start:
    """A run's configuration, and what it starts from instead of drawn weights."""

    config: Config
    source: Source
    notes: tuple[str, ...] = ()  # for the user, a line each


@dataclass(frozen=True)
class _Found:
    """What `--from` names."""

    source: Source
    shapes: Shapes  # of the weights, by name
    sections: StartSections
    recipe: str  # to use if none is named
    recipes: Mapping[str, Callable[[], Config]]


def start_from(
    given: str,
    name: str | None = None,
    overrides: Sequence[str] = (),
    *,
    draw_anew: Sequence[str] = (),
) -> Start:
    """Returns what a new run starts from, and its configuration.

    Args:
        given: a run, RUN@STEP or a checkpoint.
        name: a recipe or a TOML file, for everything but the model; None: the source's own.
        overrides: `section.key=value`; those of the model may change no parameter that is loaded.
        draw_anew: patterns (* and ?) of parameters to draw instead of loading them.

    Raises:
        ConfigError: there is nothing of this name, or the configuration or its tokenizer does not fit
            the weights.
        CheckpointError: the run has no such checkpoint, or its files are damaged.
    """
    found = _found(given)
    name = name or found.recipe
    recipes = found.recipes if name == found.recipe else _recipes(name)
    config = resolve(name, overrides, recipes, start=found.sections)
    source = _fitted(found, config.model, draw_anew)
    if "embedding" in source.drawn:
        source = source.model_copy(update={"tokenizer": None})
    _check_tokenizer(config, source, found.sections)
    other = base_values(name, recipes)[0].get("model", found.sections.model) != found.sections.model
    note = f"the model is that of {found.source.given}, and the one of {name} is not used"
    return Start(config, source, (note,) if other else ())


def _recipes(name: str) -> Mapping[str, Callable[[], Config]]:
    """Returns the recipes; a run's config.json is one, too."""
    return {name: lambda: Config.load(Path(name))} if name.endswith(".json") else RECIPES


def _found(given: str) -> _Found:
    match = _STEP.fullmatch(given)
    if match and not Path(given).exists():
        path, step = Path(match[1]), int(match[2])
    else:
        path, step = Path(given), None
    if not path.is_dir():
        raise ConfigError(f"--from {given}: there is no such folder{runs_near(path)}")
    return _found_checkpoint(path.absolute(), step)


def _found_checkpoint(path: Path, step: int | None) -> _Found:
    """Returns a checkpoint, with the model and the tokenizer of its run."""
    checkpoint = find_checkpoint(path, step)
    stored = open_checkpoint(checkpoint)
    meta = stored.meta.meta
    recipe = f"{checkpoint}/meta.json"
    config = Config.model_validate(meta["config"])
    data = (meta.get("data") or {}).get("spec", {})
    source = Source(
        kind="checkpoint",
        given=f"{path}" if step is None else f"{path}@{step}",
        path=str(checkpoint),
        step=stored.meta.step,
        digest=stored.manifest.digest,
        tokenizer=data.get("tokenizer_sha256"),
    )
    weights = {
        name.removeprefix("model."): tensor.shape
        for name, tensor in stored.index.tensors.items()
        if name.startswith("model.")
    }
    return _Found(source, weights, _sections_of(config), recipe, {recipe: lambda: config})


def _sections_of(config: Config) -> StartSections:
    """Returns what a new run takes from a run's configuration."""
    tokenizer = {"tokenizer": "bytes", "end_of_document": "", "vocab_size": 257}
    if config.prepare.tokenizer != "bytes":
        # the prepared folder has its own copy of the tokenizer, also of one that was trained
        tokenizer["tokenizer"] = config.data.directory or config.prepare.tokenizer
        tokenizer["vocab_size"] = config.model.vocab_size
    plain = config.model_dump(mode="json")
    return StartSections(plain["model"], tokenizer, plain["prepare"])


# Fitting ------------------------------------------------------------------------------------------


def _fitted(found: _Found, model: ModelConfig, draw_anew: Sequence[str]) -> Source:
    """Returns the source with the names that are drawn anew and ignored.

    Raises:
        ConfigError: the weights do not fit the model.
    """
    shapes = _shapes_of(model)
    drawn = {name for pattern in draw_anew for name in _matching(pattern, shapes)}
    wanted = {name: shape for name, shape in shapes.items() if name not in drawn}
    problems = [
        f"{name} is {list(found.shapes[name])} there and {list(shape)} here"
        if name in found.shapes
        else f"it lacks {name} {list(shape)}"
        for name, shape in wanted.items()
        if found.shapes.get(name) != shape
    ]
    if problems:
        listed = some_of(problems, between="\n  ", most=1000)
        raise ConfigError(
            f"--from {found.source.given}: does not fit the model:\n  {listed}\nleave the keys of model.* "
            "that change parameters as they are there, or draw these anew: --draw-anew PATTERN"
        )
    ignored = found.shapes.keys() - shapes.keys()
    return found.source.model_copy(
        update={
            "drawn": tuple(sorted(drawn)),
            "ignored": (*found.source.ignored, *sorted(ignored)),
        }
    )


def _shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        built = Transformer(model)
    named = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    return {name: tuple(tensor.shape) for name, tensor in named.items()}


def _matching(pattern: str, shapes: Shapes) -> list[str]:
    names = [name for name in shapes if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise ConfigError(
            f"--draw-anew {pattern}: the model has no such parameter; it has "
            f"{some_of(shapes, pattern)}"
        )
    return names


def _check_tokenizer(config: Config, source: Source, start: StartSections) -> None:
    """Refuses data whose ids mean other text than to the weights, as far as they are known."""
    prepare, directory = config.prepare, config.data.directory
    if source.tokenizer is None:
        return
    if directory and is_prepared(directory):
        found = read_manifest(directory).header.tokenizer.sha256
    elif prepare.tokenizer == "bytes":
        found = BytesTokenizer().sha256
    elif prepare.loads_tokenizer:
        found = open_tokenizer(prepare.tokenizer, end_of_document=prepare.end_of_document).sha256
    else:  # trained on the text: the same text gives the same one
        found = source.tokenizer if prepare.model_dump(mode="json") == start.prepare else None
    if found != source.tokenizer:
        raise ConfigError(
            f"--from {source.given}: its weights know the ids of another tokenizer than "
            f"prepare.tokenizer={prepare.tokenizer!r}: leave prepare.tokenizer out, which takes the "
            "source's, or draw the embedding anew with --draw-anew embedding"
        )
