"""Restores a trained model from a run folder, on any number of ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch.distributed as dist

from ..data_pipeline.errors import InputError
from ..data_pipeline.manifest import is_prepared
from ..data_pipeline.read.given import given_rows
from ..data_pipeline.tokenizers.chat_template import ChatTemplate
from ..data_pipeline.tokenizers.hub import find_template, open_tokenizer
from ..data_pipeline.tokenizers.interface import CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from ..data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from ..data_pipeline.tokenizers.tokenizer import check_meaning, prepared_tokenizer
from ..data_pipeline.words import run_and_step
from ..distributed.checkpoint.format import Weights, find_checkpoint
from ..distributed.checkpoint.loading import load
from ..distributed.checkpoint.source import SOURCE_FILES
from ..distributed.checkpoint.together import gathered
from ..distributed.layout import MeshConfig, plan_layout
from ..distributed.mesh import build_mesh
from ..distributed.parallelize import build_model
from ..distributed.process.process import Process
from ..model.execution.precision import stored_dtype
from ..model.transformer import Transformer
from ..train.config.run_config import Config, ConfigError
from ..train.record.run_folder import config_of
from ..train.state import model_tensors


@dataclass(frozen=True)
class Restored:
    """Holds a model with the weights of one checkpoint."""

    model: Transformer
    config: Config
    step: int
    checkpoint: Path = Path()
    weights: Weights = "trained"

    def __str__(self) -> str:
        return str(self.checkpoint)


class ModelChoice(TypedDict, total=False):
    """Names what `restore` makes of a run; without a key it is as trained, of the newest checkpoint."""

    step: int | None
    loops: int | None
    weights: Weights


def restore(
    run_dir: Path | Restored,
    process: Process,
    *,
    step: int | None = None,
    depth_steps: int | None = None,
    loops: int | None = None,
    weights: Weights = "trained",
) -> Restored:
    """Builds a run's model with all experts on this rank, and loads a checkpoint into it.

    Args:
        run_dir: the run folder, RUN@STEP, or a checkpoint's folder; a model stays as it is.
        process: this rank.
        step: of the checkpoint; None: the newest.
        depth_steps: total number of layer applications, for a model that shares layers; None: as
            trained. The returned configuration has the same number.
        loops: the same as a number of repeats; None: as trained.
        weights: those of the step, or their average.

    Raises:
        ValueError: the run or the checkpoint does not exist or has no average, its data's folder was prepared with
            another tokenizer, or the model cannot have that many depth steps.
    """
    if isinstance(run_dir, Restored):
        run_dir.model.eval()
        return run_dir
    group = dist.group.WORLD if process.world_size > 1 else None
    # a run that saves meanwhile has another newest or best one for the next rank
    checkpoint = Path(gathered(group, lambda: str(find_checkpoint(run_dir, step)))[0])
    config = config_of(checkpoint)
    if loops is not None:
        depth_steps = len(config.model.schedule_of(loops))
    if depth_steps is not None:
        config = _with_depth(config, depth_steps)
    mesh = build_mesh(plan_layout(MeshConfig(), process.world_size), process)
    model = build_model(
        config.model,
        mesh,
        dispatcher="auto",
        backend=config.kernels.backend,
        seed=config.train.seed,
        device=process.device,
        stored=stored_dtype(config.train.precision),
    )
    meta = load(
        checkpoint,
        *model_tensors(model),
        mesh=mesh,
        allow_unexpected=True,
        converts=weights == "average",  # which is float32
        weights=weights,
    )
    if is_prepared(config.data.directory):
        check_meaning(config.data.directory, meta.get("data") or {})
    model.before_step(meta["progress"]["step"])
    return Restored(model.eval(), config, meta["progress"]["step"], checkpoint, weights)


def _with_depth(config: Config, depth_steps: int) -> Config:
    """Returns the configuration with the same weights applied more or less often.

    Raises:
        ConfigError: the model shares no layers, or the number is no multiple of the group.
    """
    model = config.model
    once, core = model.loops.prelude + model.loops.coda, model.core_layers
    if depth_steps != model.num_layers and model.num_repeats == 1 and model.loops.is_plain:
        raise ConfigError(
            f"{depth_steps} depth steps: the model shares no layers and always has {core}; only a "
            "model with repeated layers can change them"
        )
    if depth_steps <= once or (depth_steps - once) % core:
        around = f"{once} and a multiple" if once else "a multiple"
        raise ConfigError(
            f"{depth_steps} depth steps must be {around} of the group of {core} layers, of which at "
            "least one loop is made"
        )
    return config.model_copy(update={"model": model.model_copy(update={"num_layers": depth_steps})})


def refuse_pairs(restored: Restored) -> None:
    """Checks that a model predicts the next token, and so can score text.

    Raises:
        ConfigError: it was trained on pairs of inputs and labels.
    """
    if restored.config.data.targets == "paired":
        raise ConfigError(
            "the run has data.targets=paired: its rows are pairs of inputs and labels, not text"
        )


def require_data(run_dir: Path | Restored, restored: Restored) -> None:
    """Checks that there is text to measure a loss on.

    Raises:
        ConfigError: none was prepared, as after `moebius ckpt import`.
    """
    if restored.config.data.dataset:
        given_rows(restored.config.data)
    elif not restored.config.data.directory:
        raise ConfigError(
            f"{run_dir}: no text was prepared for it, so there is none to measure the loss on: import it "
            "with data.directory=FOLDER of `moebius prepare`, or train it with `moebius resume`; "
            "--prompt, --score and --tasks need none"
        )


def tokenizer_of_run(restored: Restored) -> Tokenizer:
    """Returns the tokenizer that a run was trained with, or that its prepared data would have.

    Raises:
        ValueError: it is missing or has another vocabulary.
    """
    directory, model = restored.config.data.directory, restored.config.model
    prepare, num_ids = restored.config.prepare, restored.config.prepare.num_token_ids
    if prepare.tokenizer == "bytes" and restored.config.data.dataset:
        tokenizer = BytesTokenizer()
    elif prepare.loads_tokenizer and not is_prepared(directory):  # as after `moebius ckpt import`
        directory = prepare.tokenizer
        try:
            tokenizer = open_tokenizer(directory, end_of_document=prepare.end_of_document)
        except InputError:
            if Path(directory).name != SOURCE_FILES or Path(directory, TOKENIZER_FILE).exists():
                raise
            raise ConfigError(
                f"{directory}: the imported folder had no tokenizer: copy its model's "
                f"{TOKENIZER_FILE} and {CONFIG_FILE} there"
            ) from None
    else:
        tokenizer = prepared_tokenizer(directory)
    if tokenizer.vocab_size > min(model.vocab_size, num_ids):
        raise ConfigError(
            f"{directory}: its tokenizer has {tokenizer.vocab_size} ids, but the run was trained "
            f"with {num_ids} (model.vocab_size={model.vocab_size}): the folder was prepared again "
            "with another vocabulary; restore the run's folder"
        )
    return tokenizer


def chat_of_run(restored: Restored, tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the chat template beside a run's data, its source's files, or its tokenizer.

    Raises:
        ValueError: there is none, `prepare.chat_template` is off, or it cannot be used.
    """
    config, run_dir = restored.config, run_and_step(restored.checkpoint)[0]
    places = [config.data.directory, str(run_dir / SOURCE_FILES)]
    places += [config.prepare.tokenizer] if config.prepare.loads_tokenizer else []
    advice = "with `eval --prompt`, leave out --chat (chat=True) to continue the text itself"
    if not config.prepare.chat_template:
        raise ConfigError(f"{run_dir}: prepare.chat_template=false has turned it off: {advice}")
    for place in filter(None, places):
        if saved := find_template(place):
            return ChatTemplate(saved, tokenizer, where=place, advice=advice)
    raise ConfigError(
        f"{run_dir}: has no chat template, neither with its data nor with its tokenizer: "
        f"{advice}, or put the model's chat_template.jinja into {run_dir / SOURCE_FILES}"
    )
