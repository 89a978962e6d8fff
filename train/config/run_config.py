"""A run, fully described: the sections that live beside their code, joined and checked against each
other.

A run is named by a recipe (train/recipes/smoke.py) or a TOML file and changed with dotted
overrides: `moebius train smoke model.feed_forward.num_experts=64 mesh.ep=2`. The resolved form is written into
the run folder as config.json.
"""

import difflib
import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from ...data_pipeline.data_config import DataConfig
from ...data_pipeline.prepare_config import (
    DecontaminateConfig,
    FilterConfig,
    LanguageConfig,
    NearDuplicateConfig,
)
from ...distributed.checkpoint.checkpoint_config import CheckpointConfig
from ...distributed.layout import (
    MeshConfig,
    check_experts,
    check_runnable,
    legal_values,
    plan_layout,
)
from ...kernels.backend import KernelConfig
from ...model.config.model_config import SECTIONS, HaltingConfig, ModelConfig
from ...model.config.sections import kinds_first, merge, set_value
from ...model.execution.precision import Precision
from ...model.execution.recompute import Recompute
from ..optim import OptimConfig
from ..record.redaction import secret_places
from .errors import ConfigError
from .job_config import JobConfig
from .metrics_config import MetricsConfig
from .spike_config import SpikeConfig
from .start_when import StartWhen
from .values import unusable_values

# What a key of the model was called before its configuration had sections.
_RENAMED = {
    "model.group_size": "model.layers_per_group",
    "model.num_heads": "model.attention.num_heads",
    "model.d_head": "model.attention.d_head",
    "model.num_attention_experts": "model.attention.num_experts",
    "model.attention_top_k": "model.attention.top_k",
    "model.attention_sampled": "model.attention.sampled",
    "model.attention_balance": "model.attention.balance",
    "model.max_distance": "model.attention.max_distance",
    "model.single_expert": "model.attention.single_expert",
    "model.positions": "model.attention.positions.kind",
    "model.max_positions": "model.attention.positions.max_positions",
    "model.rotary_width": "model.attention.positions.width",
    "model.rotary_base": "model.attention.positions.base",
    "model.placement": "model.feed_forward.sparse_layers",
    "model.router": "model.feed_forward.router",
    "model.top_k": "model.feed_forward.router.top_k",
    "model.feed_forward_balance": "model.feed_forward.router.balance",
    "model.num_experts": "model.feed_forward.num_experts",
    "model.d_expert": "model.feed_forward.d_expert",
    "model.activation": "model.feed_forward.activation",
    "model.expert_bias": "model.feed_forward.expert_bias",
    "model.sub_tokens": "model.feed_forward.sub_tokens",
    "model.sub_token_residual": "model.feed_forward.sub_token_residual",
    "model.num_shared_experts": "model.feed_forward.num_shared_experts",
    "model.shared_sum": "model.feed_forward.shared_sum",
    "model.output_norm": "model.feed_forward.output_norm",
    "model.d_feed_forward": "model.feed_forward.d_feed_forward",
    "model.dense_bias": "model.feed_forward.dense_bias",
    "model.allow_future_leak": "model.feed_forward.allow_future_leak",
    "model.init_scale": "model.initialisation.scale",
    "model.expert_axis_norm": "model.initialisation.expert_axis_norm",
}
# The sections that come in kinds, by their whole path.
_SECTIONS_OF_DATA: dict[str, type[BaseModel]] = {
    "filters": FilterConfig,
    "language": LanguageConfig,
    "decontaminate": DecontaminateConfig,
    "near_duplicates": NearDuplicateConfig,
}
_SECTIONS_OF_TRAIN: dict[str, type[BaseModel]] = {
    "start_when": StartWhen,
    "spikes": SpikeConfig,
    "metrics": MetricsConfig,
}
Model = TypeVar("Model", bound=BaseModel)
_SECTIONS = {f"model.{path}": section for path, section in SECTIONS.items()}


