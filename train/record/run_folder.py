"""The run folder: everything about one run in one place, reachable from every node.

config.json · config.next.json · source.json · journal.jsonl · metrics.jsonl · preparation.jsonl · checkpoints/ · logs/ ·
sinks/ · profile/ · tensorboard/ · wandb/ · result.json · summary.png
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ...data_pipeline.data_config import MAY_CHANGE
from ...data_pipeline.files import write_atomically
from ...data_pipeline.manifest import is_prepared
from ...data_pipeline.read.corruption import open_fetcher
from ...data_pipeline.read.given import given_rows, open_samples
from ...data_pipeline.read.loader import Loader
from ...data_pipeline.read.samples import OrderedSamples
from ...data_pipeline.tokenizers.tokenizer import check_meaning
from ...data_pipeline.words import is_published, run_and_step, runs_near, some_of
from ...distributed.checkpoint.format import (
    CheckpointError,
    latest,
    read_meta,
    step_name,
    step_of,
)
from ...distributed.checkpoint.source import (
    SOURCE,
    SOURCE_FILES,
    check_source,
    keep_small_files,
    read_source,
)
from ...distributed.checkpoint.source import Source as Source
from ...plugins import distrust
from ..config.run_config import Config, ConfigError
from ..config.schedule import RunSchedule
from ..config.suggestions import drop_removed
from ..config.validation import validated

# Up to here, repeated text is worth nearly as much as new text (Muennighoff et al. 2023, arXiv 2305.16264).
_MANY_PASSES = 4


def default_run_dir(config: Config, root: Path) -> Path:
    """Returns a new folder's path under `root`, named after the job and the time."""
    return root / f"{config.job.name}-{datetime.now():%Y%m%d-%H%M%S}"


def place_data(config: Config, root: Path) -> Config:
    """Sets data.directory to an absolute path, and counts the epochs of what is prepared there.

    Runs with equal input and tokenizer share one prepared folder. A run on given rows needs none.

    Raises:
        DataError: the run reads rows that no program gives.
    """
    if config.data.dataset:
        given_rows(config.data)
        return count_epochs(config)
    directory = Path(
        config.data.directory or root / "data" / config.prepare.spec_hash[:12]
    ).absolute()
    if not config.data.directory:
        config = config.naming_text()
    return count_epochs(
        config.model_copy(
            update={"data": config.data.model_copy(update={"directory": str(directory)})}
        )
    )


def count_epochs(config: Config) -> Config:
    """Sets train.steps from train.epochs, if all data is prepared.

    Raises:
        ConfigError: the data is of several sources, or the run would not fit its number of steps.
        DataError: the data cannot be read.
    """
    data, epochs = config.data, config.train.epochs
    if epochs is None or not (data.dataset or is_prepared(data.directory)):
        return config
    samples = open_samples(data, open_fetcher(data))
    if not samples.is_complete:
        return config
    config.check_epochs(samples.mixture.names)
    steps = epochs * samples.num_rows() / config.train.global_batch
    values = config.model_dump(mode="json")
    values["train"] |= {"steps": max(1, int(round(steps, 6))), "epochs": None}
    train = validated(Config, values, origin=f"train.epochs={epochs}").train
    return config.model_copy(update={"train": train.model_copy(update={"epochs": epochs})})


def passes_note(config: Config) -> str:
    """Says how often a run reads its prepared data; "" while that is not known."""
    data = config.data
    if not is_prepared(data.directory):
        return ""
    return _passes_of(config, OrderedSamples(data, open_fetcher(data)))


def _passes_of(config: Config, samples: OrderedSamples) -> str:
    steps = config.train.steps
    if (passes := samples.passes(steps * config.train.global_batch)) is None:
        return ""
    count, source, tokens = passes
    number = f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
    of = f" of source {source!r}" if len(samples.mixture.names) > 1 else ""
    words = f"{steps:,} steps over {tokens:,} tokens{of} are {number} pass{'es' * (number != '1')}"
    many = ": after some four, repeated text adds ever less, and the model learns it by heart"
    return words + many * (count > _MANY_PASSES)


