"""Builds, trains and queries models: the half of `import moebius` that needs torch.

    config = moebius.recipe("smoke", "job.rehearse_failure_at_step=none")   # 4 ranks
    model = moebius.build(config)          # untrained, in this process
    moebius.fit(config, "runs/mine")       # prepares the data, starts the ranks, waits
    print(moebius.evaluate("runs/mine"))
    trained = moebius.load("runs/mine")    # .model, .tokenizer, .config, .step
    print(trained.generate("Once upon a time"))
    print(trained.score("the band closes upon itself"))
    moebius.save(trained, "runs/saved")    # with the weights that it has now
    moebius.resume("runs/mine", "train.steps=200", on_record=print)   # each step, each evaluation
    moebius.export("runs/mine", "runs/mine_exported")

It sits in the top layer beside the command line and does the same with the same parts. The package
imports it on first use of one of its names, so `import moebius` alone does not load torch.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal

from torch import Tensor

from .cluster import submit as submitting
from .cluster.job import JobError as JobError
from .cluster.job import JobStatus, ended_well
from .cluster.job import TrainingFailed as TrainingFailed
from .cluster.local import train_here
from .cluster.report.live import console_of
from .cluster.report.run_records import OnRecord, telling
from .data_pipeline.make.prepare import prepare as prepare_data
from .data_pipeline.read.given import giving
from .data_pipeline.words import run_and_step
from .distributed.checkpoint.format import Weights, find_checkpoint
from .distributed.checkpoint.source import Source
from .distributed.process.process import start_process
from .evaluation.perplexity import Measurement, measure
from .evaluation.restore import Restored, restore, tokenizer_of_run
from .evaluation.text import ScoredText, score_text, write_text
from .evaluation.text import TextTokenizer as TextTokenizer
from .evaluation.trace import LayerRoutes as LayerRoutes
from .evaluation.trace import Trace, check_tokens, logits, rows_of, trace
from .evaluation.zero_shot import ZeroShotReport, measure_tasks
from .model.cost import Size as Size
from .model.cost import count_parameters, forward_flops
from .model.initialise import initialise
from .model.transformer import Transformer
from .train.config.arguments import checked
from .train.config.resolve import as_overrides, resolve
from .train.config.run_config import Config
from .train.config.run_config import ConfigError as ConfigError
from .train.evaluate import Rows, read_rows
from .train.families import start as starting
from .train.families.import_run import checkpoint_of_now, save_model
from .train.families.start import Start as Start
from .train.recipes.smoke import RECIPES
from .train.record.process_log import print_in_any_encoding
from .train.record.run_folder import count_epochs, place_data, stored_config

Given = Config | str | PathLike[str]  # a configuration, or its recipe's name


@checked
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
    checkpoint: Path = Path()

    def __fspath__(self) -> str:
        """Returns a checkpoint with these weights, so that the model can be given where a path is.

        Of a changed model, it is a temporary one, which this process removes when it ends.
        """
        return str(checkpoint_of_now(self.model, self.config, self.checkpoint))

    def generate(
        self,
        prompt: str,
        *,
        num_tokens: int = 100,
        temperature: float = 0.8,
        top_p: float = 1.0,
        seed: int = 0,
        chat: bool = False,
    ) -> str:
        """Returns the prompt followed by the text that the model generates.

        Args:
            prompt: the text to continue.
            num_tokens: how many tokens to generate.
            temperature: of the sampling; 0 always takes the most likely token.
            top_p: samples among the likeliest tokens that have this probability together.
            seed: of the sampling, and of the group context if sequences are routed together.
            chat: sends the prompt through the run's chat template, and returns the answer alone.

        Raises:
            ValueError: the prompt is empty, or the model cannot generate.
        """
        pieces = write_text(
            self._restored,
            prompt,
            num_tokens=num_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            chat=chat,
        )
        return "".join(pieces)

    def score(self, text: str, *, draws: int = 1, seed: int = 0) -> ScoredText:
        """Returns a text's log-likelihood in nats: `.mean` is per token.

        Args:
            text: the text to score.
            draws: how many group contexts to average over, if sequences are routed together.
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
        """Yields the rows of the run's data by micro-batch, as `evaluate` reads them.

        Args:
            split: train or validation.
            max_rows: maximum number of rows, evenly spaced over the split; None: all.

        Raises:
            ValueError: the data cannot be read, or the split is shorter than one row.
        """
        device = self.model.embedding.device
        return read_rows(self.config, device, split=split, max_rows=max_rows)

    def trace(self, rows: Rows | Tensor) -> Trace:
        """Runs the model over rows and returns its routes, hidden states and loss.

        Args:
            rows: of the run's data (`rows`), or your own int64 tokens (B, S + 1).
        """
        if isinstance(rows, Tensor):
            check_tokens(rows, self.model, at_least=2)
            rows = rows_of(rows.to(self.model.embedding.device))
        return trace(self._restored, rows)

    @property
    def _restored(self) -> Restored:
        return Restored(self.model, self.config, self.step, self.checkpoint)


