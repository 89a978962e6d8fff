"""Plans the runs of a comparison from its file: arms of equal size, each with every seed.

Arms differ only as the file says. Data, its order, tokens and seeds are the same, which is checked.
Each run has its own folder (FOLDER/ARM/seed-N), an ordinary run folder that all other commands can
read.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import moebius

from .file import ArmEntry, CompareError, ComparisonFile, value_at
from .sizes import fit, matched_size

_OF_THE_SEED = ("data.seed", "train.seed")
_SHOWN_DIFFERENCES = 6


@dataclass(frozen=True)
class Arm:
    """Describes one arm as it will be trained, except for the seed."""

    name: str
    label: str
    config: moebius.Config
    size: moebius.Size
    scaled: str | None = None  # the field that was changed until the arm matched
    value: int | None = None  # and its value
    deviation: float = 0.0  # of what is equal, from the target


@dataclass(frozen=True)
class PlannedRun:
    """Describes one arm with one seed, and its folder."""

    arm: str
    seed: int
    config: moebius.Config
    folder: Path

    @property
    def name(self) -> str:
        """Returns the run's name in messages."""
        return f"{self.arm}, seed {self.seed}"


def plan_arms(file: ComparisonFile, overrides: Sequence[str], *, origin: str) -> list[Arm]:
    """Builds all arms and scales them until they match.

    Args:
        file: the comparison.
        overrides: `section.key=value` for every arm; they override the file.
        origin: the file's name, for messages.

    Raises:
        CompareError: an arm cannot match, or the arms differ in what must be the same.
        ConfigError: an arm is not a valid configuration.
    """
    _check_overrides(file, overrides)
    builds = {
        name: partial(_build, file, name, entry, tuple(overrides), origin)
        for name, entry in file.arms.items()
    }
    target = float(file.target) if file.target else None
    if target is None and file.match != "none":
        target = matched_size(builds[file.baseline](None), file.match)
    arms = [
        _matched(file, name, entry, builds[name], target, origin)
        for name, entry in file.arms.items()
    ]
    _check_same(file, arms, origin)
    return arms


def plan_runs(file: ComparisonFile, arms: Sequence[Arm], folder: Path) -> list[PlannedRun]:
    """Returns every arm with every seed, seed by seed, so that early results are paired."""
    return [
        PlannedRun(arm.name, seed, with_seed(arm.config, seed), folder / arm.name / f"seed-{seed}")
        for seed in file.seeds
        for arm in arms
    ]


def with_seed(config: moebius.Config, seed: int) -> moebius.Config:
    """Returns the run with the seed that draws its weights and the order of its data."""
    return changed(config, data={"seed": seed}, train={"seed": seed})


def with_data(runs: Sequence[PlannedRun], directory: str) -> list[PlannedRun]:
    """Returns the runs with their shared folder of prepared data."""
    return [replace(run, config=changed(run.config, data={"directory": directory})) for run in runs]


def changed(config: moebius.Config, **sections: Mapping[str, Any]) -> moebius.Config:
    """Returns a configuration with single values of its sections changed."""
    updates = {
        name: getattr(config, name).model_copy(update=dict(values))
        for name, values in sections.items()
    }
    return config.model_copy(update=updates)


def _check_overrides(file: ComparisonFile, overrides: Sequence[str]) -> None:
    keys = {override.partition("=")[0].strip() for override in overrides}
    if file.steps and (said := _lengths(keys)):
        raise CompareError(
            f"the file has steps = {file.steps}, from which warm-up, decay and evaluations follow: "
            f"give --steps N instead of {said[0]}"
        )
    if seeds := sorted(keys.intersection(_OF_THE_SEED)):
        raise CompareError(f"{seeds[0]} is set for each run: give --seeds N,N,… instead")


