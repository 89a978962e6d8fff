"""Writes weights as a new run: of a known family's folder, of a MoEUT's file, or the mean of checkpoints.

A folder's config.json describes its model, and its family's tables translate names and layouts. The
authors' files (arXiv 2405.16039) use three families of names, recognized by their first key:

    release          transformer.layers.<g>.attention.v, .ffn.keys …       the official release
    training code    unique_layers.<g>.self_attn.projections.v, .pkm.keys …  the paper's runs, baselines
    SUT              unique_layers.0.mod.self_attn.q_proj.experts.w …        of the training code

Banks of experts have the same shapes as here, so only names change; the dense baseline stores keys
and values as one matrix, which is split. A file does not describe what has no weight (depth steps,
active experts, places of norms). A recipe does, and every name and shape is checked against it.

A model that was loaded and changed in Python becomes a run, too.

Files are untrusted: .safetensors, or a torch pickle read with weights_only=True, which builds
tensors and containers and calls nothing.
"""

import fnmatch
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ...data_pipeline.words import some_of
from ...distributed.checkpoint.atomic_directory import (
    atomic_directory,
    refuse_existing,
    write_checkpoint,
)
from ...distributed.checkpoint.format import (
    StartProgress,
    StoredCheckpoint,
    find_checkpoint,
    open_checkpoint,
    open_verified,
    read_meta,
    step_name,
)
from ...distributed.checkpoint.loading import read_tensor
from ...distributed.checkpoint.pieces import require_safetensors
from ...distributed.checkpoint.source import (
    SOURCE,
    SOURCE_FILES,
    Source,
    keep_small_files,
    open_reader,
    read_source,
)
from ...distributed.parallelize import expert_names
from ...model.config.attention_config import SwitchHeadConfig
from ...model.config.model_config import ModelConfig
from ...model.execution.precision import store_in, stored_dtype
from ...model.transformer import Transformer
from ...plugins import a_kind
from ..config.run_config import Config, ConfigError
from ..record.run_folder import checkpoint_config, config_of
from ..state import TrainingProgress
from .family import Rule
from .start import start_from
from .table import shapes_of

_MOST_NAMED = 8  # keys listed in an error
_NESTED_UNDER = ("model", "state_dict", "model_state_dict", "module")
_PREFIXES = ("model.", "module.", "_orig_mod.")

_OUTER = (
    Rule("embedding", "embedding.weight"),
    Rule("head", "lm_head"),
    Rule("head", "output"),
    Rule("final_norm", "out_norm"),
    Rule("halting.hidden", "unique_layers.{L}._gate.0"),
    Rule("halting.output", "unique_layers.{L}._gate.3"),
)
_RELEASE = {
    "attention.q": "attention.query",
    "attention.k": "attention.key",
    "attention.v": "attention.value.experts.weight",
    "attention.o": "attention.output.experts.weight",
    "attention.sel_v": "attention.value_router.weight",
    "attention.sel_o": "attention.output_router.weight",
    "ffn.keys": "feed_forward.sparse.experts.w_up",
    "ffn.values": "feed_forward.sparse.experts.w_down",
    "ffn.expert_sel": "feed_forward.router.weight",
    "ln1": "attention_norm",
    "ln2": "feed_forward_norm",
}
_RELEASE_OF_ONE_EXPERT = _RELEASE | {  # one expert per head: dense, with a gate on the result
    "attention.v": "attention.value.weight",
    "attention.o": "attention.output.weight",
    "attention.sel_o": "attention.head_gate.weight",
}
_TRAINING = {
    "self_attn.projections.q": "attention.query.weight",
    "self_attn.projections.k": "attention.key.weight",
    "self_attn.projections.v": "attention.value.experts.weight",
    "self_attn.projections.o": "attention.output.experts.weight",
    "self_attn.selections.v": "attention.value_router.weight",
    "self_attn.selections.o": "attention.output_router.weight",
    "self_attn.norm": "attention_norm",
    "pkm.keys": "feed_forward.sparse.experts.w_up",
    "pkm.values": "feed_forward.sparse.experts.w_down",
    "pkm.expert_sel": "feed_forward.router.weight",
    "pkm.norm": "feed_forward_norm",
    "self_attn.data_to_q": "attention.query",
    "self_attn.data_to_kv": "attention.key_and_value",  # becomes two: `_split`
    "self_attn.out_proj": "attention.output",
    "linear1": "feed_forward.up",
    "linear2": "feed_forward.down",
    "norm1": "attention_norm",
    "norm2": "feed_forward_norm",
}
_SUT = {
    "self_attn_layer_norm": "attention_norm",
    "final_layer_norm": "feed_forward_norm",
    "self_attn.rel_pos_emb": "attention.relative",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.q_proj.experts.w": "attention.query.experts.weight",
    "self_attn.q_proj.output_experts.w": "attention.output.experts.weight",
    "self_attn.q_proj.w_gate.0": "attention.router.hidden",
    "self_attn.q_proj.w_gate.3": "attention.router.output",
    "moe.experts.w": "feed_forward.sparse.experts.w_up",
    "moe.experts.b": "feed_forward.sparse.experts.b_up",
    "moe.output_experts.w": "feed_forward.sparse.experts.w_down",
    "moe.output_experts.b": "feed_forward.sparse.experts.b_down",
    "moe.w_gate.0": "feed_forward.router.hidden",
    "moe.w_gate.3": "feed_forward.router.output",
}


