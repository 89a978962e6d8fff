"""Makes, trains and asks models: the half of `import moebius` that needs torch.

    config = moebius.recipe("smoke", "job.num_nodes=1", "mesh.dp_replicate=1")
    model = moebius.build(config)          # untrained, in this process
    moebius.fit(config, "runs/mine")       # prepares the data, starts the ranks, waits
    print(moebius.evaluate("runs/mine"))
    trained = moebius.load("runs/mine")    # .model, .tokenizer, .config, .step
    print(trained.generate("Once upon a time"))
    print(trained.score("the band closes upon itself"))

It stands on the top layer beside the command line and does the same with the same parts. The package
imports it when one of its names is first used, so `import moebius` alone costs no torch.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from .cluster.job import JobError as JobError
from .cluster.job import JobStatus, State
from .cluster.local import train_here
from .data_pipeline.make.prepare import prepare as prepare_data
from .data_pipeline.tokenizers.interface import Tokenizer
from .distributed.checkpoint.format import find_checkpoint, read_meta
from .distributed.process.process import start_process
from .evaluation.perplexity import Measurement, measure
from .evaluation.restore import Restored, restore, tokenizer_of_run
from .evaluation.text import ScoredText, score_text, write_text
from .evaluation.trace import LayerRoutes as LayerRoutes
from .evaluation.trace import Trace, logits, rows_of, trace
from .evaluation.zero_shot import ZeroShotReport, measure_tasks
from .model.cost import Flops, Parameters, count_parameters, forward_flops
from .model.initialise import initialise
from .model.transformer import Transformer
from .train.config.resolve import resolve
from .train.config.run_config import Config, ConfigError
from .train.evaluate import Rows, read_rows
from .train.recipes.smoke import RECIPES
from .train.record.run_folder import place_data


class TrainingFailed(RuntimeError):
    """A run ended without success; the message is its root cause, `status` all that is known."""

    def __init__(self, status: JobStatus):
        words = [status.reason]
        if status.root_cause is not None and status.root_cause.summary not in status.reason:
            words.append(status.root_cause.summary)
        logs = status.run_dir / "logs"
        super().__init__(f"{status.run_dir}: {status.state}: {': '.join(words)}; see {logs}")
        self.status = status


@dataclass(frozen=True)
class TextTokenizer:
    """Turns text into tokens that the model takes, and tokens into text."""

    _tokenizer: Tokenizer
    _device: torch.device

    @property
    def vocab_size(self) -> int:
        """Returns the number of token ids, the end of a document included."""
        return self._tokenizer.vocab_size

    @property
    def end_of_document_id(self) -> int:
        """Returns the id that ends a document; `encode` never returns it."""
        return self._tokenizer.end_of_document_id

    def encode(self, text: str) -> Tensor:
        """Returns a text's token ids: int64 (S,), on the model's device.

        Raises:
            UnicodeEncodeError: the text holds half a surrogate pair.
        """
        ids = self._tokenizer.encode_batch([text])[0]
        return torch.tensor(ids.tolist(), dtype=torch.int64, device=self._device)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Returns the text of token ids; an end of document is left out.

        Args:
            ids: one dimension, a tensor or a list.
        """
        return self._tokenizer.decode(ids.tolist() if isinstance(ids, Tensor) else ids)


