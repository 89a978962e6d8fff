"""A complete run configuration: the sections, joined and checked against each other.

A run is a recipe (train/recipes/smoke.py) or a TOML file plus dotted overrides: `moebius train
smoke model.feed_forward.num_experts=64 mesh.ep=2`. The run folder's config.json has the resolved
form.
"""

import json
from collections.abc import Collection, Mapping
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from ...data_pipeline.data_config import MAY_CHANGE, DataConfig
from ...data_pipeline.files import fault, read_regular
from ...data_pipeline.prepare_config import PrepareConfig
from ...data_pipeline.words import runs_near, some_of
from ...distributed.checkpoint.checkpoint_folder import CheckpointConfig
from ...distributed.dispatch.table import DISPATCHER
from ...distributed.layout import (
    MeshConfig,
    check_experts,
    legal_values,
    one_of,
    plan_layout,
)
from ...kernels.backend import KernelConfig
from ...kernels.reference import ACTIVATION
from ...model.balance import BALANCE
from ...model.config.model_config import ModelConfig
from ...model.execution.depth_losses import weighted_losses
from ...model.layers import NORM
from ...plugins import a_kind, distrust
from ..optim import OPTIMIZER, OptimConfig
from .arguments import checked
from .errors import ConfigError
from .job_config import JobConfig
from .schedule import SCHEDULE
from .train_config import EvaluateConfig, TrainConfig
from .validation import check_keys, validated


