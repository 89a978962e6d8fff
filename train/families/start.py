"""Starts a run from weights that exist: what `--from` names, as a source and a configuration.

    runs/a                     the newest checkpoint of a run
    runs/a/checkpoints/…       a checkpoint
    runs/a@step_00000100       a step to branch off at, also runs/a@100, runs/a@best, runs/a@last
    folder                     published weights of a known family, with config.json
    hf://org/name@revision     such a folder on the Hugging Face hub

The new run has the source's model and tokenizer, and its own data, schedule, optimizer and mesh. A
branch goes on with all of its trunk's state, and only its learning rate and the like are its own.
Everything is checked here, before a run folder or a rank exists.
"""

import fnmatch
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from ...data_pipeline.data_config import DataConfig
from ...data_pipeline.errors import InputError
from ...data_pipeline.manifest import is_prepared, read_manifest
from ...data_pipeline.tokenizers.hub import open_tokenizer
from ...data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from ...data_pipeline.words import run_and_step, runs_near, some_of
from ...distributed.checkpoint.format import find_checkpoint, open_checkpoint
from ...distributed.checkpoint.grown import refuse_gaps
from ...distributed.checkpoint.pieces import pieces_to_json
from ...distributed.checkpoint.source import Source, open_reader
from ...model.config.model_config import ModelConfig
from ...plugins import is_own, trust
from ..config.resolve import StartSections, base_values, resolve
from ..config.run_config import Config, ConfigError
from ..evaluate import Rows, read_rows
from ..growth.growth import Given, no_rows
from ..growth.table import grow as grow_model
from ..growth.table import parse
from ..recipes.hub import continuation, settings_words
from ..recipes.smoke import RECIPES
from ..record.run_folder import check_branch, checkpoint_config, count_epochs
from ..record.untrusted import read_text
from .table import open_family, shapes_of

_HUB = re.compile(r"hf://([^/@]+/[^/@]+)(?:@(.+))?")
# A repository's other copies of its weights; what is needed lies at its top.
_NOT_FETCHED = [
    "*/*",
    "consolidated*",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
]
_MEASURED_ROWS = 32  # of the validation split, for the usefulness of experts
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Start:
    """Holds a run's configuration, and what it starts from instead of drawn weights."""

    config: Config
    source: Source
    notes: tuple[str, ...] = ()  # for the user, a line each


@dataclass(frozen=True)
class GivenWeights:
    """Holds what `--from` names: where the weights are, and what comes with them."""

    source: Source
    shapes: Shapes  # by name
    sections: StartSections
    recipe: str  # to use if none is named
    recipes: Mapping[str, Callable[[], Config]]
    notes: tuple[str, ...] = ()
    trunk: Config | None = None  # of a branch
    whose: str = ""  # settings the recipe has


def start_from(
    given: str,
    name: str | None = None,
    overrides: Sequence[str] = (),
    *,
    draw_anew: Sequence[str] = (),
    family: str | None = None,
    grow: Sequence[str] = (),
    moments: Literal["keep", "new"] | None = None,
    trains: bool = True,
) -> Start:
    """Returns what a new run starts or branches from, and its configuration.

    Args:
        given: a run, RUN@STEP to branch off there, a checkpoint, a published folder, or
            hf://org/name[@revision].
        name: a recipe or a TOML file, for everything but the model; None: the run's own
            configuration, or of a folder the recipe with its sizes (`continuation`).
        overrides: `section.key=value`; those of the model may change no parameter that is loaded.
        draw_anew: patterns (* and ?) of parameters to draw instead of loading them.
        family: of a folder: `module:name` of one's own; by default config.json names a known one.
        grow: words of operators (../growth/table.py), by which the model grows first.
        moments: whether a branch that grows keeps its trunk's optimizer state, which is the default.
        trains: False: a run is only written, of the weights that RUN@STEP has, and reads no text yet.

    Raises:
        ConfigError: there is nothing of this name, or the configuration or its tokenizer does not fit
            the weights, or the trunk of a branch; or the model cannot grow so.
        CheckpointError: the run has no such checkpoint, or its files are damaged.
    """
    name, overrides = recipe_and_changes(name, overrides)
    trust(overrides)
    if name is not None and not name.endswith(".json"):
        base_values(name, RECIPES)  # the user has named what it names
    grow = " ".join(grow).split()
    parse(grow)  # before anything is read
    weights, is_named = _given_weights(given, family, branches=trains), name is not None
    if grow or moments:
        weights = _grown(weights, grow, moments)
    name = name or weights.recipe
    recipes = _recipes(name) if is_named else weights.recipes
    is_other = not is_named and _names_other_text(weights, overrides)
    if is_other:
        base = _reading(recipes[name](), DataConfig())  # the run's own folder holds its own text
        name, recipes = weights.source.path, {weights.source.path: lambda: base}
    if weights.trunk is not None:
        config = resolve(name, overrides, recipes, start=weights.sections if is_other else None)
        return replace(
            _branch(weights.source, weights.trunk, config, draw_anew), notes=weights.notes
        )
    config = resolve(name, overrides, recipes, start=weights.sections)
    source = _fitted(weights, config.model, draw_anew)
    if trains:
        source = _with_tokenizer(source, config)
        _check_tokenizer(config, source, weights.sections)
    elif lost := source.ignored[len(weights.source.ignored) :]:
        raise ConfigError(
            f"{given}: {some_of(lost)} would be lost; leave out the keys of model.* that drop it"
        )
    notes, model = list(weights.notes), weights.sections.model
    if is_named and base_values(name, recipes)[0].get("model", model) != model:
        notes.append(f"the model is that of {source.given}, and the one of {name} is not used")
    if source.kind == "folder":
        notes.append(settings_words(config, f"those of {name}" if is_named else weights.whose))
    return Start(config, source, tuple(notes))