def _rules(model: ModelConfig) -> Iterator[Rule]:
    """Yields the rules of a model; what follows a name in a key, like ".weight", stays as it is."""
    attention = model.attention
    is_dense = isinstance(attention, SwitchHeadConfig) and not attention.has_experts
    training = _SUT if attention.kind == "momha" else _TRAINING
    yield from _OUTER
    for theirs, ours in (_RELEASE_OF_ONE_EXPERT if is_dense else _RELEASE).items():
        yield Rule(f"group.{{L}}.{ours}", f"transformer.layers.{{L}}.{theirs}")
    for theirs, ours in training.items():
        yield Rule(f"group.{{L}}.{ours}", f"unique_layers.{{L}}.{theirs}")


@dataclass(frozen=True)
class Imported:
    """Summarizes an import for the user."""

    run_dir: Path
    num_tensors: int
    num_parameters: int
    step: int
    notes: str  # lines

    def __str__(self) -> str:
        return (
            f"{self.run_dir}: {self.num_tensors} tensors, {self.num_parameters:,} parameters, as "
            f"the checkpoint of step {self.step}{self.notes}"
        )


def import_published(
    file: Path, out: Path, config: Config, *, ignore: Sequence[str] = ()
) -> Imported:
    """Writes a run folder `out` whose checkpoint of step 0 has the weights of a published file.

    `moebius eval`, `ckpt export` and `train --run-dir` accept it like any run; training begins at
    step 0 with these weights and a fresh optimizer.

    Args:
        file: .safetensors, or a torch pickle of tensors.
        out: appears whole or not at all.
        config: the run whose model has these weights.
        ignore: patterns (* and ?) of keys in the file to ignore.

    Raises:
        ValueError: the file cannot be read, a key is unknown or missing, a shape does not fit the
            model, or `out` exists.
    """
    refuse_existing(out)
    tensors = read_tensors(file)
    skipped = [key for key in tensors if any(fnmatch.fnmatchcase(key, each) for each in ignore)]
    kept = {key: tensor for key, tensor in tensors.items() if key not in skipped}
    weights = translate(kept, config.model, origin=str(file))
    with torch.device("meta"):
        model = Transformer(config.model)
    check_weights(weights, model, origin=str(file))
    notes = f"\n  ignored: {', '.join(skipped)}" if skipped else ""
    return write_run(out, config, {name: each.to for name, each in weights.items()}, notes)


