"""What an operator of growth is given and returns, and what operators of mixtures share."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...distributed.checkpoint.grown import Take
from ...model.config.feed_forward_config import ExpertsConfig
from ...model.config.model_config import ModelConfig
from ...model.transformer import ModelOutput, Transformer
from ..config.errors import ConfigError
from ..evaluate import Rows
from ..families.table import shapes_of

# Of a model that runs in the process that starts the ranks: numbers, and products of them and tokens.
_MOST_BUILT, _MOST_PRODUCTS = 2**27, 2**42
_HIDDEN = {"w_up": 2, "b_up": 1, "w_down": 1}  # the dim of hidden units in a bank
_KEPT = ("sigmoid", "token_choice", "deepseek")  # routers with a row for each expert, and no more


def count_of(word: str) -> int:
    """Returns the number that a word is, 1 to 9999; 0: it is none."""
    return int(word) if re.fullmatch(r"[1-9][0-9]{0,3}", word) else 0


def no_rows() -> Sequence[Rows]:
    """Reads a few batches of a source without data: there are none."""
    raise ConfigError("there is no prepared data to measure with")


@dataclass(frozen=True)
class Given:
    """Holds what an operator may use beside the model and its words."""

    seed: int
    tensor: Callable[..., Tensor]  # reads a tensor of the model before, or an `entry` of it
    rows: Callable[[], Sequence[Rows]] = no_rows  # reads a few batches of validation
    step: int = 0  # after which the run goes on


@dataclass(frozen=True)
class Growth:
    """Holds a grown model and what its tensors copy; those without a `Take` stay as they are."""

    model: ModelConfig
    takes: tuple[Take, ...]
    promise: str  # a sentence for the user
    is_exact: bool = True  # False: the loss before and after is said
    notes: tuple[str, ...] = ()  # for the user, a line each


def experts_of(model: ModelConfig) -> ExpertsConfig:
    """Returns the experts of a mixture whose router an operator can keep.

    Raises:
        ConfigError: the model is dense, or has another router.
    """
    if model.experts is None:
        raise ConfigError("the model has no experts; mixture=8/4 makes some of dense layers")
    if (kind := model.experts.router.kind) not in _KEPT:
        raise ConfigError(
            f"router.kind={kind!r} would choose otherwise; {', '.join(_KEPT)} keep their choice"
        )
    return model.experts


def expert_tensors(model: ModelConfig) -> Iterator[tuple[int, str, str, tuple[int, ...]]]:
    """Yields the tensors with a row for each routed expert of the feed-forward.

    They are (layer of the group, whole name, last word of the name, shape).
    """
    for name, shape in shapes_of(model).items():
        path, _, last = name.rpartition(".")
        if path.endswith((".feed_forward.router", ".feed_forward.sparse.experts")):
            yield int(name.split(".")[1]), name, last, shape


def part_takes(
    grown: tuple[str, Sequence[int]],
    place: int,
    source: tuple[str, Sequence[int]],
    *,
    expert: int = 0,
    part: int = 0,
    parts: int = 1,
    d_expert: int,
    factor: float = 1.0,
) -> Iterator[Take]:
    """Yields what one grown expert copies: a part of an expert's or of a dense layer's hidden units.

    Args:
        grown: name and shape of the bank's tensor.
        place: the grown expert.
        source: name of the tensor before, and the bank's dim of each of its dims.
        expert: of the source, if it is a bank.
        part: which of `parts` parts; a tensor without hidden units is copied whole.
        parts: how many the hidden units are cut into.
        d_expert: hidden width of a grown expert.
        factor: of what is copied.
    """
    (name, shape), axes = grown, tuple(source[1])
    cut = _HIDDEN.get(name.rpartition(".")[2])
    for half in range(1 if cut is None else shape[cut] // d_expert):  # gate and content
        start, sizes, at = [0] * len(shape), [1, *shape[1:]], [0] * len(shape)
        start[0], at[0] = place, expert
        if cut is not None:
            start[cut], sizes[cut] = half * d_expert, d_expert
            at[cut] = (half * parts + part) * d_expert
        copied = source[0], tuple(at[axis] for axis in axes), axes
        yield Take(name, tuple(start), tuple(sizes), *copied, factor)


# Usefulness and losses, of models built in this process --------------------------------------------


def scores_of(by: str, model: ModelConfig, given: Given) -> dict[int, Tensor]:
    """Returns the usefulness of every expert, (E,), of the sparse layers.

    Args:
        by: "norm" of the up-projection; "load", the rows that chose it; or "saliency", Σ |w · gradient| over
            the up-projection.
        model: the model before.
        given: its tensors and rows.

    Raises:
        ConfigError: rows are needed, and the source has none.
    """
    banks = {
        member: f"group.{member}.feed_forward.sparse.experts.w_up"
        for member in model.sparse_members
    }
    if by == "norm":
        experts = range(0 if model.experts is None else model.experts.num_experts)
        return {  # one at a time: a bank may be larger than memory
            member: torch.stack([given.tensor(bank, entry=expert).norm() for expert in experts])
            for member, bank in banks.items()
        }
    rows = given.rows()
    built = _built(model, given.tensor, rows, given.step)
    weights = {member: built.get_parameter(bank) for member, bank in banks.items()}
    loads = {member: torch.zeros(len(weight)) for member, weight in weights.items()}
    steps = [step.member for step in model.load_steps if model.has_experts(step.member)]
    for some in rows:
        with torch.set_grad_enabled(by == "saliency"):
            output = _applied(built, some)
        for member, load_N in zip(steps, output.loads["feed_forward"].load_LN, strict=True):
            loads[member] += load_N
        if by == "saliency":
            output.cross_entropy.backward()
    if by == "load":
        return loads
    return {
        member: (weight * weight.grad).detach().abs().flatten(1).sum(1)
        for member, weight in weights.items()
        if weight.grad is not None
    }


@torch.no_grad()
def loss_of(
    model: ModelConfig, tensor: Callable[[str], Tensor], rows: Sequence[Rows], step: int
) -> float:
    """Returns the mean loss per counted target; ConfigError: the model is too large for this process."""
    built = _built(model, tensor, rows, step)
    total = sum(_applied(built, some).cross_entropy.item() for some in rows)
    return total / max(1, sum(int(some.asked_BS.sum()) for some in rows))


def _built(
    model: ModelConfig, tensor: Callable[[str], Tensor], rows: Sequence[Rows], step: int
) -> Transformer:
    numbers = sum(map(math.prod, shapes_of(model).values()))
    tokens = sum(some.tokens_BS.numel() for some in rows)
    products = numbers * tokens * model.num_layers // model.layers_per_group
    if numbers > _MOST_BUILT or products > _MOST_PRODUCTS:
        raise ConfigError(
            f"{numbers:,} numbers and {tokens:,} tokens are too many to measure before the ranks start"
        )
    built = Transformer(model)
    built.load_state_dict({name: tensor(name) for name in shapes_of(model)}, assign=True)
    built.before_step(step)  # of routers with a schedule
    return built.eval()


def _applied(model: Transformer, rows: Rows) -> ModelOutput:
    """Returns a pass whose loss is the sum over the counted targets."""
    given = {"targets_BS": rows.targets_BS, "loss_mask_BS": rows.asked_BS}
    return model(rows.tokens_BS, documents=rows.documents, **given)