def recipe_and_changes(
    name: str | None, overrides: Sequence[str]
) -> tuple[str | None, Sequence[str]]:
    """Returns a recipe's name, if one was given, and changes; a name with = is the first of them."""
    return (None, [name, *overrides]) if name is not None and "=" in name else (name, overrides)


def _names_other_text(weights: GivenWeights, overrides: Sequence[str]) -> bool:
    """Returns whether a run from a checkpoint reads other text, as a branch does only if asked."""
    keys = {override.partition("=")[0].strip() for override in overrides}
    is_checkpoint = weights.source.step is not None
    may = is_checkpoint if weights.trunk is None else "data.override_position" in keys
    return may and not keys.isdisjoint({"prepare.input", "prepare.sources", "data.directory"})


def _reading(config: Config, other: DataConfig) -> Config:
    """Returns a configuration that reads another one's folder or rows."""
    read = {"directory": other.directory, "dataset": other.dataset}
    return config.model_copy(update={"data": config.data.model_copy(update=read)})


def _recipes(name: str) -> Mapping[str, Callable[[], Config]]:
    """Returns the recipes; a run's config.json is one, too."""
    return {name: lambda: Config.load(Path(name))} if name.endswith(".json") else RECIPES


def _given_weights(given: str, family: str | None, *, branches: bool) -> GivenWeights:
    if given.startswith("hf://"):
        return _on_hub(given, family)
    path, step = run_and_step(given)
    if os.path.isdir(given):  # the weights of a checkpoint alone; only RUN@STEP branches
        path, step = Path(given), None
    if not path.is_dir():
        raise ConfigError(f"--from {given}: there is no such folder{runs_near(path)}")
    path = path.absolute()
    if step is None and _is_published(path):
        return _in_folder(path, family, given=str(path))
    if not any((path / name).exists() for name in ("checkpoints", "manifest.json")):
        raise ConfigError(
            f"--from {given}: is neither a run (checkpoints/), a checkpoint (manifest.json), nor a folder "
            f"of published weights (config.json with a model_type){runs_near(path)}"
        )
    return _in_checkpoint(path, step, branches=branches)


def _is_published(path: Path) -> bool:
    """Returns whether a folder has a published model's config.json; that of a run has other keys."""
    if (path / "checkpoints").exists():
        return False
    config = read_text(path / "config.json")
    return config is not None and ('"model_type"' in config or any(path.glob("*.safetensors")))