def import_source(
    given: str | Path,
    out: Path,
    name: str | None = None,
    overrides: Sequence[str] = (),
    *,
    family: str | None = None,
    grow: Sequence[str] = (),
) -> Imported:
    """Writes a run folder `out` whose one checkpoint has a folder's weights, or what a source grows into.

    It begins with a folder's weights, or goes on after the step of a checkpoint, without any state of
    an optimizer. One tensor is read at a time.

    Args:
        given: a folder of published weights; what grows can be any source of `start_from`.
        out: appears whole or not at all; `source` in it holds the folder's other files.
        name: a recipe or a TOML file, for everything but the model; None: as for `start_from`.
        overrides: `section.key=value`; those of the model may change no parameter.
        family: of a folder: `module:name` of one's own; by default config.json names a known one.
        grow: words of operators (../growth/table.py).

    Raises:
        ValueError: as for `start_from`, nothing grows out of a run, or `out` exists.
    """
    refuse_existing(out)
    start = start_from(str(given), name, overrides, family=family, grow=grow, trains=False)
    source, config, before, lines = start.source, start.config, None, [*start.notes]
    if source.step is None:
        own = {"tokenizer": str(out.absolute() / SOURCE_FILES)}  # the run's copy of the folder's
        if config.prepare.tokenizer == source.path:
            config = config.model_copy(update={"prepare": config.prepare.model_copy(update=own)})
    elif not grow:
        raise ConfigError(
            f"{given}: is a run already; `moebius ckpt grow` makes a larger one of it"
        )
    else:
        before = read_meta(Path(source.path)).meta
        if any(word.startswith(("data.", "prepare.")) for word in overrides):  # other text
            progress = {**before["progress"], "samples": 0}
            before = {**before, "data": None, "progress": progress}
            lines.append("data: read from the beginning, because their keys were given")
        grown = tuple(one.model_copy(update={"takes": ()}) for one in source.grown)
        source = source.model_copy(update={"kind": "written", "grown": grown})
    reader = open_reader(start.source)
    state = {each: partial(reader.weight, each) for each in shapes_of(config.model)}
    lists = {"left out": source.ignored, "dequantised": source.dequantised}
    lines += [f"{what}: {some_of(those)}" for what, those in lists.items() if those]
    notes = "".join(f"\n  {line}" for line in lines)
    return write_run(out, config, state, notes, source, before=before)


def average_checkpoints(
    named: Sequence[Path],
    out: Path,
    *,
    start_progress: StartProgress = lambda what, num_bytes: lambda more: None,
) -> Imported:
    """Writes a run folder `out` whose one checkpoint has the mean of checkpoints' weights.

    It sums in float64, a tensor at a time, routers' buffers too. Everything else is that of the last step
    among them: configuration, number of the step, position in the data, and other files.

    Args:
        named: for each, a run (its newest checkpoint), RUN@STEP, or a checkpoint's folder.
        out: appears whole or not at all; source.json in it names the checkpoints.
        start_progress: shows the reading of every checkpoint.

    Raises:
        ValueError: one is not there or damaged, they are of several models, or fewer than two
            different ones; or `out` exists.
    """
    refuse_existing(out)
    stored = [open_checkpoint(find_checkpoint(name).absolute()) for name in named]
    if len({each.manifest.digest for each in stored}) < max(2, len(stored)):
        raise ConfigError(
            f"{some_of(named)}: name two checkpoints or more, each once, as in RUN@1000 RUN@1200"
        )
    first, *others = (_model_of(each) for each in stored)
    for name, model in zip(named[1:], others, strict=True):
        if other := [key for key, value in model.items() if first.get(key, value) != value]:
            raise ConfigError(
                f"{name}: its {some_of(sorted(other))} differ from those of {named[0]}; only checkpoints of "
                "one model have a mean"
            )
    for each in stored:
        size = sum(file.num_bytes for file in each.manifest.files.values())
        open_verified(each.path, start_progress(f"checking {each.path.name}", size))
    last = max(stored, key=lambda each: each.meta.step)
    names = (name for name in last.index.tensors if name.startswith("model."))
    state = {name.removeprefix("model."): partial(_mean, stored, name) for name in names}
    notes, made_of = f", the mean of {some_of(named)}", [str(each.path) for each in stored]
    config = checkpoint_config(last.path, last.meta.meta)
    return _write_after(last, out, config, state, f"the mean of {', '.join(made_of)}", notes)


def _model_of(stored: StoredCheckpoint) -> dict[str, Any]:
    """Returns what checkpoints must share to have a mean: the model, and the tokenizer if known."""
    model = checkpoint_config(stored.path, stored.meta.meta).model.model_dump(mode="json")
    tokenizer = {"tokenizer": known} if (known := _tokenizer_of(stored)) else {}
    return {f"model.{key}": value for key, value in model.items()} | tokenizer


def _tokenizer_of(stored: StoredCheckpoint) -> str | None:
    """Returns the SHA-256 of the tokenizer of a checkpoint's data, if it is known."""
    return (stored.meta.meta.get("data") or {}).get("spec", {}).get("tokenizer_sha256")


def _mean(stored: Sequence[StoredCheckpoint], name: str, dtype: torch.dtype) -> Tensor:
    """Returns the mean of a tensor over checkpoints, summed in float64."""
    total = read_tensor(stored[0], name).double()
    for each in stored[1:]:
        total += read_tensor(each, name)
    return (total / len(stored)).to(dtype)