def _build(
    file: ComparisonFile,
    name: str,
    entry: ArmEntry,
    overrides: tuple[str, ...],
    origin: str,
    value: int | None,
) -> moebius.Config:
    """Builds one arm with a value of its scaled field."""
    scaled = entry.scaled or file.scaled
    steps = file.steps
    given = list(overrides)
    if value is not None and scaled == "train.steps" and steps:
        steps = value
    elif value is not None:
        given.append(f"{scaled}={value}")
    texts = [*_schedule(file, entry, steps), f"train.threads={file.threads}", *given]
    sections = merged(file.common.changes(), entry.changes())
    try:
        config = moebius.recipe(entry.recipe, *texts, **sections)
    except moebius.ConfigError as error:
        raise moebius.ConfigError(f"{origin}, arm {name}: {error}") from None
    if config.train.epochs is not None:
        raise CompareError(
            f"{origin}, arm {name}: give train.steps or train.tokens, not train.epochs"
        )
    # One machine does the work of all nodes: as many ranks, in the same mesh, so the same losses.
    ranks = config.world_size
    config.check_world(ranks)
    job = {"name": f"{file.name}-{name}"[:100], "rehearse_failure_at_step": None}
    return changed(config, job=job | {"num_nodes": 1, "ranks_per_node": ranks})


def _lengths(keys: Collection[str]) -> list[str]:
    """Returns the keys that say how long a run is."""
    return [key for key in ("train.steps", "train.tokens", "train.epochs") if key in keys]