@checked
def recipe(
    name: str | PathLike[str] | Config, /, *overrides: str | Sequence[str], **values: object
) -> Config:
    """Returns the configuration of a recipe, a TOML file or another configuration, with values changed.

    Name a value with its sections: as on the command line, joined by two underscores, or by a
    mapping per section. All three change single values and keep the others:

        moebius.recipe("smoke", "train.steps=20", "model.feed_forward.num_experts=32")
        moebius.recipe("smoke", train__steps=20, model__feed_forward__num_experts=32)
        moebius.recipe("smoke", train={"steps": 20}, model={"feed_forward": {"num_experts": 32}})

    Args:
        name: a name from `moebius models`, a path that ends in .toml, your own function that
            returns a Config, as "package.module:function", or a Config.
        overrides: `section.key=value` with TOML values, or lists of them; they win over `values`.
        values: as above; None means `none` on the command line.

    Raises:
        ConfigError: no such recipe, an unknown key, or conflicting values.
    """
    changes = as_overrides(values, *overrides)
    if isinstance(name, Config):
        return resolve("Config.json", changes, {"Config.json": lambda: name})
    return resolve(os.fspath(name), changes, RECIPES)


@checked
def start_from(
    source: str | PathLike[str],
    name: str | PathLike[str] | None = None,
    /,
    *overrides: str | Sequence[str],
    draw_anew: str | Sequence[str] = (),
    family: str | None = None,
    grow: str | Sequence[str] = (),
    moments: Literal["keep", "new"] | None = None,
    **values: object,
) -> Start:
    """Returns a run that starts from given weights, for `fit` and `submit`, like `--from`.

        start = moebius.start_from("runs/a", "smoke", "optim.learning_rate=1e-4")
        start = moebius.start_from("runs/a@2000", grow="experts=x2")
        moebius.fit(start, "runs/b")

    It has the source's model and tokenizer, and its own data, schedule, optimizer and mesh.

    Args:
        source: a run (its newest checkpoint), a checkpoint, a loaded model, a folder of published
            weights, or "hf://org/name@revision"; "RUN@STEP" branches off there with all of the run's state.
        name: as for `recipe`, for everything but the model; None: the run's own configuration, or
            of a folder the recipe with its sizes, at a tenth of the rate.
        overrides: as for `recipe`; those of the model may change no parameter that is loaded.
        draw_anew: patterns (* and ?) of parameters to draw instead of loading them.
        family: of a folder: `module:name` of your own family.
        grow: how the model grows first, in words such as "experts=x2 asleep".
        moments: whether a branch that grows keeps the optimizer's state; None: it does.
        values: as for `recipe`.

    Raises:
        ConfigError: there is no such source, or the configuration does not fit its weights.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    changes, drawn = as_overrides(values, *overrides), [*as_overrides({}, draw_anew)]
    given, name = os.fspath(source), None if name is None else os.fspath(name)
    more = {"grow": [grow] if isinstance(grow, str) else grow, "moments": moments}
    return starting.start_from(given, name, changes, draw_anew=drawn, family=family, **more)


@checked
def size_of(config: Given) -> Size:
    """Counts the parameters, FLOPs and tokens of a run; with train.epochs, of what `prepare` returns."""
    config = _config(config)
    seq_len = config.data.seq_len
    return Size(
        count_parameters(config.model, seq_len),
        forward_flops(config.model, seq_len),
        tokens=config.train.steps * config.train.global_batch * seq_len,
    )


@checked
def build(config: Given) -> Transformer:
    """Returns a configuration's untrained model, whole, in this process, on the CPU.

    Its weights are the initial weights of training on any number of ranks; they depend only on
    `train.seed`.
    """
    config = _config(config)
    model = Transformer(config.model, backend=config.kernels.backend)
    initialise(model, config.train.seed)
    return model


@checked
def prepare(config: Given, folder: str | PathLike[str] = "runs") -> Config:
    """Prepares a configuration's data and returns it with `data.directory` set.

    It keeps prepared data and continues an interrupted preparation. Runs with equal text and
    tokenizer share one prepared folder.

    Args:
        config: of the run.
        folder: parent of the prepared data, unless `data.directory` is set.

    Raises:
        ValueError: the text cannot be read.
    """
    config = place_data(_config(config), Path(folder).absolute())
    prepare_data(config.prepare, config.data.directory)
    return count_epochs(config)


@checked
def load(
    path: str | PathLike[str],
    *,
    step: int | None = None,
    depth_steps: int | None = None,
    weights: Weights = "trained",
) -> LoadedModel:
    """Returns a trained model with all experts in this process, on a GPU if there is one.

    Args:
        path: a run (its newest checkpoint), RUN@STEP, or a checkpoint's folder.
        step: the same as RUN@STEP.
        depth_steps: total number of applied layers, for a model that shares them; default: as in
            training.
        weights: those of the step, or their "average" of a run with train.average.

    Raises:
        ValueError: the run or checkpoint does not exist or has no average, or the model cannot have
            so many depth steps.
    """
    with start_process("auto") as process:
        found = restore(Path(path), process, step=step, depth_steps=depth_steps, weights=weights)
    tokenizer = TextTokenizer(partial(tokenizer_of_run, found), process.device)
    return LoadedModel(found.model, tokenizer, found.config, found.step, found.checkpoint)


@checked
def evaluate(
    path: str | PathLike[str],
    *,
    step: int | None = None,
    split: str = "validation",
    max_rows: int = 0,
    weights: Weights = "trained",
) -> Measurement:
    """Returns a checkpoint's loss over a split of its data: `.result.loss`, nats per token.

    Args:
        path: a run (its newest checkpoint), RUN@STEP, a checkpoint's folder, or a loaded model.
        step: the same as RUN@STEP.
        split: train or validation.
        max_rows: maximum number of rows, evenly spaced over the split; 0: all.
        weights: as for `load`.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read.
    """
    model = _model_of(path, step, weights)
    return measure(model, step=step, split=split, max_rows=max_rows, weights=weights)


@checked
def score_tasks(
    path: str | PathLike[str],
    tasks: str | Sequence[str],
    data: str | PathLike[str],
    *,
    step: int | None = None,
    limit: int | None = None,
    weights: Weights = "trained",
) -> ZeroShotReport:
    """Returns a checkpoint's zero-shot scores on tasks, like `moebius eval --tasks`.

    Args:
        path: a run (its newest checkpoint), RUN@STEP, a checkpoint's folder, or a loaded model.
        tasks: their names; "paper" means the six of MoEUT's paper.
        data: the folder of their files, or "hub".
        step: the same as RUN@STEP.
        limit: maximum number of items per task; default: all.
        weights: as for `load`.

    Raises:
        ValueError: the run, its checkpoint or a task cannot be read, or the model reads the future.
    """
    report = measure_tasks(
        _model_of(path, step, weights),
        tasks.split(",") if isinstance(tasks, str) else tasks,
        "hub" if data == "hub" else Path(data),
        step=step,
        limit=limit,
        weights=weights,
    )
    assert report is not None, "one process"
    return report


@checked
def fit(
    config: Given | Start,
    run_dir: str | PathLike[str],
    *,
    data: object = None,
    show: bool = True,
    on_record: OnRecord | None = None,
) -> JobStatus:
    """Trains a configuration on this machine, waits, and returns how the run ended.

    Like `moebius train`, it prepares the data, starts `job.num_nodes × job.ranks_per_node` ranks as
    processes, and resumes from the newest checkpoint in the run folder. Ctrl-C (in a notebook:
    interrupt) ends the run at a step boundary with a checkpoint. The data are prepared beside the
    run folder, unless `data.directory` or `data` is given:

        rows = np.memmap("tokens.bin", np.uint16, "r").reshape(-1, config.data.seq_len + 1)
        moebius.fit(config, "runs/rows", data=(rows[:-100], rows[-100:]))

    Args:
        config: of the run, the name of its recipe, or what it starts from (`start_from`).
        run_dir: a new or empty folder, or this run's.
        data: a map-style dataset (`__len__`, `__getitem__`) of rows, each `data.seq_len` + 1 token ids
            below `model.vocab_size` as a list, an array or a tensor of integers; or a tuple, (train,
            validation), since without the second there is no validation loss. Its rows are shuffled
            like those of prepared data. Give it again to continue the run.
        show: print progress.
        on_record: called with the record of every logged step (`kind` "train") and evaluation
            ("eval"), in a thread of this process. If its result is true, the run ends at the next step
            boundary with a checkpoint; so it does if it raises, and `fit` raises the error. Steps
            repeated after a recovery are told again.

    Raises:
        ConfigError: the configuration does not fit its number of ranks, or the folder holds another
            run.
        DataError: `data` has no index or no length, or a bad row.
        JobError: a job is running in this folder.
        TrainingFailed: the run failed; the message is the root cause.
    """
    config, run_dir, source = _opened(config, run_dir)
    reads = giving(config.data, data, vocab_size=config.model.vocab_size)
    with reads as section, telling(run_dir, on_record):
        config = place_data(config.model_copy(update={"data": section}), run_dir.parent)
        return ended_well(train_here(config, run_dir, source=source, console=console_of(show)))


@checked
def submit(
    config: Given | Start,
    run_dir: str | PathLike[str],
    *,
    address: str | None = None,
    detach: bool = False,
    show: bool = True,
) -> JobStatus:
    """Trains a configuration on a Ray cluster, like `moebius submit`; returns how the run ended.

    Args:
        config: of the run, the name of its recipe, or what it starts from (`start_from`).
        run_dir: a new or empty folder, or this run's; every node must see it.
        address: host:port of the cluster's head, "auto", or "simulated"; None simulates a cluster.
        detach: return once the job's supervisor runs; needs an address.
        show: print progress.

    Raises:
        ConfigError: as for `fit`.
        JobError: Ray is missing, the cluster cannot be used, or a job is running in this folder.
        TrainingFailed: the run failed; the message is the root cause.
    """
    config, run_dir, source = _opened(config, run_dir)
    config, console = place_data(config, run_dir.parent), console_of(show)
    given = {"address": address, "detach": detach, "source": source, "console": console}
    return ended_well(submitting.submit(config, run_dir, **given))


@checked
def resume(
    run_dir: str | PathLike[str],
    *overrides: str | Sequence[str],
    show: bool = True,
    on_record: OnRecord | None = None,
) -> JobStatus:
    """Continues a run from its newest checkpoint, with its own configuration, as it was started.

    A run of `submit` continues on the cluster that it was submitted to; for another one, call
    `submit` with `load_config(run_dir)`.

    Args:
        run_dir: of the run.
        overrides: `section.key=value`, for example "train.steps=20000".
        show: as for `fit`.
        on_record: as for `fit`.

    Raises:
        ConfigError: there is no run, or the changes would make it another run.
        JobError: the run has finished or is running, or its cluster cannot be used.
        TrainingFailed: the run failed; the message is the root cause.
    """
    print_in_any_encoding()
    config, run_dir = load_config(run_dir, *overrides), Path(run_dir)
    with telling(run_dir, on_record):
        return ended_well(submitting.resume(config, run_dir, console=console_of(show)))


@checked
def load_config(run_dir: str | PathLike[str], *overrides: str | Sequence[str]) -> Config:
    """Returns a run's configuration, also that of RUN@STEP, with values changed as for `recipe`.

    Raises:
        ConfigError: the folder holds no run, or a change is not valid.
    """
    stored = run_and_step(run_dir)[0] / "config.json"
    recipes = {str(stored): lambda: stored_config(stored.parent)}
    return resolve(str(stored), as_overrides({}, *overrides), recipes)


@checked
def export(
    path: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    step: int | None = None,
    layout: Literal["hf", "safetensors"] = "hf",
    dtype: Literal["fp32", "bf16"] | None = None,
    with_tokenizer: bool = True,
    weights: Weights = "trained",
) -> str:
    """Writes a checkpoint's weights for other programs, like `moebius ckpt export`.

    Args:
        path: a run (its newest checkpoint), RUN@STEP, a checkpoint's folder, or a loaded model.
        folder: does not exist yet.
        step: the same as RUN@STEP.
        layout: "hf" for a folder that transformers loads; "safetensors" for the weights alone.
        dtype: of weights that enter matrix products; None: that of the published folder that the
            run began with, else fp32.
        with_tokenizer: False omits the tokenizer from "hf".
        weights: as for `load`.

    Returns:
        What was written, in words.

    Raises:
        ValueError: the checkpoint cannot be read, transformers could not run the model as trained,
            or `folder` exists.
    """
    from .export.hf.model_folder import export as write

    checkpoint, out = find_checkpoint(Path(path), step), Path(folder)
    given = {"layout": layout, "dtype": dtype, "with_tokenizer": with_tokenizer}
    return str(write(checkpoint, out, **given, weights=weights))


@checked
def save(model: LoadedModel, folder: str | PathLike[str]) -> Path:
    """Writes a loaded model with the weights that it has now as a run folder with one checkpoint.

        trained = moebius.load("runs/mine")
        with torch.no_grad():
            trained.model.embedding.mul_(0.9)
        moebius.save(trained, "runs/changed")

    Every command takes the folder where it takes a run; to train on, start a run from it. Its
    configuration, step and position in the data are those that the model was loaded with, and
    source.json names that checkpoint and its digest. The optimizer's state is left out.

    Args:
        model: from `load`; names and shapes of its tensors must be unchanged.
        folder: does not exist yet.

    Returns:
        The folder.

    Raises:
        ConfigError: the model has other names or shapes than its configuration.
        CheckpointError: `folder` exists, the disk is full, or the model's checkpoint is gone.
    """
    save_model(Path(folder), model.model, model.config, model.checkpoint)
    return Path(folder)


def _model_of(path: str | PathLike[str], step: int | None, weights: Weights) -> Path | Restored:
    """Returns a loaded model as it is now, unless something else of its run is asked for."""
    if isinstance(path, LoadedModel) and step is None and weights == "trained":
        return path._restored
    return Path(path)


def _opened(
    config: Given | Start, run_dir: str | PathLike[str]
) -> tuple[Config, Path, Source | None]:
    """Returns a run's configuration, its absolute folder, and what it starts from."""
    print_in_any_encoding()
    source = config.source if isinstance(config, Start) else None
    config = config.config if isinstance(config, Start) else _config(config)
    return config, Path(run_dir).absolute(), source


def _config(given: Given) -> Config:
    """Returns a configuration, also by its recipe's name."""
    return given if isinstance(given, Config) else recipe(given)