class Config(BaseModel):
    """Describes one run; immutable, with all cross-section checks on construction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    prepare: PrepareConfig = PrepareConfig()
    mesh: Annotated[MeshConfig, MAY_CHANGE] = MeshConfig()
    kernels: Annotated[KernelConfig, MAY_CHANGE] = KernelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    evaluate: Annotated[EvaluateConfig, MAY_CHANGE] = EvaluateConfig()
    checkpoint: Annotated[CheckpointConfig, MAY_CHANGE] = CheckpointConfig()
    job: Annotated[JobConfig, MAY_CHANGE] = JobConfig()

    @cached_property
    def names_text(self) -> bool:
        """Returns whether a user has just named the text, so that prepared data must be of it."""
        return False

    def naming_text(self) -> Self:
        """Returns an equal configuration whose `names_text` is true; it is not saved."""
        marked = self.model_copy()
        object.__setattr__(marked, "names_text", True)
        return marked

    @property
    def world_size(self) -> int:
        """Returns the run's number of ranks, as the job places it."""
        return self.job.num_nodes * self.job.ranks_per_node

    @field_validator("train")
    @classmethod
    def _count_tokens(cls, train: TrainConfig, info: ValidationInfo) -> TrainConfig:
        """Sets train.steps from train.tokens."""
        data = info.data.get("data")
        if train.tokens is None or data is None:  # invalid, which is reported
            return train
        per_step = train.global_batch * data.seq_len
        steps = -(-train.tokens // per_step)
        if "steps" in train.model_fields_set and train.steps != steps:
            raise ValueError(
                f"train.tokens={train.tokens} in steps of {per_step} tokens are {steps} steps, and "
                f"train.steps={train.steps}: give one of the two"
            )
        return train.model_copy(update={"steps": steps})

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        if self.model.vocab_size < self.prepare.num_token_ids:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} is smaller than the "
                f"{self.prepare.num_token_ids} token ids of "
                f"prepare.tokenizer={self.prepare.tokenizer!r} (prepare.vocab_size={self.prepare.vocab_size}): "
                "make them equal"
            )
        return self

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        """Checks that the mixture only names prepared sources."""
        sources = {source.name for source in self.prepare.all_sources}
        if unknown := sorted(self.data.mixture_names - sources):
            raise ValueError(
                f"data.weights, data.max_epochs or data.stages name {', '.join(unknown)}: the "
                f"sources are {', '.join(sorted(sources))}"
            )
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        learned = self.model.attention.max_positions
        if learned is not None and self.data.seq_len > learned:
            raise ValueError(
                f"data.seq_len={self.data.seq_len} exceeds the learned positions, "
                f"model.attention.positions.max_positions={learned}: make them equal"
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
        """Checks that batches have document ids if a loss needs them, and that it is one of documents."""
        router = None if self.model.experts is None else self.model.experts.router
        pools = getattr(router, "balance_pool", False) and getattr(router, "balance", 0.0)
        if self.train.balance_documents and pools:
            raise ValueError(
                "train.balance_documents=true with router.balance_pool=true: a pool of all layers has no "
                "documents; set one of them to false"
            )
        given = self.data.document_attention or self.data.packing == "best_fit"
        if self.train.balance_documents and not given:
            raise ValueError(
                "train.balance_documents=true needs document ids, which "
                f"data.packing={self.data.packing!r} with data.document_attention=false does not "
                'provide: set data.document_attention=true or data.packing="best_fit"'
            )
        return self

    @model_validator(mode="after")
    def _check_bfloat16_only(self) -> Self:
        """Refuses features that need float32 state."""
        refused = {
            'mesh.sharding="fsdp" (sharded weights are float32): use "none"': (
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
                    f'train.precision="bfloat16_only" does not support {what}; or set '
                    'train.precision="bfloat16", which keeps weights and decisions in float32'
                )
        return self

    @model_validator(mode="after")
    def _check_epochs(self) -> Self:
        if self.train.epochs is not None:
            self.check_epochs([source.name for source in self.prepare.all_sources])
        return self

    def check_mixture(self) -> None:
        """Checks that a new run's weights name every source, so that none has a share by default.

        Raises:
            ConfigError: some weights omit a source.
        """
        names = {source.name for source in self.prepare.all_sources}
        given = [("data.weights", self.data.weights)] if self.data.weights else []
        given += [(f"the stage at {s.at_tokens} tokens", s.weights) for s in self.data.stages]
        for what, weights in given:
            if missing := sorted(names - weights.keys()):
                raise ConfigError(
                    f"{what} gives no weight to {some_of(missing)}: name every source"
                    + (", with 0 for no rows" if what != "data.weights" else "")
                )

    def check_epochs(self, sources: Collection[str]) -> None:
        """Checks that the epochs of a run over these sources can be counted before it starts.

        Raises:
            ConfigError: they cannot.
        """
        refused = {
            "train.tokens": self.train.tokens,
            "train.start_when": self.train.start_when,
            "the sources": ", ".join(sources) if len(sources) > 1 else None,
        }
        for key, value in refused.items():
            if value is not None:
                raise ConfigError(
                    f"train.epochs={self.train.epochs} does not go with {key}={value}: it counts the rows "
                    "of one source, prepared before the run; give train.steps or train.tokens instead"
                )

    @model_validator(mode="after")
    def _check_average(self) -> Self:
        self.train.average_span(self.train.global_batch * self.data.seq_len)
        return self

    @model_validator(mode="after")
    def _check_growing(self) -> Self:
        """Checks that a growing depth arrives at R before training ends."""
        depth, loops = self.model.loops.depth, self.model.num_repeats
        if depth.kind != "growing" or self.train.epochs is not None:  # not counted yet
            return self
        first = depth.values.index(loops) * depth.stage_steps
        if first >= self.train.steps:
            raise ValueError(
                f"model.loops.depth.stage_steps={depth.stage_steps} reaches the R={loops} loops of "
                f"evaluation at step {first}, and train.steps={self.train.steps}: make the stages shorter"
            )
        return self

    @model_validator(mode="after")
    def _check_own_depths(self) -> Self:
        refused = {
            "train.losses": bool(self.train.losses),
            "train.balance_documents": self.train.balance_documents,
        }
        for key, asked in refused.items():
            if asked and self.model.loops.depth.per == "sequence":
                raise ValueError(
                    f'{key} with model.loops.depth.per="sequence": it reads every sequence at every '
                    'depth step, and sequences that are done are not there; set per="step", or '
                    f"leave {key} out"
                )
        return self

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        """Checks that the run measures by what `checkpoint.keep_best` chooses."""
        best = self.checkpoint.keep_best
        every = dict.fromkeys(self.evaluate.tasks, self.evaluate.every)
        every["validation"] = self.train.eval_every
        if best is not None and not every.get(best):
            raise ValueError(
                f"checkpoint.keep_best={best!r} is not measured while the run trains: write "
                f"checkpoint.keep_best=validation and train.eval_every={self.checkpoint.every or 100}, or "
                "name a task of evaluate.tasks, or leave keep_best out"
            )
        texts = (source.validation_input for source in self.prepare.all_sources)
        holds_out = self.data.dataset or self.prepare.validation_fraction or any(texts)
        if best == "validation" and not holds_out:
            raise ValueError(
                "checkpoint.keep_best='validation' with prepare.validation_fraction=0: hold out text to "
                "measure the loss on, or leave keep_best out"
            )
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        """Refuses keys that `model_copy` of a section has added."""
        for name, section in self:
            check_keys(section, name)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy with whole sections replaced, checked like any other configuration.

        Raises:
            ConfigError: an unknown section, a value that is none, or an invalid configuration.
        """
        copy = super().model_copy(update=update, deep=deep)
        check_keys(copy)
        for name, kind in type(self).model_fields.items():
            if not isinstance(getattr(copy, name), type(kind.default)):
                raise ConfigError(
                    f"{name}: model_copy replaces whole sections, here {a_kind(kind.default)}; "
                    f'to change single keys, call moebius.recipe(config, "{name}.KEY=VALUE")'
                )
        validated(type(self), copy.model_dump(mode="json"), origin="Config.model_copy")
        return copy

    def import_parts(self) -> None:
        """Imports every user's own part that a run needs (plugins.py).

        Raises:
            PluginError: one is absent or of the wrong kind.
        """
        router = None if self.model.experts is None else self.model.experts.router
        DISPATCHER.get(self.mesh.dispatcher)
        OPTIMIZER.get(self.optim.kind)
        SCHEDULE.get(self.optim.schedule)
        ACTIVATION.get(self.model.feed_forward.activation)
        NORM.get(self.model.norm_layer)
        BALANCE.get(getattr(router, "balance_form", "load"))
        weighted_losses(self.train.losses)

    def check_world(self, world_size: int) -> None:
        """Checks everything that depends on the number of ranks.

        Raises:
            ConfigError: the mesh, the experts or the batch do not fit `world_size` ranks.
        """
        try:
            layout = plan_layout(self.mesh, world_size)
        except ValueError as error:
            raise ConfigError(f"{error}{self._ranks_for_mesh()}") from None
        check_experts(layout, self.model.expert_counts())
        if self.mesh.sharding == "fsdp" and layout.dp_shard == 1 < world_size:
            sizes = legal_values(
                self.mesh.model_copy(update={"dp_replicate": None}), world_size, "dp_shard"
            )[1:]
            raise ConfigError(
                f'mesh.sharding="fsdp" with mesh.dp_shard=1 on {world_size} ranks shards nothing: '
                f"set mesh.dp_shard to {one_of(sizes)} (mesh.dp_replicate=none fills the world), or "
                'use mesh.sharding="none"'
            )
        if self.mesh.rebalance_every and layout.ep == 1:
            sizes = legal_values(self.mesh, world_size, "ep")[1:]
            instead = (
                f", or mesh.ep to {one_of(sizes)}"
                if sizes
                else f" (a world of {world_size} allows no other mesh.ep)"
            )
            raise ConfigError(
                f"mesh.rebalance_every={self.mesh.rebalance_every}, "
                f"mesh.replicas={self.mesh.replicas} with mesh.ep=1: every rank has all experts, so "
                f"none can move or needs a copy; set both to 0{instead}"
            )
        if unknown := [rank for rank in self.train.profile if rank >= world_size]:
            raise ConfigError(
                f"train.profile names rank {unknown[0]}, but the ranks are 0 to {world_size - 1}"
            )
        per_pass = world_size * self.train.micro_batch
        if self.train.global_batch % per_pass:
            raise ConfigError(
                f"train.global_batch={self.train.global_batch} is not a multiple of {world_size} "
                f"ranks × train.micro_batch={self.train.micro_batch} = {per_pass}: use "
                f"{max(1, self.train.global_batch // per_pass) * per_pass} or change "
                "train.micro_batch"
            )

    def _ranks_for_mesh(self) -> str:
        """Names the keys that start as many ranks as the mesh needs; "" if no number fits it."""
        dp_shard = self.mesh.dp_shard or self.mesh.ep
        if dp_shard % self.mesh.ep:
            return ""
        needed = (self.mesh.dp_replicate or 1) * dp_shard
        per_node, rest = divmod(needed, self.job.num_nodes)
        keys = f"job.num_nodes=1 job.ranks_per_node={needed}"
        if not rest:
            keys = f"job.ranks_per_node={per_node}"
        is_said = self.mesh.dp_replicate is not None
        return f" ({keys})" if is_said else f", or start {needed} ranks or a multiple ({keys})"

    @checked
    def save(self, path: str | PathLike[str]) -> None:
        """Writes the resolved configuration as JSON."""
        Path(path).write_text(
            json.dumps(self.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8"
        )

    @classmethod
    @checked
    def load(cls, path: str | PathLike[str]) -> "Config":
        """Reads a configuration written by `save`.

        Raises:
            ConfigError: it cannot be read, or is not a configuration.
        """
        path = Path(path)
        try:
            values = json.loads(read_regular(path))
        except OSError as error:
            hint = runs_near(path.parent)
            raise ConfigError(f"{path}: cannot be read ({error.strerror}){hint}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}: is damaged ({fault(error)}): restore it, or choose another run folder"
            ) from None
        distrust(values, path.parent)
        return validated(cls, values, origin=str(path))