def merged(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested values overlaid with others."""
    found = dict(before)
    for key, value in now.items():
        known = found.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            value = merged(known, value)
        found[key] = value
    return found


def _schedule(file: ComparisonFile, entry: ArmEntry, steps: int | None) -> list[str]:
    """Returns what follows from the number of steps: warm-up, decay and evaluations, unless the
    file sets it.

    Raises:
        CompareError: the file has two numbers of steps.
    """
    if steps is None:
        return []
    said = {
        f"{section}.{key}"
        for changes in (file.common.changes(), entry.changes())
        for section in ("train", "optim")
        for key in changes.get(section, {})
    }
    if lengths := _lengths(said):
        raise CompareError(
            f"{file.name}: steps = {steps} and a {lengths[0]} of its own; remove one of them"
        )
    follows = {
        "train.steps": steps,
        "optim.warmup_steps": round(file.warmup * steps),
        "optim.decay_steps": "auto",
        "train.eval_every": max(1, steps // file.evaluations),
    }
    return [f"{key}={value}" for key, value in follows.items() if key not in said]


def _matched(
    file: ComparisonFile,
    name: str,
    entry: ArmEntry,
    build: Callable[[int | None], moebius.Config],
    target: float | None,
    origin: str,
) -> Arm:
    """Returns an arm with the value of its scaled field that comes closest to the target.

    Raises:
        CompareError: it is not close enough, or there is no field to scale.
    """
    config, scaled, value = build(None), entry.scaled or file.scaled, None
    label = entry.label or name
    if target is None:
        return Arm(name, label, config, moebius.size_of(config))
    where = f"{origin}, arm {name}"
    multiple = entry.multiple or file.multiple
    is_reference = name == file.baseline and file.target is None
    if scaled is not None and not is_reference:
        start = value_at(config.model_dump(), scaled)
        if isinstance(start, bool) or not isinstance(start, int):
            raise CompareError(
                f"{where}: scaled = {scaled!r} is {start!r} in this arm, but must be a whole "
                "number, such as model.feed_forward.num_experts or model.feed_forward.d_expert"
            )
        try:
            value = fit(build, start, match=file.match, target=target, multiple=multiple)
        except CompareError as error:
            raise CompareError(f"{where}: scaled = {scaled!r}: {error}") from None
        config = build(value)
    size = matched_size(config, file.match)
    deviation = size / target - 1
    if abs(deviation) > file.tolerance:
        what = "parameters" if file.match == "parameters" else "FLOPs of training"
        miss = f"{size:,.0f} {what}, and the target is {target:,.0f} ± {file.tolerance:.2%}"
        advice = _advice(scaled, value, deviation, multiple)
        raise CompareError(f"{where}: has {miss}; {advice}")
    return Arm(
        name, label, config, moebius.size_of(config), scaled if value else None, value, deviation
    )


def _advice(scaled: str | None, value: int | None, deviation: float, multiple: int) -> str:
    """Returns advice for an arm that does not match."""
    if value is None:
        return (
            f"({deviation:+.2%}); name the whole-number field to scale: scaled = "
            '"model.feed_forward.num_experts"'
        )
    coarse = f" in multiples of {multiple}" if multiple > 1 else ""
    return (
        f"{scaled} = {value} comes nearest{coarse} ({deviation:+.2%}): scale a finer field "
        "(model.feed_forward.d_expert, …) or raise tolerance"
    )


def _check_same(file: ComparisonFile, arms: Sequence[Arm], origin: str) -> None:
    """Checks that all arms read the same data, and the same number of tokens."""
    first, *others = arms
    for other in others:
        differences = [
            f"  {key}: {first.name} has {ours}, {other.name} {theirs}"
            for key, ours, theirs in _read_differently(file, first, other)
        ]
        if differences:
            raise CompareError(
                "\n".join(
                    [
                        f"{origin}: the arms {first.name} and {other.name} do not train on the "
                        "same data; put what they share under [common]",
                        *differences[:_SHOWN_DIFFERENCES],
                    ]
                )
            )


def _read_differently(file: ComparisonFile, first: Arm, other: Arm) -> list[tuple[str, str, str]]:
    found = [
        (f"{section}.{key}", repr(ours), repr(theirs))
        for section in ("data", "prepare")
        for key, ours, theirs in _different(
            _plain(first.config, section), _plain(other.config, section)
        )
    ]
    ours, theirs = first.config.train.global_batch, other.config.train.global_batch
    if ours != theirs:
        found.append(("train.global_batch", str(ours), str(theirs)))
    ours, theirs = first.size.tokens, other.size.tokens
    if ours != theirs and file.match == "parameters":
        found.append(("tokens (train.steps, or steps for all)", f"{ours:,}", f"{theirs:,}"))
    return found


def _plain(config: moebius.Config, section: str) -> dict[str, Any]:
    return getattr(config, section).model_dump(mode="json")


def _different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, value, theirs[key]) for key, value in ours.items() if value != theirs[key]]


# What is in the folder already -------------------------------------------------------------------

_HARMLESS = ("job", "checkpoint")  # sections: where a run is and what it keeps
_HARMLESS_KEYS = (
    *("data.directory", "train.threads", "train.timeout_s", "train.steps", "train.tokens"),
    *("train.eval_every", "train.log_every"),  # change no weight
)


def stale_runs(runs: Sequence[PlannedRun]) -> dict[str, list[str]]:
    """Returns what has changed since runs were started, by arm; empty if everything fits.

    More steps are not a change, because such a run continues; fewer than it has made are. The
    frequency of evaluations is not a change either: curves are drawn at steps common to all seeds
    of an arm.
    """
    found: dict[str, list[str]] = {}
    for run in runs:
        saved = run.folder / "config.json"
        if not saved.is_file():
            continue
        try:
            changes = _changes(moebius.Config.load(saved), run.config)
        except moebius.ConfigError as error:
            changes = [str(error)]
        if changes:
            found.setdefault(run.arm, []).extend(changes)
    return found


def _changes(before: moebius.Config, now: moebius.Config) -> list[str]:
    changes = []
    saved, asked = before.model_dump(mode="json"), now.model_dump(mode="json")
    for values, config in ((saved, before), (asked, now)):  # the same lengths, however written
        schedule = asdict(config.optim.over(config.train.steps))
        values["optim"] |= {key: schedule[key] for key in ("warmup_steps", "decay_steps")}
    for section, values in saved.items():
        for key, value, new in _different(values, asked[section]):
            name = f"{section}.{key}"
            if section not in _HARMLESS and name not in _HARMLESS_KEYS:
                changes.append(f"{name}: {_short(value)} → {_short(new)}")
    if now.train.steps < before.train.steps:
        changes.append(f"train.steps: {before.train.steps} → {now.train.steps}")
    return changes


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


_REMEDY = "restore the file, or train these arms again with --restart {arms}"


def refuse_stale(runs: Sequence[PlannedRun], folder: Path, *, remedy: str = _REMEDY) -> None:
    """Refuses to continue if the file has changed since runs were started.

    `remedy` is an alternative to another folder; `{arms}` stands for the arms.

    Raises:
        CompareError: names the arms, the changes, and what to do.
    """
    stale = stale_runs(runs)
    if not stale:
        return
    advice = remedy.format(arms=",".join(stale))
    lines = [
        f"  {arm}: " + "; ".join(list(dict.fromkeys(changes))[:_SHOWN_DIFFERENCES])
        for arm, changes in stale.items()
    ]
    raise CompareError(
        "\n".join(
            [
                f"{folder}: holds runs of other settings; take another folder (--folder DIR), {advice}",
                *lines,
            ]
        )
    )
