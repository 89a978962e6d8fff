"""A run, fully described: the sections that live beside their code, joined and checked against each
other.

A run is named by a recipe (train/recipes/smoke.py) or a TOML file and changed with dotted
overrides: `moebius train smoke model.feed_forward.num_experts=64 mesh.ep=2`. The resolved form is written into
the run folder as config.json.
"""

import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from ...data_pipeline.data_config import DataConfig
from ...data_pipeline.prepare_config import PrepareConfig
from ...distributed.checkpoint.checkpoint_folder import CheckpointConfig
from ...distributed.dispatch.table import DISPATCHER
from ...distributed.layout import (
    MeshConfig,
    check_experts,
    legal_values,
    plan_layout,
)
from ...kernels.backend import KernelConfig
from ...kernels.reference import ACTIVATION
from ...model.balance import BALANCE
from ...model.config.model_config import ModelConfig
from ...model.execution.depth_losses import weighted_losses
from ...model.layers import NORM
from ..optim import OPTIMIZER, SCHEDULE, OptimConfig
from .errors import ConfigError
from .job_config import JobConfig
from .train_config import TrainConfig
from .validation import validated


class Config(BaseModel):
    """Describes one run. It is immutable; every cross-section rule is checked on construction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    prepare: PrepareConfig = PrepareConfig()
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
        """Checks that the mixture names sources that are prepared."""
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

    def import_parts(self) -> None:
        """Imports every part of the user's own that a run needs (own_parts.py).

        Raises:
            OwnPartError: one is absent, or is something else than its key wants.
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
        return validated(cls, values, origin=str(path))