def _write_after(
    last: StoredCheckpoint,
    out: Path,
    config: Config,
    state: Mapping[str, Callable[[torch.dtype], Tensor]],
    made_of: str,
    notes: str = "",
) -> Imported:
    """Writes a run that goes on after the step of a checkpoint, with other weights."""
    before = read_source(last.path.parent.parent)
    source = Source(
        kind="written",
        given=made_of,
        path=str(last.path),
        step=last.meta.step,
        family=None if before is None else before.family,
        digest=last.manifest.digest,
        tokenizer=_tokenizer_of(last),
    )
    return write_run(out, config, state, notes, source, before=last.meta.meta)


def write_run(
    out: Path,
    config: Config,
    state: Mapping[str, Callable[[torch.dtype], Tensor]],
    notes: str,
    source: Source | None = None,
    *,
    before: Mapping[str, Any] | None = None,
) -> Imported:
    """Writes a run with one checkpoint, one tensor at a time, without any state of an optimizer.

    It has the step and the position in the data of `before`, the meta of a checkpoint; else step 0.
    """
    with torch.device("meta"):
        model = Transformer(config.model)
    store_in(model, stored_dtype(config.train.precision))
    stored, progress = model.state_dict(), TrainingProgress()
    if before is not None:
        progress = replace(TrainingProgress(**before["progress"]), updates=0, skipped=0)
    meta = {
        "progress": progress.as_dict(),
        "data": before and before.get("data"),  # None: training starts at the beginning of its data
        "experts": {},
        "config": config.model_dump(mode="json"),
    }
    with atomic_directory(out, needed_bytes=sum(each.nbytes for each in stored.values())) as new:
        new.chmod(0o700)  # as every run folder
        config.save(new / "config.json")
        if source is not None:
            (new / SOURCE).write_text(source.as_text(), encoding="utf-8")
            keep_small_files(source, new)
        write_checkpoint(
            new / "checkpoints" / step_name(progress.step),
            {f"model.{name}": partial(make, stored[name].dtype) for name, make in state.items()},
            step=progress.step,
            num_experts={
                f"model.{name}": len(stored[name]) for name in sorted(expert_names(model))
            },
            meta=meta,
        )
    num_parameters = sum(each.numel() for each in stored.values())
    return Imported(out, len(stored), num_parameters, progress.step, notes)


# Models changed in Python ---------------------------------------------------------------------------


def save_model(out: Path, model: Transformer, config: Config, checkpoint: Path) -> None:
    """Writes a run folder `out` whose one checkpoint has a loaded model's weights of now.

    Step and position in the data are those of `checkpoint`, which the model was loaded from.

    Raises:
        ValueError: the model does not fit its configuration, the checkpoint is gone, or `out` exists.
    """
    refuse_existing(out)
    state = {name: partial(tensor.to, "cpu") for name, tensor in _fitting(model, config).items()}
    last = open_checkpoint(checkpoint.absolute())
    _write_after(last, out, config, state, str(last.path))


def checkpoint_of_now(model: Transformer, config: Config, checkpoint: Path) -> Path:
    """Returns a checkpoint with a loaded model's weights of now: its own, or a temporary one.

    Raises:
        ValueError: as for `save_model`.
    """
    stored = open_checkpoint(checkpoint)
    is_changed = config.model != config_of(checkpoint).model or any(
        not torch.equal(tensor.cpu(), read_tensor(stored, f"model.{name}").to(tensor.dtype))
        for name, tensor in _fitting(model, config).items()
    )
    if not is_changed:
        return checkpoint
    _temporary.append(TemporaryDirectory(prefix="moebius-"))
    run = Path(_temporary[-1].name) / "changed"
    save_model(run, model, config, checkpoint)
    return find_checkpoint(run)


_temporary: list[TemporaryDirectory[str]] = []  # removed when this process ends


def _fitting(model: Transformer, config: Config) -> dict[str, Tensor]:
    """Returns a model's tensors by name; raises ConfigError if they are not its configuration's."""
    state, wanted = model.state_dict(), shapes_of(config.model)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if differing := [name for name in wanted | shapes if shapes.get(name) != wanted.get(name)]:
        listed = [f"{name} is {shapes.get(name)}, not {wanted.get(name)}" for name in differing]
        raise ConfigError(
            f"the model was changed beyond its configuration ({some_of(listed, between='; ')}): keep names "
            "and shapes; for another size, start_from(…, draw_anew=…) with other values of model.*"
        )
    return state


