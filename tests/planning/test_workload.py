"""The reduced model, against the model itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.cost import count_parameters, forward_flops
from moebius.model.execution.precision import forward_in
from moebius.model.transformer import Transformer
from moebius.planning.workload import _Launches, describe, kept_by_bank, rounded
from moebius.train.recipes.smoke import RECIPES

SMALL_EXPERTS = ExpertsConfig(num_experts=8, d_expert=16)
SMALL = ModelConfig(
    vocab_size=64,
    d_model=32,
    num_layers=4,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=2, d_head=16, num_experts=4),
    feed_forward=SMALL_EXPERTS,
)


@pytest.mark.parametrize(
    "name",
    [
        "moeut",
        "moeut_aabb",
        "sut",
        "deepseek",
        "mh_moe",
        "mixture_of_tokens",
        "expert_choice",
        "dense",
    ],
)
def test_weights_and_flops_are_the_models(name: str) -> None:
    config = RECIPES[name]()
    work = describe(config.model, seq_len=config.data.seq_len)
    assert (
        work.dense_parameters + work.expert_parameters
        == count_parameters(config.model, config.data.seq_len).total
    )
    assert work.forward_flops == pytest.approx(
        forward_flops(config.model, config.data.seq_len).forward, rel=1e-12
    )
    assert work.num_layers == config.model.num_layers
    assert work.dense_flops > 0
    assert work.saved_bytes > 0


def test_banks_of_a_moeut() -> None:
    work = describe(SMALL, seq_len=16)
    banks = {bank.kind: (bank, uses) for bank, uses in work.uses}
    assert {kind: uses for kind, (_, uses) in banks.items()} == {
        "value": 4,
        "output": 4,
        "feed_forward": 4,
    }
    value, output, feed_forward = (banks[kind][0] for kind in ("value", "output", "feed_forward"))
    assert (value.heads, value.num_experts, value.source, value.target) == (2, 4, "row", "head")
    assert (output.d_in, output.d_out, output.source, output.target) == (16, 32, "head", "row")
    router: Any = SMALL_EXPERTS.router
    assert feed_forward.routes == router.top_k
    assert feed_forward.flops == 2 * router.top_k * 2 * 32 * 16
    assert work.repeats == 2


def test_mixtures_travel_one_by_one() -> None:
    config = RECIPES["mixture_of_tokens"]().model
    (bank, _), *_ = describe(config, seq_len=128).uses
    experts: Any = config.feed_forward
    assert (bank.top_k, bank.rows) == (1, experts.num_experts / experts.router.sequences_per_group)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_kept_bytes_are_what_autograd_keeps(precision: str) -> None:
    """On the CPU, with data, between two lengths: what 16 more tokens add, attention's scores left
    out.
    """
    work = describe(SMALL, seq_len=16, precision=precision)
    per_token = work.saved_bytes + sum(
        uses * kept_by_bank(bank, work.bytes_per_element) for bank, uses in work.uses
    )

    def kept(num_sequences: int) -> float:
        torch.manual_seed(0)
        model = Transformer(SMALL, backend="segments")
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        nn.init.normal_(model.embedding)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = forward_in(
                model, getattr(torch, precision), torch.randint(64, (num_sequences, 16))
            )
        assert output.logits_BSV.requires_grad
        return sum(storage.nbytes() for storage in storages.values())

    # A CPU's attention keeps a row's log-sum-exp, the meta device's plain product keeps
    # softmax(q·k) and copies of q and k.
    assert (kept(3) - kept(2)) / 16 == pytest.approx(per_token, rel=0.15)


def test_wider_experts_keep_wider_hidden_rows() -> None:
    narrow, wide = (
        describe(SMALL.changed({"feed_forward.d_expert": width}), seq_len=16) for width in (16, 48)
    )
    assert wide.saved_bytes == pytest.approx(narrow.saved_bytes)  # only the bank grows


def test_learned_positions_are_no_limit_to_what_is_measured() -> None:
    """Kept bytes are measured on sequences longer than the model's learned positions."""
    learned = {
        most: SMALL.changed(
            {
                "num_layers": 1,
                "layers_per_group": 1,
                "attention.positions": {"kind": "learned", "max_positions": most},
            }
        )
        for most in (16, 1024)
    }
    short, plenty = (describe(model, seq_len=16) for model in learned.values())
    assert short.saved_bytes == plenty.saved_bytes > 0
    assert plenty.dense_parameters - short.dense_parameters == (1024 - 16) * SMALL.d_model


def test_launches_grow_with_depth() -> None:
    """Every further depth step of the same layer launches the same operations; a view launches
    none.
    """
    counts = [
        describe(SMALL.changed({"num_layers": layers}), seq_len=16).launches for layers in (2, 4, 6)
    ]
    assert counts[2] - counts[1] == counts[1] - counts[0] > 40

    with _Launches() as launches:
        torch.zeros(2, 3).view(6).add_(1).t()
    assert launches.count == 2


def test_layers_that_are_alike_are_counted() -> None:
    work = describe(SMALL.changed({"layers_per_group": 4}), seq_len=16)
    assert [member.copies for member in work.members] == [4]
    assert work.repeats == 1


def test_banks_are_rounded_up_so_that_ranks_can_share_them() -> None:
    work = describe(
        SMALL.changed({"feed_forward.num_experts": 15, "attention.num_experts": 7}), seq_len=16
    )
    same = rounded(work, 1)
    assert same == (work, {})
    found, changes = rounded(work, 4) or (work, {})
    assert changes == {"feed_forward": 16, "value": 8, "output": 8}
    assert all(bank.total_experts % 4 == 0 for bank, _ in found.uses)
    assert found.expert_parameters > work.expert_parameters
    assert rounded(work, 32) is None  # more ranks than experts
    assert rounded(work, 10) is None  # 15 → 20 is more than a quarter


def test_more_experts_change_no_traffic() -> None:
    work = describe(SMALL, seq_len=16)
    grown = work.with_experts({bank: 4 * bank.num_experts for bank, _ in work.uses})
    assert grown.expert_parameters == pytest.approx(4 * work.expert_parameters)
    assert [bank.routes for bank, _ in grown.uses] == [bank.routes for bank, _ in work.uses]
    assert replace(grown, members=work.members) == work