def check_run(config: Config, run_dir: Path, source: Source | None = None) -> None:
    """Checks that a folder is new, or holds this run.

    A folder without any completed step, because the start failed, accepts another configuration and another
    source; one with imported weights, another configuration of their model.

    Args:
        config: the run's configuration.
        run_dir: the run folder.
        source: what the run starts from; None: drawn weights, or an existing run's own.

    Raises:
        ConfigError: the folder contains something else, or a run that computes something else or
            started from something else.
    """
    if (run_dir / "config.json").exists() or latest(run_dir / "checkpoints") is not None:
        before = stored_config(run_dir).model_dump(mode="json")
        if has_trained(run_dir) or _is_import(run_dir):
            _check_same_source(source, run_dir)
            kept = before if has_trained(run_dir) else {"model": before["model"]}
            return check_same_run(kept, config, run_dir)
    elif run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(
            f"{run_dir}: is not empty and holds no run (no config.json); choose a new folder"
        )
    config.check_mixture()


def open_run(config: Config, run_dir: Path, source: Source | None = None) -> None:
    """Creates the run folder with its config.json and source.json, or opens this run's.

    A run with steps keeps its own configuration until the job makes a step, so that one that ends earlier
    changes nothing.

    Raises:
        ConfigError: the folder cannot be written, or `check_run` refuses it.
    """
    _make_writable(run_dir)
    check_run(config, run_dir, source)
    if has_trained(run_dir):
        return
    if not _is_import(run_dir):  # else its weights and their folder's files are here
        _place_source(source, run_dir)
    config.save(run_dir / "config.json")


def _is_import(run_dir: Path) -> bool:
    return (run_dir / "checkpoints" / step_name(0)).exists()


def _place_source(source: Source | None, run_dir: Path) -> None:
    if source is None:
        (run_dir / SOURCE).unlink(missing_ok=True)
        shutil.rmtree(run_dir / SOURCE_FILES, ignore_errors=True)
    else:
        write_atomically(run_dir / SOURCE, source.as_text())
        keep_small_files(source, run_dir)


def stored_config(run_dir: Path) -> Config:
    """Returns a run's configuration; if config.json is lost, that of the newest checkpoint.

    Raises:
        ConfigError: there is no run, or its configuration cannot be read.
    """
    saved, newest = run_dir / "config.json", latest(run_dir / "checkpoints")
    if newest is None and (is_published(run_dir) or not saved.exists()):
        lacks = "no checkpoints" if saved.exists() else "no config.json"
        raise ConfigError(f"{run_dir}: is not a run folder ({lacks}){runs_near(run_dir)}")
    if newest is None or saved.exists():
        return Config.load(saved)
    return checkpoint_config(newest, read_meta(newest).meta)


def _check_same_source(asked: Source | None, run_dir: Path) -> None:
    """Refuses another source than that of an existing run, whose weights are its own by now."""
    if asked is None:
        return
    before = read_source(run_dir)
    if before is None or not asked.is_like(before):
        begins = "starts from drawn weights" if before is None else before.words()
        raise ConfigError(
            f"{run_dir}: holds a run that {begins}, not one that {asked.words()}; choose a new "
            "folder, or leave --from out to continue the run"
        )


