"""How useful experts are, by their weights or over a few batches, and the loss before and after a growth."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.config.model_config import ModelConfig
from ...model.transformer import Transformer
from ..evaluate import Rows
from ..families.table import shapes_of
from .growth import Given

SCORES = ("load", "norm", "saliency")
_EXPERTS = "group.{}.feed_forward.sparse.experts."


def scores_of(by: str, model: ModelConfig, given: Given) -> dict[int, Tensor]:
    """Returns the usefulness of every expert, (E,), of the sparse layers.

    Args:
        by: "norm" of the up-projection; "load", the rows that chose it; or "saliency", Σ |w · gradient| over
            its weights. The last two build the model in this process.
        model: the model before.
        given: its tensors and rows.

    Raises:
        ConfigError: rows are needed, and the source has none.
    """
    members = model.sparse_members
    if by == "norm":
        banks = (given.tensor(f"{_EXPERTS.format(member)}w_up") for member in members)
        return {
            member: bank.float().flatten(1).norm(dim=1)
            for member, bank in zip(members, banks, strict=True)
        }
    rows, built = given.rows(), _built(model, given.tensor)
    steps = [step.member for step in model.load_steps if model.has_experts(step.member)]
    count = model.experts.num_experts if model.experts else 0
    loads = {member: torch.zeros(count) for member in members}
    for some in rows:
        output = built(some.tokens_BS, documents=some.documents)
        for member, load_N in zip(steps, output.loads["feed_forward"].load_LN, strict=True):
            loads[member] += load_N
        _losses(output.logits_BSV, some).sum().backward()
    return loads if by == "load" else {member: _saliency(built, member) for member in members}


@torch.no_grad()
def loss_of(model: ModelConfig, tensor: Callable[[str], Tensor], rows: Sequence[Rows]) -> float:
    """Returns the mean loss per counted target of a model that is built in this process."""
    built, total, count = _built(model, tensor), 0.0, 0
    for some in rows:
        total += (
            _losses(built(some.tokens_BS, documents=some.documents).logits_BSV, some).sum().item()
        )
        count += int(some.asked_BS.sum())
    return total / max(1, count)


def _built(model: ModelConfig, tensor: Callable[[str], Tensor]) -> Transformer:
    built = Transformer(model)
    built.load_state_dict({name: tensor(name) for name in shapes_of(model)})
    return built.eval()


def _losses(logits_BSV: Tensor, rows: Rows) -> Tensor:
    """Returns the cross-entropy of every target, (B, S), and 0 where it does not count."""
    losses = F.cross_entropy(logits_BSV.flatten(0, 1), rows.targets_BS.flatten(), reduction="none")
    return losses.view_as(rows.asked_BS).where(rows.asked_BS, 0.0)


def _saliency(model: Transformer, member: int) -> Tensor:
    """Returns Σ |w · gradient| over each expert's weights, (E,)."""
    total = torch.zeros(())
    for name in ("w_up", "w_down"):
        bank = model.get_parameter(f"{_EXPERTS.format(member)}{name}")
        if bank.grad is not None:
            total = total + (bank * bank.grad).abs().flatten(1).sum(1).detach()
    return total