def _on_hub(given: str, family: str | None) -> GivenWeights:
    """Returns a folder of the hub's cache, after it was fetched unless HF_HUB_OFFLINE is set."""
    match = _HUB.fullmatch(given)
    if match is None:
        raise ConfigError(f"--from {given}: write hf://org/name or hf://org/name@revision")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"--from {given}: the hub needs huggingface_hub: pip install 'moebius[hub]'"
        ) from None
    try:
        path = snapshot_download(match[1], revision=match[2], ignore_patterns=_NOT_FETCHED)
    except (OSError, ValueError) as error:  # also of HTTP
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--from {given}: cannot be fetched ({reason}): check the name and your access (HF_TOKEN); "
            "with HF_HUB_OFFLINE=1, the cache must have it"
        ) from error
    return _in_folder(Path(path), family, given=f"hf://{match[1]}@{Path(path).name}")


def _in_folder(path: Path, family: str | None, *, given: str) -> GivenWeights:
    """Returns a folder of published weights, of which every rank reads its own pieces.

    Its model and its tokenizer come with them.
    """
    plan = open_family(path, family)
    path, model = plan.folder.path.absolute(), plan.model
    refuse_gaps(str(path), plan.pieces, shapes_of(model))
    source = Source(
        kind="folder",
        given=given,
        path=str(path),
        family=plan.family,
        digest=plan.folder.digest,
        ignored=plan.ignored,
        dequantised=plan.dequantised,
        pieces=tuple(pieces_to_json(plan.pieces)),
    )
    tokenizer = {"tokenizer": str(path), "end_of_document": "", "vocab_size": model.vocab_size}
    sections = StartSections(model.model_dump(mode="json"), tokenizer)
    name, whose, config = continuation(model, plan.longest, RECIPES)
    recipes = {name: lambda: config}
    return GivenWeights(source, shapes_of(model), sections, name, recipes, plan.notes, whose=whose)


def _in_checkpoint(path: Path, step: int | None, *, branches: bool) -> GivenWeights:
    """Returns a checkpoint, with the model and the tokenizer of its run; RUN@STEP may branch off."""
    checkpoint = find_checkpoint(path, step)
    stored = open_checkpoint(checkpoint)
    meta = stored.meta.meta
    recipe = f"{checkpoint}/meta.json"
    config = checkpoint_config(checkpoint, meta)
    data = (meta.get("data") or {}).get("spec", {})
    source = Source(
        kind="branch" if step is not None and branches else "checkpoint",
        given=f"{path}" if step is None else f"{path}@{step}",
        path=str(checkpoint),
        step=stored.meta.step,
        digest=stored.manifest.digest,
        tokenizer=data.get("tokenizer_sha256"),
    )
    shapes = {
        name.removeprefix("model."): tensor.shape
        for name, tensor in stored.index.tensors.items()
        if name.startswith("model.")
    }
    trunk = config if source.kind == "branch" else None
    return GivenWeights(
        source, shapes, _sections_of(config), recipe, {recipe: lambda: config}, trunk=trunk
    )


def _sections_of(config: Config) -> StartSections:
    """Returns what a new run takes from a run's configuration."""
    tokenizer = {"tokenizer": "bytes", "end_of_document": "", "vocab_size": 257}
    if config.prepare.tokenizer != "bytes":
        # the prepared folder has its own copy of the tokenizer, also of one that was trained
        tokenizer["tokenizer"] = config.data.directory or config.prepare.tokenizer
        tokenizer["vocab_size"] = config.model.vocab_size
    plain = config.model_dump(mode="json")
    return StartSections(plain["model"], tokenizer, plain["prepare"])


def _branch(source: Source, trunk: Config, config: Config, draw_anew: Sequence[str]) -> Start:
    """Returns a run that goes on from a step of another, with its data.

    Raises:
        ConfigError: it would end before it begins, or change what only another run may.
    """
    name, step = f"--from {source.given}", source.step or 0
    if draw_anew:
        raise ConfigError(
            f"{name}: a branch draws nothing anew; start a new run from the weights alone: --from "
            f"{source.path} --draw-anew {draw_anew[0]}"
        )
    check_branch(trunk.model_dump(mode="json"), config, name, trunk=Path(source.path))
    if not (config.data.directory or config.data.override_position):
        config = _reading(config, trunk.data)
    config = count_epochs(config)
    if config.train.steps <= step:
        raise ConfigError(
            f"{name}: the run's {config.train.steps} steps count from the trunk's first step, and the "
            f"branch goes on after step {step}: set, for example, train.steps={2 * step}"
        )
    return Start(config, source)


# Growing -------------------------------------------------------------------------------------------


