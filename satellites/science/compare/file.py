"""Reads the file of a comparison: TOML with its arms, what is equal among them, and the seeds.

    name = "example"
    baseline = "dense"
    match = "parameters"

    [common.train]
    global_batch = 32

    [arms.dense]
    recipe = "dense"

    [arms.moeut]
    recipe = "moeut"
    scaled = "model.feed_forward.num_experts"
    model.feed_forward.router.top_k = 4

An arm is written like a run's own TOML file: a recipe and its changes, section by section.
satellites/science/docs/compare.md lists every key.

A sweep is the same in one line: a recipe with several values of its keys, one arm for each.
"""

import difflib
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

import moebius

from .statistics import Side

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
SECTIONS = ("model", "data", "prepare", "mesh", "kernels", "optim", "train", "checkpoint", "job")
Match = Literal["parameters", "flops", "none"]


class CompareError(ValueError):
    """Reports why a comparison is not possible: what is wrong, the values, and what to do."""


class Published(BaseModel):
    """Holds a paper's figures for an arm, to show beside ours."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    difference: float | None = None  # of the loss to the baseline's, nats per token
    time: float | None = Field(default=None, gt=0)  # of a step, ÷ the baseline's


class Sections(BaseModel):
    """Holds sections of a configuration as plain values, checked when an arm is built."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    prepare: dict[str, Any] = {}
    mesh: dict[str, Any] = {}
    kernels: dict[str, Any] = {}
    optim: dict[str, Any] = {}
    train: dict[str, Any] = {}
    checkpoint: dict[str, Any] = {}
    job: dict[str, Any] = {}

    def changes(self) -> dict[str, Any]:
        """Returns the given sections."""
        return {name: getattr(self, name) for name in SECTIONS if name in self.model_fields_set}


class ArmEntry(Sections):
    """Describes one arm: a recipe, its changes, and the field scaled until it matches."""

    recipe: str
    label: str = Field(default="", max_length=60)  # in tables and pictures; default: its name
    scaled: str | None = None  # the whole-number field; default: the file's
    multiple: PositiveInt | None = None  # of which its value is; default: the file's
    published: Published = Published()


