"""A run's persistent state: a flat dict of tensors under global names, and a plain dict of values.

It contains no random state: every sequence draws its own numbers, keyed by the run's seed, the step
and the sequence's number in the step's batch.
"""

import hashlib
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed.local_shard import LocalShard, local_shard_of, local_tensor
from ..distributed.sharding import free_gathered
from ..model.transformer import Transformer
from ..plugins import PluginError
from .optim import check_constants


@dataclass(frozen=True)
class TrainingProgress:
    """Counts what the saved weights have seen."""

    step: int = 0  # optimizer steps done, skipped ones included
    updates: int = 0  # steps that changed the weights: AdamW's own count
    samples: int = 0  # rows consumed: the position in the data
    tokens: int = 0
    skipped: int = 0  # steps that did not, since the moments began

    def after_step(self, *, samples: int, tokens: int, updated: bool) -> "TrainingProgress":
        """Returns the progress one step later; `samples` is the next sample."""
        counts = self.updates + updated, samples, self.tokens + tokens, self.skipped + (not updated)
        return TrainingProgress(self.step + 1, *counts)

    def as_dict(self) -> dict[str, int]:
        """Returns the counts for a checkpoint's meta.json."""
        return asdict(self)


def allocate_moments(model: Transformer, optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Makes the optimizer allocate its state, whose values a checkpoint then replaces.

    A new run does not need it: its optimizer makes its own state in the first step. Here one step
    without gradients at rate 0 does, its groups stay as they are, and its counts of steps become
    those after `updates` steps.

    Raises:
        PluginError: the optimizer keeps something that a checkpoint cannot hold.
    """
    groups = [_copied(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(before)
    check_state(model, optimizer)
    for parameter in model.parameters():
        if (step := optimizer.state[parameter].get("step")) is not None:
            optimizer.state[parameter]["step"] = step + (updates - 1)


def check_state(model: Transformer, optimizer: torch.optim.Optimizer) -> None:
    """Checks that a checkpoint can hold all that the optimizer keeps.

    Raises:
        PluginError: it keeps something other than tensors of a parameter's shape, and numbers in
            its groups.
    """
    check_constants(optimizer)
    kind, state = f"optim.kind: {type(optimizer).__name__}", optimizer.state
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, Tensor):
                raise PluginError(
                    f"{kind} keeps the tensor {key!r} in a group: keep a number there"
                )
    named = list(model.named_parameters())
    if others := len(state.keys() - {parameter for _, parameter in named}):
        raise PluginError(
            f"{kind} keeps state under {others} other keys than parameters: keep numbers in its "
            "groups, and tensors of a parameter's own shape under the parameter"
        )
    for name, parameter in named:
        for key, value in state[parameter].items():
            if key == "step" or value is None:
                continue
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise PluginError(
                    f"{kind} keeps {key!r} ({shape}) for {name} of shape {tuple(parameter.shape)}: "
                    "checkpoints hold tensors of a parameter's own shape, the number of steps as "
                    "'step', and numbers in groups"
                )


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """Copies a group's settings, lists in them too, and keeps its parameters."""
    settings = {name: value for name, value in group.items() if name != "params"}
    return {"params": group["params"]} | deepcopy(settings)


def restore_numbers(optimizer: torch.optim.Optimizer, saved: list[dict[str, float]]) -> None:
    """Sets the numbers that the groups had at a checkpoint (`changed_numbers`).

    Raises:
        PluginError: the optimizer has another number of groups.
    """
    groups = optimizer.param_groups
    if len(groups) != len(saved):
        raise PluginError(
            f"optim.kind: the checkpoint has numbers of {len(saved)} groups, and "
            f"{type(optimizer).__name__} makes {len(groups)}: make the same groups on every layout"
        )
    for group, numbers in zip(groups, saved, strict=True):
        group.update(numbers)


def state_tensors(
    model: Transformer, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, LocalShard]]:
    """Returns this rank's part of the state's tensors by name, and its shards."""
    tensors, shards = model_tensors(model)
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state[parameter].items():
            if moment == "step" or value is None:
                continue
            tensors[f"optimizer.{moment}.{name}"] = local_tensor(value)
            shards[f"optimizer.{moment}.{name}"] = local_shard_of(parameter)
    return tensors, shards


def model_tensors(model: Transformer) -> tuple[dict[str, Tensor], dict[str, LocalShard]]:
    """Returns the weights and the routers' buffers, as `state_tensors` does.

    Weights still gathered after a pass without backward are freed first, because each rank saves
    its shard.
    """
    free_gathered(model)
    tensors = {
        f"model.{name}": local_tensor(parameter.detach())
        for name, parameter in model.named_parameters()
    }
    shards = {
        f"model.{name}": local_shard_of(parameter) for name, parameter in model.named_parameters()
    }
    return tensors | {f"model.{name}": buffer for name, buffer in model.named_buffers()}, shards


def seed_micro_batch(seed: int, step: int, index: int) -> None:
    """Seeds torch's default generators for a micro-batch, on the CPU and on this process's GPU.

    Only a user's own parts draw from them; everything here has model/execution/draws.py. `index`
    counts the step's micro-batches over all ranks in the order of their samples.
    """
    key = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    number = int.from_bytes(key, "little") >> 1
    # Like `torch.manual_seed`, but without probing other devices: 1 µs on the host instead of 150.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