# Reading -------------------------------------------------------------------------------------------


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file by key, and executes nothing in it.

    Raises:
        ConfigError: the file cannot be read, or holds no named tensors.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: is not a file")
    content = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    for key in _NESTED_UNDER:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file}: holds {a_kind(content)} instead of named tensors")
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ConfigError(
            f"{file}: holds no named tensors; its keys are {_named([str(key) for key in content])}"
        )
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    library = require_safetensors()
    try:
        return library.torch.load_file(file)
    except (library.SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _read_pickle(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's message goes on to recommend turning off this protection
        reason = "; ".join(
            part.strip(" .\n") for part in str(error).split("\n\n") if "nsupported" in part[:40]
        )
        reason = reason or "unknown content"
        raise ConfigError(
            f"{file}: holds more than tensors ({reason}). moebius reads it with weights_only=True, "
            "which executes nothing; if you trust the file, load it yourself and save its tensors "
            "with safetensors.torch.save_file"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).partition(". ")[0] or "it ends too early"
        raise ConfigError(f"{file}: cannot be read as a torch.save file: {reason}") from error


# Names ---------------------------------------------------------------------------------------------


def translate(
    tensors: Mapping[str, Tensor], model: ModelConfig, *, origin: str
) -> dict[str, Tensor]:
    """Returns the tensors under moebius' names.

    Raises:
        ConfigError: lists unknown keys.
    """
    rules = [*_rules(model)]
    names = {key: _our_name(key, rules) for key in tensors}
    if unknown := [key for key, name in names.items() if name is None]:
        raise ConfigError(
            f"{origin}: {len(unknown)} of {len(tensors)} keys are unknown for this kind of model: "
            f"{_named(unknown)}; check the recipe, or skip keys that are not weights with --ignore "
            "PATTERN"
        )
    found: dict[str, Tensor] = {}
    for key, name in names.items():
        found |= _split(name or "", tensors[key])
    return found


def _our_name(key: str, rules: Sequence[Rule]) -> str | None:
    """Returns moebius' name of the parameter published as `key`; None if unknown."""
    key = re.sub(r"^(unique_layers\.\d+\.)mod\.", r"\1", key)
    for rule in rules:
        pattern = re.escape(rule.published).replace(r"\{L\}", r"(\d+)")
        if match := re.fullmatch(rf"{pattern}(|\..*)", key, re.DOTALL):
            *layer, rest = match.groups()
            return rule.ours.replace("{L}", "".join(layer)) + rest
    return None


def _split(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns the parameters in a published tensor, which can hold keys and values in one matrix."""
    both = "key_and_value"
    if both not in name:
        return {name: tensor}
    if tensor.ndim == 0 or tensor.shape[0] % 2:
        return {name.replace(both, "key"): tensor}  # `check_weights` reports its shape
    parts = zip(("key", "value"), tensor.chunk(2), strict=True)
    return {name.replace(both, part): half for part, half in parts}


def check_weights(weights: Mapping[str, Tensor], model: Transformer, *, origin: str) -> None:
    """Checks that names and shapes of the weights are exactly the model's.

    Raises:
        ConfigError: lists the first few of everything that is wrong.
    """
    wanted = dict(model.named_parameters()) | dict(model.named_buffers())
    problems = []
    if missing := sorted(wanted.keys() - weights.keys()):
        problems.append(f"it lacks {_named(missing)}")
    if others := sorted(weights.keys() - wanted.keys()):
        problems.append(f"the recipe's model has no {_named(others)}")
    unfit = [
        f"{name} is {list(tensor.shape)} in the file and {list(wanted[name].shape)} in the model"
        for name, tensor in sorted(weights.items())
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    if unfit:
        problems.append(_named(unfit))
    if low := [name for name, tensor in weights.items() if not tensor.is_floating_point()]:
        problems.append(f"not floating point: {_named(low)}")
    if problems:
        listed = "\n  ".join(problems)
        raise ConfigError(
            f"{origin} does not fit the recipe's model (names are moebius'):\n  {listed}\n"
            "choose the recipe of this size (`moebius models` lists them), or change it with "
            "model.num_layers=…, model.feed_forward.num_experts=…"
        )


def _named(names: Sequence[str]) -> str:
    """Joins the first few names and the number of the rest."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