class TrainConfig(BaseModel):
    """Configures how long to train, on how much at a time, and how exactly."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: PositiveInt = 1000
    global_batch: PositiveInt = 16  # sequences per optimizer step, over all ranks
    micro_batch: PositiveInt = 4  # sequences per forward pass of one rank
    # "bfloat16": of the matrix products; model/execution/precision.py says what stays float32.
    # "bfloat16_only": of everything that is stored, routers and AdamW's moments included.
    precision: Precision = "float32"
    # Activations of every depth step that are made again in the backward pass instead of being kept
    # (model/execution/recompute.py).
    recompute: Recompute = "none"
    compile: bool = False  # the dense parts, with torch.compile (model/execution/compiled.py)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    log_every: PositiveInt = 1
    eval_every: NonNegativeInt = 0  # 0: at the start and at the end only
    eval_rows: NonNegativeInt = 0  # at most so many validation rows; 0: all of them
    # validation rows per forward pass of one rank; None: `micro_batch`. Without gradients more fit.
    eval_batch: PositiveInt | None = None
    # Balancing losses over a sequence are taken over its documents instead (model/documents.py);
    # the data must say which they are.
    balance_documents: bool = False
    # the first and every n-th step's routes go into the run folder; 0: none
    record_routing: NonNegativeInt = 0
    threads: int = Field(default=1, ge=0, le=4096)  # of one rank's CPU work; 0: torch's default
    # `train` and `submit` begin with so much data sealed, and prepare the rest beside the ranks;
    # none: all of it is prepared first
    start_when: StartWhen | None = None
    timeout_s: float = Field(default=600.0, gt=0)  # of a collective
    spikes: SpikeConfig = SpikeConfig()  # what is done about spikes of the loss
    metrics: MetricsConfig = MetricsConfig()  # where they are written


class Config(BaseModel):
    """Describes one run. It is immutable; every cross-section rule is checked on construction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    kernels: KernelConfig = KernelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    job: JobConfig = JobConfig()

    @property
    def world_size(self) -> int:
        """Returns the number of ranks of the run as the job places it."""
        return self.job.num_nodes * self.job.ranks_per_node

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        if self.model.vocab_size < self.data.num_token_ids:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} is smaller than the "
                f"{self.data.num_token_ids} token ids of "
                f"data.tokenizer={self.data.tokenizer!r} (data.vocab_size={self.data.vocab_size}): "
                "make them equal"
            )
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        learned = self.model.attention.max_positions
        if learned is not None and self.data.seq_len > learned:
            raise ValueError(
                f"data.seq_len={self.data.seq_len} is more than the "
                f"model.attention.positions.max_positions={learned} positions that are learned: "
                "make them equal"
            )
        return self

    @model_validator(mode="after")
    def _check_spikes(self) -> Self:
        self.train.spikes.check_checkpoints(self.checkpoint)
        return self

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        self.train.metrics.check_samples(
            seq_len=self.data.seq_len,
            causal=self.model.evaluation_promises.causal,
            paired=self.data.targets == "paired",
        )
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        experts = self.model.experts
        if experts is not None:
            experts.router.check_length(self.data.seq_len * experts.sub_tokens)
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        """Checks that a micro-batch holds whole groups of consecutive samples."""
        group = self.model.group_sequences
        experts = self.model.experts
        if experts is not None and self.train.micro_batch % group:
            raise ValueError(
                f"train.micro_batch={self.train.micro_batch} is not a multiple of {group}, the "
                f"sequences that model.feed_forward.router.kind={experts.router.kind!r} routes "
                f"together: use {-(-self.train.micro_batch // group) * group}"
            )
        return self

    @model_validator(mode="after")
    def _check_documents(self) -> Self:
        """Checks that batches will say which documents they have, where a loss wants to know."""
        given = self.data.document_attention or self.data.packing == "best_fit"
        if self.train.balance_documents and not given:
            raise ValueError(
                "train.balance_documents=true needs rows that know their documents, which those "
                f"of data.packing={self.data.packing!r} with data.document_attention=false do "
                'not: set data.document_attention=true or data.packing="best_fit"'
            )
        return self

    @model_validator(mode="after")
    def _check_test_sets(self) -> Self:
        """Checks that a test item's score is its own, where items are to be scored."""
        promises = self.model.evaluation_promises
        if self.data.test_sets and not (promises.causal and promises.batch_invariant):
            raise ValueError(
                "data.test_sets with a model whose tokens may see later ones, or other sequences of "
                "their batch: the score of an item would not be its own; leave the test sets out, "
                "or use another router (`moebius models` shows what each promises)"
            )
        return self

    @model_validator(mode="after")
    def _check_bfloat16_only(self) -> Self:
        """Refuses what has not been made to work where nothing is kept in float32."""
        refused = {
            'mesh.sharding="fsdp" (sharded weights are kept in float32): use "none"': (
                self.mesh.sharding == "fsdp"
            ),
            "mesh.rebalance_every (moved experts are float32): set it and mesh.replicas to 0": (
                self.mesh.rebalance_every > 0
            ),
            "model.halting (its probabilities are products over the depth steps)": (
                self.model.halting is not None
            ),
        }
        for what, asked in refused.items():
            if asked and self.train.precision == "bfloat16_only":
                raise ValueError(
                    f'train.precision="bfloat16_only" does not go together with {what}; or use '
                    'train.precision="bfloat16", which keeps weights and decisions in float32'
                )
        return self

    def check_world(self, world_size: int) -> None:
        """Checks everything that depends on the number of ranks.

        Raises:
            ConfigError: the mesh, the experts or the batch do not fit `world_size` ranks.
        """
        check_runnable(self.mesh)
        layout = plan_layout(self.mesh, world_size)
        check_experts(layout, self.model.expert_counts())
        if self.mesh.sharding == "fsdp" and layout.dp_shard == 1 < world_size:
            sizes = legal_values(
                self.mesh.model_copy(update={"dp_replicate": None}), world_size, "dp_shard"
            )[1:]
            raise ConfigError(
                f'mesh.sharding="fsdp" with mesh.dp_shard=1 on {world_size} ranks shards nothing: '
                "set mesh.dp_shard to one of "
                f'{sizes} (mesh.dp_replicate=none fills the world), or use mesh.sharding="none"'
            )
        if self.mesh.rebalance_every and layout.ep == 1:
            sizes = legal_values(self.mesh, world_size, "ep")[1:]
            instead = (
                f", or mesh.ep to one of {sizes}"
                if sizes
                else f" (a world of {world_size} allows no other mesh.ep)"
            )
            raise ConfigError(
                f"mesh.rebalance_every={self.mesh.rebalance_every}, "
                f"mesh.replicas={self.mesh.replicas} with mesh.ep=1: every "
                "rank holds all experts, so none can move and none needs a copy; set both to "
                f"0{instead}"
            )
        per_pass = world_size * self.train.micro_batch
        if self.train.global_batch % per_pass:
            raise ConfigError(
                f"train.global_batch={self.train.global_batch} is not a multiple of {world_size} "
                "ranks × "
                f"train.micro_batch={self.train.micro_batch} = {per_pass}: every rank takes whole "
                "micro-batches; "
                f"use {max(1, self.train.global_batch // per_pass) * per_pass} or change "
                "train.micro_batch"
            )

    def save(self, path: Path) -> None:
        """Writes the resolved configuration as JSON."""
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Config":
        """Reads the configuration that `save` wrote.

        Raises:
            ConfigError: it cannot be read, or is no configuration.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}: is damaged, and no configuration any more ({error}): restore it, or "
                "choose another run folder"
            ) from None
        return build(values, origin=str(path))


def resolve(
    name_or_file: str, overrides: Sequence[str], recipes: Mapping[str, Callable[[], Config]]
) -> Config:
    """Returns the configuration of a recipe or a TOML file, with dotted overrides applied.

    Raises:
        ConfigError: no such recipe or file, or a bad override; unknown keys are answered with the
            nearest known one.
    """
    values = _base_values(name_or_file, recipes)
    return _built_with(values, overrides, origin=name_or_file)


def resolve_changed(
    name_or_file: str,
    changes: Sequence[Mapping[str, Any]],
    overrides: Sequence[str],
    recipes: Mapping[str, Callable[[], Config]],
    *,
    origin: str,
) -> Config:
    """Returns the configuration of a recipe or a TOML file, with sections and then values changed.

    Args:
        name_or_file: as of `resolve`.
        changes: sections of values as a TOML file has them, one after the other.
        overrides: `section.key=value`, which hold against the changes.
        recipes: by name.
        origin: whose configuration it is, for messages.

    Raises:
        ConfigError: as `resolve`.
    """
    values = _base_values(name_or_file, recipes)
    for change in changes:
        values = merge(values, change, _SECTIONS)
        data = change.get("data")
        _choose_input(values, data.keys() if isinstance(data, Mapping) else ())
    return _built_with(values, overrides, origin=origin)


def _base_values(name_or_file: str, recipes: Mapping[str, Callable[[], Config]]) -> dict[str, Any]:
    """Returns the plain values of a recipe or a TOML file."""
    if name_or_file.endswith(".toml"):
        return _read_toml(Path(name_or_file), recipes)
    if name_or_file in recipes:
        return recipes[name_or_file]().model_dump(mode="json")
    raise ConfigError(
        f"there is no recipe {name_or_file!r}{_nearest(name_or_file, recipes)}; recipes: "
        f"{', '.join(recipes)}; "
        "a file must end in .toml"
    )


def _built_with(values: dict[str, Any], overrides: Sequence[str], *, origin: str) -> Config:
    """Builds the configuration of plain values with overrides applied."""
    keys = {override.partition("=")[0].strip() for override in overrides}
    _choose_input(values, {key.removeprefix("data.") for key in keys if key.startswith("data.")})
    for override in sorted(overrides, key=lambda text: kinds_first(text.partition("=")[0])):
        _apply(values, override)
    return build(values, origin=origin)


def resolve_data(
    file: Path | None,
    overrides: Sequence[str],
    recipes: Mapping[str, Callable[[], Config]],
    *,
    options: Mapping[str, Any],
) -> DataConfig:
    """Returns the section `data` alone, of a TOML file or of no file, changed.

    Args:
        file: its other sections are not looked at.
        overrides: `data.key=value`; they go before all else.
        recipes: that the file may begin from.
        options: values of the section that replace the file's.

    Raises:
        ConfigError: the file cannot be read, or the section is not valid.
    """
    section = _read_toml(file, recipes).get("data", {}) if file else {}
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: data = {section!r} is not a section")
    values = {"data": dict(section)}
    keys = {override.partition("=")[0].strip().removeprefix("data.") for override in overrides}
    _choose_input(values, keys | options.keys())
    values["data"] |= options
    for override in overrides:
        if not override.startswith("data."):
            raise ConfigError(
                f"override {override!r}: only the data is made here; write data.key=value, for "
                "example data.filters.min_words=50"
            )
        _apply(values, override)
    return _validated(_DataAlone, values, origin=str(file) if file else "data").data


class _DataAlone(BaseModel):
    """Is a configuration of which only the data matters."""

    data: DataConfig


def build(values: dict[str, Any], *, origin: str) -> Config:
    """Validates plain values; pydantic's report becomes one readable ConfigError."""
    return _validated(Config, values, origin=origin)