def _grown(weights: GivenWeights, words: Sequence[str], moments: str | None) -> GivenWeights:
    """Returns weights as the model that they grow into.

    Raises:
        ConfigError: the model cannot grow so, or the moments are not those of a branch that grows.
    """
    source = weights.source
    if moments and not (words and source.kind == "branch"):
        raise ConfigError(
            f"--moments {moments}: only a run that goes on, --from RUN@STEP, and grows has moments to keep; leave "
            "it out"
        )
    of_run = None if source.kind == "folder" else weights.recipes[weights.recipe]()
    reader = open_reader(source, check_bytes=False)
    if weights.trunk and moments != "new" and is_own(weights.trunk.optim.kind):
        raise ConfigError(
            f"how the state of optim.kind={weights.trunk.optim.kind} grows is not known: begin it anew with "
            "--moments new"
        )
    seed, before = of_run.train.seed if of_run else 0, weights.sections.model
    known = Given(seed, reader.weight, partial(_rows_of, of_run), source.step or 0)
    model, growths, notes = grow_model(ModelConfig.model_validate(before), words, reader, known)
    update = {"grown": growths, "moments": moments or "keep"}
    grown = replace(
        weights,
        source=source.model_copy(update=update),
        shapes=shapes_of(model),
        sections=replace(weights.sections, model=model.model_dump(mode="json")),
        notes=(*weights.notes, *notes),
    )
    if of_run is None:
        return grown
    config = of_run.model_copy(update={"model": model})
    return replace(grown, recipes={grown.recipe: lambda: config}, trunk=grown.trunk and config)


def _rows_of(config: Config | None) -> Sequence[Rows]:
    """Returns a few rows of a run's validation split."""
    if config is None or not (config.data.dataset or is_prepared(config.data.directory)):
        return no_rows()
    return [*read_rows(config, torch.device("cpu"), max_rows=_MEASURED_ROWS)]


# Fitting ------------------------------------------------------------------------------------------


def _fitted(weights: GivenWeights, model: ModelConfig, draw_anew: Sequence[str]) -> Source:
    """Returns the source with the names that are drawn anew and ignored.

    Raises:
        ConfigError: the weights do not fit the model.
    """
    shapes = shapes_of(model)
    drawn = {name for pattern in draw_anew for name in _matching(pattern, shapes)}
    wanted = {name: shape for name, shape in shapes.items() if name not in drawn}
    problems = [
        f"{name} is {list(weights.shapes[name])} there and {list(shape)} here"
        if name in weights.shapes
        else f"it lacks {name} {list(shape)}"
        for name, shape in wanted.items()
        if weights.shapes.get(name) != shape
    ]
    if problems:
        listed = some_of(problems, between="\n  ", most=1000)
        raise ConfigError(
            f"--from {weights.source.given}: does not fit the model:\n  {listed}\nleave the keys of model.* "
            "that change parameters as they are there, or draw these anew: --draw-anew PATTERN"
        )
    ignored = weights.shapes.keys() - shapes.keys()
    return weights.source.model_copy(
        update={
            "drawn": tuple(sorted(drawn)),
            "ignored": (*weights.source.ignored, *sorted(ignored)),
        }
    )


def _matching(pattern: str, shapes: Shapes) -> list[str]:
    names = [name for name in shapes if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise ConfigError(
            f"--draw-anew {pattern}: the model has no such parameter; it has "
            f"{some_of(shapes, pattern)}"
        )
    return names


def _with_tokenizer(source: Source, config: Config) -> Source:
    """Returns the source with its tokenizer's hash, if it is known and the embedding is loaded."""
    if "embedding" in source.drawn:
        return source.model_copy(update={"tokenizer": None})
    if source.kind == "checkpoint":
        return source
    prepare = config.prepare
    try:
        tokenizer = open_tokenizer(source.path, end_of_document=prepare.end_of_document)
    except InputError as error:
        if prepare.tokenizer != source.path:
            return source
        raise ConfigError(
            f"--from {source.given}: has no tokenizer that can be read; name that of its model with "
            f"prepare.tokenizer, or data prepared by it with data.directory ({error})"
        ) from error
    if tokenizer.vocab_size > (limit := config.model.vocab_size):
        raise ConfigError(
            f"--from {source.given}: its tokenizer has {tokenizer.vocab_size} ids, more than the "
            f"model's vocab_size={limit}: the folder's files belong to different models"
        )
    return source.model_copy(update={"tokenizer": tokenizer.sha256})


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