def check_data(config: Config, run_dir: Path, *, is_whole: bool) -> str:
    """Opens the data and the source as ranks will: data must have the run's tokenizer, order and length.

    Returns how often the run reads the data, in words, once it is whole.

    Args:
        is_whole: whether the data has been prepared; else only its tokenizer may be known.

    Raises:
        DataError: every rank would refuse the data, or there is nothing to validate on.
        CheckpointError: what the run starts from is gone or has changed.
    """
    data, train, position = config.data, config.train, None
    source, newest = read_source(run_dir), latest(run_dir / "checkpoints")
    is_given = bool(data.dataset)
    if source is not None and newest is None and not config.checkpoint.copy_to:
        check_source(source)
    if not (is_given or is_prepared(data.directory)):
        return ""
    if source is not None and source.tokenizer is not None and not is_given:
        check_meaning(data.directory, {"spec": {"tokenizer_sha256": source.tokenizer}})
    with contextlib.suppress(CheckpointError):  # of a damaged one, which ranks set aside
        if newest is None and source is not None and source.kind == "branch":
            newest = Path(source.path)
        if newest is not None:
            position = read_meta(newest).meta.get("data")
    if position and not is_given:
        check_meaning(data.directory, position)
    if not is_whole:
        return ""
    batch, micro = train.global_batch, train.micro_batch
    order = None if data.override_position else position
    with Loader(data, global_batch=batch, micro_batch=micro, continues=order) as loader:
        loader.samples.check_enough(train.steps * batch)
        note = _passes_of(config, loader.samples)
    from ..evaluate import check_validation  # which imports a process's half second of torch

    check_validation(config)
    return note


def if_changed(config: Config, run_dir: Path) -> Literal["refuse", "tell", "ignore"]:
    """Returns what to do if the run's data was prepared from other text than is there now.

    A run that has begun goes on with it, and one whose text nobody has named needs no text.
    """
    if not config.names_text:
        return "ignore"
    return "tell" if has_trained(run_dir) else "refuse"


def steps_before(run_dir: Path, source: Source | None) -> tuple[int, RunSchedule | None]:
    """Returns the steps that a run or its trunk has made, and their schedule; None: it is new."""
    newest = latest(run_dir / "checkpoints")
    if source is None and has_trained(run_dir):  # else the folder may be of a start that failed
        source = read_source(run_dir)
    if newest is not None and step_of(newest.name):  # an import has weights and no steps
        before = stored_config(run_dir)
        return step_of(newest.name), before.optim.over(before.train.steps)
    if source is None or source.kind != "branch":
        return 0, None
    meta = read_meta(Path(source.path))
    trunk = checkpoint_config(Path(source.path), meta.meta)
    return meta.step, trunk.optim.over(trunk.train.steps)


def check_generation(run_dir: Path) -> int:
    """Returns this process's generation; 0 without a supervisor.

    Raises:
        ConfigError: a supervisor owns this folder but did not start this process.
    """
    mine = os.environ.get("MOEBIUS_GENERATION")
    if mine is None and (run_dir / "generation").exists():
        raise ConfigError(
            f"{run_dir}: belongs to a job, and only its supervisor starts ranks; continue it with "
            "`moebius train` or `moebius submit` and --run-dir, or use another folder"
        )
    return int(mine or 0)


def end_is_asked(run_dir: Path) -> bool:
    """Returns whether the ranks must save and end at the next step boundary.

    `stop` ends the job; after `pause` its supervisor continues with other nodes.
    """
    return (run_dir / "stop").exists() or (run_dir / "pause").exists()


def has_trained(run_dir: Path) -> bool:
    """Returns whether a step was made or saved here; that of an import is none."""
    saved = (path.name for path in (run_dir / "checkpoints").glob("step_*"))
    if any(name != step_name(0) for name in saved):
        return True
    try:
        with (run_dir / "metrics.jsonl").open(encoding="utf-8", errors="replace") as lines:
            return any('"kind": "train"' in line for line in lines)
    except OSError:
        return False


def _make_writable(run_dir: Path) -> None:
    try:
        if not run_dir.is_dir():
            # Text, losses and tracebacks are private; to share them, change the mode.
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            run_dir.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        # a file is in place of a parent folder
        number = errno.ENOTDIR if isinstance(error, FileExistsError) else error.errno or 0
        raise ConfigError(
            f"{run_dir}: the run folder cannot be written ({os.strerror(number)}); "
            "choose another with --run-dir or change its permissions"
        ) from None