class ClaimEntry(BaseModel):
    """States a claim about the difference of two arms' final losses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    says: str = Field(min_length=1)
    arm: str
    against: str | None = None  # default: the baseline
    side: Side = "below"
    bound: float = 0.0  # of arm − against, nats per token
    source: str = ""  # who says so, with their figure


class ComparisonFile(BaseModel):
    """Holds the whole file of a comparison."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME)
    question: str = ""
    baseline: str
    seeds: tuple[NonNegativeInt, ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    match: Match = "parameters"
    target: PositiveInt | None = None  # parameters, or training FLOPs; default: the baseline's
    tolerance: float = Field(default=0.01, ge=0, lt=1)
    scaled: str | None = None
    multiple: PositiveInt = 1
    steps: PositiveInt | None = None  # default: those of the recipes
    warmup: float = Field(default=0.05, ge=0, lt=1)  # share of `steps`
    evaluations: PositiveInt = 20  # over `steps`
    jobs: PositiveInt = 1  # runs at a time
    threads: PositiveInt = 1  # of every rank
    tasks: tuple[str, ...] = ()  # of `moebius eval`, scored at the end of every run
    task_data: str = ""
    task_limit: PositiveInt | None = None
    common: Sections = Sections()
    arms: dict[str, ArmEntry] = Field(min_length=1)
    claims: tuple[ClaimEntry, ...] = ()

    @field_validator("arms")
    @classmethod
    def _check_names(cls, arms: dict[str, ArmEntry]) -> dict[str, ArmEntry]:
        for name in arms:
            if not re.fullmatch(NAME, name):
                raise ValueError(
                    f"arm name {name!r}: names are folders, so they have only letters, digits, "
                    "'_', '.' and '-'; `label` is free text"
                )
        return arms

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={list(self.seeds)}: give each seed once")
        named = [("baseline", self.baseline)]
        for claim in self.claims:
            named += [("claims.arm", claim.arm), ("claims.against", claim.against or self.baseline)]
        for key, arm in named:
            if arm not in self.arms:
                raise ValueError(f"{key}={arm!r} is not one of the arms: {', '.join(self.arms)}")
        if self.tasks and not self.task_data:
            raise ValueError(
                f"tasks={list(self.tasks)} need task_data: the folder of their files, or hub"
            )
        return self


def read_file(path: Path) -> ComparisonFile:
    """Reads and checks the file of a comparison.

    Raises:
        CompareError: the file cannot be read, is not TOML, or has unknown keys or invalid values.
    """
    try:
        values = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        hint = (
            "" if path.suffix else "; to compare values of a recipe, give --sweep section.key=A,B,…"
        )
        raise CompareError(f"{path}: cannot be read ({error.strerror}){hint}") from None
    except (ValueError, RecursionError) as error:
        raise CompareError(f"{path}: is not valid TOML: {error}") from None
    try:
        return ComparisonFile.model_validate(values)
    except ValidationError as error:
        problems = [_explain(entry) for entry in error.errors()]
    raise CompareError("\n".join([f"{path}: is not a valid comparison", *problems]))


def _explain(entry: Any) -> str:
    """Formats one of pydantic's errors."""
    where = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        key = str(entry["loc"][-1])
        known = _known_beside(entry["loc"])
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"  {where}: unknown key{hint} (keys here: {', '.join(known)})"
    message = str(entry["msg"]).removeprefix("Value error, ")
    given = "" if isinstance(entry["input"], dict) or not where else f" (given: {entry['input']!r})"
    return f"  {where}: {message}{given}" if where else f"  {message}"


def _known_beside(loc: Sequence[int | str]) -> list[str]:
    """Returns the known keys at the place of an unknown one."""
    kinds: dict[tuple[str, int], type[BaseModel]] = {
        ("common", 2): Sections,
        ("arms", 3): ArmEntry,
        ("arms", 4): Published,
        ("claims", 3): ClaimEntry,
    }
    return list(kinds.get((str(loc[0]), len(loc)), ComparisonFile).model_fields)


# A sweep ------------------------------------------------------------------------------------------


def sweep_file(recipe: str, sweeps: Sequence[str], overrides: Sequence[str]) -> ComparisonFile:
    """Returns the comparison of all combinations of values; its arms differ in nothing else.

    The baseline is the arm with the recipe's own values, otherwise the first one.

    Args:
        recipe: the name of a recipe, a TOML file, or `module:function`.
        sweeps: `section.key=value,value,…` with TOML values; several give all combinations.
        overrides: `section.key=value` for all arms; no sweep can use the same key.

    Raises:
        CompareError: a sweep is malformed, or repeats a key or a value.
        ConfigError: the recipe has no such key.
    """
    values = dict(_read(sweep) for sweep in sweeps)
    if len(values) < len(sweeps):
        raise CompareError(f"--sweep {' --sweep '.join(sweeps)}: give each key once")
    for override in overrides:
        if (key := override.partition("=")[0].strip()) in values:
            raise CompareError(f"{override}: {key} is also swept; remove one of the two")
    own = moebius.recipe(recipe, *overrides).model_dump(mode="json")
    arms = {}
    baseline = ""
    for chosen in itertools.product(*values.values()):
        of_arm = dict(zip(values, chosen, strict=True))
        words = [f"{key.rpartition('.')[2]}={value}" for key, value in of_arm.items()]
        name = "-".join(re.sub(r"[^\w.-]+", "_", word, flags=re.ASCII) for word in words)[:64]
        if name in arms:
            raise CompareError(f"--sweep: {', '.join(words)} is given twice")
        arms[name] = {"recipe": recipe, "label": ", ".join(words)[:60], **_nested(of_arm)}
        if all(value_at(own, key) == value for key, value in of_arm.items()):
            baseline = name
    keys = "-".join(key.rpartition(".")[2] for key in values)
    of_recipe = re.sub(r"[^\w.-]+", "_", PurePath(recipe).stem, flags=re.ASCII)
    return ComparisonFile.model_validate(
        {
            "name": f"{of_recipe}-{keys}"[:64],
            "question": f"What does {' with '.join(values)} do to {recipe}?",
            "baseline": baseline or next(iter(arms)),
            "match": "none",
            "seeds": (0,),
            "arms": arms,
        }
    )


def _read(sweep: str) -> tuple[str, list[Any]]:
    """Parses `section.key=value,value,…`."""
    key, _, text = (part.strip() for part in sweep.partition("="))
    section, _, rest = key.partition(".")
    if section not in SECTIONS or not rest or not text:
        raise CompareError(
            f"--sweep {sweep}: write section.key=value,value,…, such as "
            "optim.learning_rate=1e-4,3e-4,1e-3"
        )
    try:
        values = tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:  # words without quotation marks
        values = [word.strip() for word in text.split(",")]
    return key, values


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Returns values by dotted keys as nested sections."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return found


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """Returns a configuration's value under a dotted key, or None."""
    found: Any = values
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found