def _validated(kind: type[Model], values: Any, *, origin: str) -> Model:
    try:
        built = kind.model_validate(values)
    except ValidationError as error:
        problems = _explain(error)
    else:
        plain = built.model_dump(mode="json")
        problems = [*unusable_values(values, plain), *_secrets(plain)]
        if not problems:
            return built
    raise ConfigError("\n".join([f"{origin}: the configuration is not valid", *problems]))


def _secrets(values: dict[str, Any]) -> list[str]:
    """Spells where secrets stand: a configuration is saved, beside the run and in checkpoints."""
    return [
        f"  {place}: holds what looks like a secret; leave it out, and set the environment "
        "variable from which the library that needs it takes it"
        for place in sorted(set(secret_places(values)))
    ]


def _read_toml(path: Path, recipes: Mapping[str, Callable[[], Config]]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # the TOML, the UTF-8, or a number of 5,000 digits
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(
            f"{path}: is nested too deeply; a configuration has sections in sections, no more"
        ) from None
    base = values.pop("recipe", None)
    if base is None:
        return values
    if not isinstance(base, str) or base not in recipes:
        raise ConfigError(
            f"{path}: recipe = {base!r} is unknown{_nearest(str(base), recipes)}; recipes: "
            f"{', '.join(recipes)}"
        )
    merged = merge(recipes[base]().model_dump(mode="json"), values, _SECTIONS)
    given = values.get("data")
    _choose_input(merged, given.keys() if isinstance(given, dict) else ())
    return merged


def _choose_input(values: dict[str, Any], given: Collection[str]) -> None:
    """Empties what a recipe names as its text where the other of the two ways was given."""
    for chosen, other in (("sources", "input"), ("input", "sources")):
        if chosen in given and other not in given and isinstance(values.get("data"), dict):
            values["data"].pop(other, None)


def _apply(values: dict[str, Any], override: str) -> None:
    """Applies one `section.key=value`; the value is read as TOML, or else as plain text.

    Sections may lie in each other: `model.feed_forward.router.top_k=2`. Another `kind` drops the
    keys of the old one, but for those that mean the same in both (`Section.kept`).
    """
    path, equals, text = override.partition("=")
    *sections, key = path.split(".")
    if not equals or not sections or not all((*sections, key)):
        raise ConfigError(
            f"override {override!r}: write section.key=value, for example train.steps=200"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = None if text == "none" and path not in _keys_with_the_word_none() else text
    except RecursionError:
        raise ConfigError(f"override {path}=…: the value is nested too deeply") from None
    except ValueError as error:  # a number of 5,000 digits
        raise ConfigError(f"override {path}=…: {error}") from None
    try:
        set_value(values, path, value, _SECTIONS)
    except ValueError as error:
        raise ConfigError(f"override {override!r}: {error}") from None


def _explain(error: ValidationError) -> list[str]:
    return [_explain_one(entry) for entry in error.errors()]


def _explain_one(entry: Any) -> str:
    where = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        if where in _RENAMED:
            return f"  {where}: unknown key; it is now {_RENAMED[where]}"
        return f"  {where}: unknown key{_nearest(where, [*_known_keys(), *_RENAMED])}"
    message = str(entry["msg"]).removeprefix("Value error, ")
    given = "" if isinstance(entry["input"], dict) or not where else f" (given: {entry['input']!r})"
    return f"  {where}: {message}{given}" if where else f"  {message}"


def _known_fields() -> Iterator[tuple[str, Any]]:
    """Yields every key that a configuration can have, and its annotation."""
    for section, field in Config.model_fields.items():
        yield section, field.annotation
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for name, entry in field.annotation.model_fields.items():
                yield f"{section}.{name}", entry.annotation
    for path, section in _SECTIONS.items():
        yield f"{path}.kind", Literal[tuple(section.classes)]
        for kind in section.classes:
            for name, annotation in section.fields(kind).items():
                yield f"{path}.{name}", annotation
    for name, entry in HaltingConfig.model_fields.items():
        yield f"model.halting.{name}", entry.annotation
    for section, model in _SECTIONS_OF_TRAIN.items():
        for name, entry in model.model_fields.items():
            yield f"train.{section}.{name}", entry.annotation
    for section, kind in _SECTIONS_OF_DATA.items():
        for name, entry in kind.model_fields.items():
            yield f"data.{section}.{name}", entry.annotation


def _known_keys() -> list[str]:
    return [key for key, _ in _known_fields()]


def _keys_with_the_word_none() -> set[str]:
    """Returns the keys for which "none" is one of the choices and not the absence of a value."""
    return {key for key, annotation in _known_fields() if "none" in get_args(annotation)}


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {_RENAMED.get(close[0], close[0])}?" if close else ""