def check_same_run(
    before: Mapping[str, Mapping[str, Any]],
    asked: Config,
    where: Path,
    *,
    remedy: str = "continue it with its own settings, or choose a new folder, where --from may start "
    "another run from its weights",
) -> None:
    """Refuses a configuration that computes something else.

    Args:
        before: the configuration of what exists, as JSON values.
        where: what exists.

    Raises:
        ConfigError: they differ in a key that a continued run may not change; with `remedy`.
    """
    if found := _differences(before, asked):
        raise ConfigError(f"{where}: holds another run ({found}); {remedy}")


def check_branch(
    before: Mapping[str, Mapping[str, Any]], asked: Config, name: str, *, trunk: Path
) -> None:
    """Refuses a branch that changes more than a continued run may, and the numbers of `optim`.

    Args:
        before: the trunk's configuration, as JSON values.
        asked: the branch's.
        name: what the user calls the branch.
        trunk: the checkpoint that it goes on from.

    Raises:
        ConfigError: they differ in another key.
    """
    # what has a momentum, and what AdamW's moments
    routers = before["optim"].get("muon", {}).get("routers", False)
    muon = asked.optim.muon.model_dump(mode="json") | {"routers": routers}
    kept = {"kind": before["optim"].get("kind", "adamw"), "muon": muon}
    if found := _differences({**before, "optim": kept}, asked):
        raise ConfigError(
            f"{name}: a branch goes on with its trunk's model, data and optimizer, and here differ "
            f"{found}; leave them as they are there, or start a new run from the weights alone: "
            f"--from {trunk}"
        )


def settings_of(checkpoint: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a run that goes on from a checkpoint must keep; the loader compares the data."""
    config = checkpoint_config(checkpoint, meta)  # with the keys of today
    settings = config.model_dump(mode="json") | {"data": {}, "prepare": {}}
    # imported weights have no settings yet
    return settings if meta["progress"]["step"] else {"model": settings["model"]}


def _differences(before: Mapping[str, Mapping[str, Any]], asked: Config) -> str:
    """Lists the keys that a continued run may not change and that differ; "" if there are none."""
    differences, now = [], asked.model_dump(mode="json")
    for section, values in before.items():
        for key, value in values.items():
            name = f"{section}.{key}"
            is_of_data = section in ("data", "prepare") and asked.data.override_position
            if not (_may_change(section, key) or is_of_data):
                differences += _differing(name, value, now[section].get(key, value))
    return some_of(differences, between="; ", most=500) if differences else ""


def _may_change(section: str, key: str) -> bool:
    """Returns whether a key, or its whole section, is marked as one that a continued run may change."""
    field = Config.model_fields[section]
    own = type(field.default).model_fields.get(key)
    return MAY_CHANGE in field.metadata or (own is not None and MAY_CHANGE in own.metadata)


def _differing(name: str, before: Any, now: Any) -> Iterator[str]:
    """Yields what differs in a key, or in each key of a section."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before | now:
            yield from _differing(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{name}: the run has {before!r:.80}, now {now!r:.80}"


def config_of(checkpoint: Path) -> Config:
    """Returns the configuration of a checkpoint's run; outside of a run, the checkpoint's own."""
    file = run_and_step(checkpoint)[0] / "config.json"
    if file.exists():
        return Config.load(file)
    return checkpoint_config(checkpoint, read_meta(checkpoint).meta)


def checkpoint_config(checkpoint: Path, meta: Mapping[str, Any]) -> Config:
    """Returns the configuration in a checkpoint's own meta."""
    if not {"config", "progress"} <= meta.keys():
        raise CheckpointError(f"{checkpoint}: lacks configuration or progress, so no run wrote it")
    distrust(meta["config"], checkpoint)
    origin, values = f"{checkpoint}/meta.json", meta["config"]
    # Nobody can edit a checkpoint: of the keys that are gone, only the model's can refuse it.
    if gone := [problem for problem in drop_removed(values) if problem.startswith("  model.")]:
        raise ConfigError(f"{origin}: the configuration is not valid\n" + "\n".join(gone))
    return validated(Config, values, origin=origin)