@dataclass(frozen=True)
class LoadedModel:
    """Holds a trained model with its tokenizer, its configuration and its step.

    trained = moebius.load("runs/mine")
    tokens = trained.tokenizer.encode("Once upon a time")
    next_token = trained.logits(tokens[None])[0, -1].argmax()
    print(trained.tokenizer.decode([int(next_token)]))
    """

    model: Transformer
    tokenizer: TextTokenizer
    config: Config
    step: int

    def generate(
        self, prompt: str, *, num_tokens: int = 100, temperature: float = 0.8, seed: int = 0
    ) -> str:
        """Returns the prompt and the text that the model writes after it.

        Args:
            num_tokens: how many tokens to write.
            temperature: of the sampling; 0 takes the most likely token each time.
            seed: of the sampling, and of the group context where sequences are routed together.

        Raises:
            ValueError: an empty prompt, or a model that cannot write.
        """
        pieces = write_text(
            self._restored, prompt, num_tokens=num_tokens, temperature=temperature, seed=seed
        )
        return "".join(pieces)

    def score(self, text: str, *, draws: int = 1, seed: int = 0) -> ScoredText:
        """Returns how likely the model finds a text, in nats: `.mean` for all of it.

        Args:
            draws: of the group context, for a model that routes sequences together.
            seed: of those draws.

        Raises:
            ValueError: there is nothing to score, or the model reads the future.
        """
        return score_text(self._restored, text, draws=draws, seed=seed)

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Returns the logits at every position, (B, S, V).

        Args:
            tokens_BS: int64, rows of tokens of one length.
        """
        return logits(self._restored, tokens_BS)

    def rows(self, *, split: str = "validation", max_rows: int | None = None) -> Iterator[Rows]:
        """Yields the rows of the run's data, micro-batch by micro-batch, as `evaluate` reads them.

        Args:
            split: train or validation.
            max_rows: how many rows at most, evenly spaced over the split; None: all.

        Raises:
            ValueError: the data cannot be read, or the split is shorter than one row.
        """
        device = self.model.embedding.device
        return read_rows(self.config, device, split=split, max_rows=max_rows)

    def trace(self, rows: Rows | Tensor) -> Trace:
        """Runs the model over rows of tokens: its routes, hidden states and loss.

        Args:
            rows: of the run's data (`rows`), or int64 tokens (B, S + 1) of your own.
        """
        if isinstance(rows, Tensor):
            rows = rows_of(rows.to(self.model.embedding.device))
        return trace(self._restored, rows)

    @property
    def _restored(self) -> Restored:
        return Restored(self.model, self.config, self.step)


@dataclass(frozen=True)
class Size:
    """Counts what one run of a configuration has and does, without allocating its model."""

    parameters: Parameters
    flops: Flops
    """Of one token: `.forward`, and `.training` with the backward pass."""
    tokens: int
    """Of the whole run."""

    @property
    def training_flops(self) -> float:
        """Returns the FLOPs of the whole run, forward and backward."""
        return self.flops.training * self.tokens


def recipe(name: str, /, *overrides: str, **values: object) -> Config:
    """Returns the configuration of a recipe or a TOML file, with single values changed.

    A value is named with its sections: as on the command line, joined by two underscores, or by a
    mapping per section. All three change single values and leave the others:

        moebius.recipe("smoke", "train.steps=20", "model.feed_forward.num_experts=32")
        moebius.recipe("smoke", train__steps=20, model__feed_forward__num_experts=32)
        moebius.recipe("smoke", train={"steps": 20}, model={"feed_forward": {"num_experts": 32}})

    Args:
        name: one of those that `moebius models` lists, a path that ends in .toml, or a function of
            your own that returns a Config, as "package.module:function".
        overrides: `section.key=value` with TOML values; they win over `values`.
        values: as above; None means what `none` means on the command line.

    Raises:
        ConfigError: no such recipe, an unknown key, or values that do not fit together.
    """
    return resolve(name, [*_as_arguments(values), *overrides], RECIPES)


def size_of(config: Config) -> Size:
    """Counts the parameters, FLOPs and tokens of a run."""
    seq_len = config.data.seq_len
    return Size(
        count_parameters(config.model, seq_len),
        forward_flops(config.model, seq_len),
        tokens=config.train.steps * config.train.global_batch * seq_len,
    )


def build(config: Config) -> Transformer:
    """Returns the untrained model of a configuration, whole and in this process, on the CPU.

    Its weights are those that training starts from, on any number of ranks: they depend on
    `train.seed` alone.
    """
    model = Transformer(config.model, backend=config.kernels.backend)
    initialise(model, config.train.seed)
    return model


def prepare(config: Config, folder: str | PathLike[str] = "runs") -> Config:
    """Prepares the data of a configuration and returns it with `data.directory` filled in.

    Data that are prepared already are left alone, and a killed preparation continues. Runs with equal
    text and tokenizer share one prepared folder.

    Args:
        folder: where prepared data go, unless `data.directory` says where.

    Raises:
        ValueError: the text cannot be read.
    """
    config = place_data(config, Path(folder).absolute())
    prepare_data(config.prepare, config.data.directory)
    return config


def load(
    path: str | PathLike[str], *, step: int | None = None, depth_steps: int | None = None
) -> LoadedModel:
    """Returns a trained model, all experts in this process, on a GPU if there is one.

    Args:
        path: a run folder, or one checkpoint in it.
        step: of which checkpoint of a run; default: the newest.
        depth_steps: how often the layers are applied in all, of a model that shares them; default:
            as in training.

    Raises:
        ValueError: no such run or checkpoint, its tokenizer is gone, or the model cannot have so many
            depth steps.
    """
    run_dir, step = _run_of(Path(path), step)
    with start_process("auto") as process:
        restored = restore(run_dir, process, step=step, depth_steps=depth_steps)
    tokenizer = TextTokenizer(tokenizer_of_run(restored), process.device)
    return LoadedModel(restored.model, tokenizer, restored.config, restored.step)


def evaluate(
    path: str | PathLike[str],
    *,
    step: int | None = None,
    split: str = "validation",
    max_rows: int = 0,
) -> Measurement:
    """Returns the loss of a checkpoint over a split of its data: `.result.loss`, nats per token.

    Args:
        path: a run folder, or one checkpoint in it.
        step: of which checkpoint of a run; default: the newest.
        split: train or validation.
        max_rows: how many rows at most, evenly spaced over the split; 0: all.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read.
    """
    run_dir, step = _run_of(Path(path), step)
    return measure(run_dir, step=step, split=split, max_rows=max_rows)


def score_tasks(
    path: str | PathLike[str],
    tasks: Sequence[str],
    data: str | PathLike[str],
    *,
    step: int | None = None,
    limit: int | None = None,
) -> ZeroShotReport:
    """Returns the zero-shot scores of a checkpoint on tasks, as `moebius eval --tasks` does.

    Args:
        path: a run folder, or one checkpoint in it.
        tasks: their names; "paper" stands for the six of MoEUT's paper.
        data: the folder of their files, or "hub".
        step: of which checkpoint of a run; default: the newest.
        limit: how many items of each task at most; default: all.

    Raises:
        ValueError: the run, its checkpoint or a task cannot be read, or the model reads the future.
    """
    run_dir, step = _run_of(Path(path), step)
    report = measure_tasks(
        run_dir, tasks, "hub" if data == "hub" else Path(data), step=step, limit=limit
    )
    assert report is not None, "one process"
    return report


def fit(config: Config, run_dir: str | PathLike[str], *, show: bool = True) -> JobStatus:
    """Trains a configuration on this machine and returns how the run ended; blocks until then.

    Does what `moebius train` does: prepares the data, starts `job.num_nodes × job.ranks_per_node`
    ranks as processes, goes on from the newest checkpoint where the run folder holds one. Ctrl-C
    (in a notebook: interrupt) ends the run at a step boundary with a checkpoint. The data are
    prepared beside the run folder, unless `data.directory` says where.

    Args:
        run_dir: a folder that is new, empty or holds this run.
        show: print what happens.

    Raises:
        ConfigError: the configuration does not fit its number of ranks, or the folder holds another
            run.
        JobError: a job is at work in this folder.
        TrainingFailed: the run failed; the message is the root cause.
    """
    from rich.console import Console

    run_dir = Path(run_dir).absolute()
    config = place_data(config, run_dir.parent)
    config.check_world(config.world_size)
    status = train_here(config, run_dir, console=Console(quiet=not show))
    if status.state not in (State.SUCCEEDED, State.STOPPED, State.PREEMPTED):
        raise TrainingFailed(status)
    return status


def _as_arguments(overrides: Mapping[str, object], section: str = "") -> Iterator[str]:
    """Yields overrides as the command line takes them, `section.key=value` with TOML values."""
    for name, value in overrides.items():
        key = section + name.replace("__", ".")
        if isinstance(value, Mapping):
            yield from _as_arguments(value, f"{key}.")
        else:
            yield f"{key}={_as_toml(value, key)}"


def _as_toml(value: object, key: str) -> str:
    """Returns a value as TOML, which writes strings, truth and numbers as JSON does and has inf, nan."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_as_toml(each, key) for each in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(name)} = {_as_toml(each, key)}" for name, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    try:
        return json.dumps(value, default=os.fspath)
    except TypeError:
        raise ConfigError(
            f"{key}: {value!r} is no value of a configuration; give a number, a text, True or "
            "False, None, or a list of them"
        ) from None


def _run_of(path: Path, step: int | None) -> tuple[Path, int | None]:
    """The run folder that a path is or lies in, and the step that it names."""
    if (path / "config.json").exists() or not path.name.startswith("step_"):
        return path, step
    checkpoint = find_checkpoint(path.absolute(), step)
    return checkpoint.parent.parent, read_meta(checkpoint).step
