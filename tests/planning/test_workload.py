"""The reduced model, against the model itself."""

import math

import pytest
import torch
from torch import nn

from moebius.distributed.parallelize import expert_names
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.cost import count_parameters, forward_flops
from moebius.model.execution.precision import forward_in
from moebius.model.execution.roles import roles_of
from moebius.model.transformer import Transformer
from moebius.planning.workload import _Launches, describe, kept_by_bank, with_muon
from moebius.train.optim import MuonConfig, OptimConfig, optimizer_of
from moebius.train.recipes.smoke import RECIPES

SMALL = ModelConfig(
    vocab_size=64,
    d_model=32,
    num_layers=4,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=2, d_head=16, num_experts=4),
    feed_forward=ExpertsConfig(num_experts=8, d_expert=16),
)
KINDS = ("moeut", "moeut_aabb", "sut", "deepseek", "mh_moe", "expert_choice", "dense")


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", [*KINDS, "mixture_of_tokens"])
def test_weights_and_flops_are_the_models(name: str) -> None:
    config = RECIPES[name]()
    work = describe(config.model, seq_len=config.data.seq_len)
    counted = work.dense_parameters + work.expert_parameters()
    assert counted == count_parameters(config.model, config.data.seq_len).total
    flops = forward_flops(config.model, config.data.seq_len).forward
    assert work.forward_flops == pytest.approx(flops, rel=1e-12)
    assert work.num_layers == config.model.num_layers
    assert min(work.dense_flops, work.saved_bytes, work.root_parameters) > 0


@pytest.mark.quick(6)
@pytest.mark.parametrize("routers", [False, True])
@pytest.mark.parametrize("name", [*KINDS, "qwen3_moe_small", "deepseek_v3_small"])
def test_muon_updates_what_the_planner_counts(name: str, routers: bool) -> None:
    config, settings = (
        RECIPES[name]().model,
        OptimConfig(kind="muon", muon=MuonConfig(routers=routers)),
    )
    with torch.device("meta"):
        model = Transformer(config)
    optimizer, roles = optimizer_of(settings, model), roles_of(model)
    groups = [group["params"] for group in optimizer.param_groups if "momentum" in group]
    updated, weights, flops = {one for group in groups for one in group}, 0, 0
    for name, parameter in model.named_parameters():
        if parameter in updated:
            maps = roles[name].maps
            *stack, rows, columns = parameter.shape
            rows, columns = (rows, columns // maps) if stack else (rows // maps, columns)
            weights += parameter.numel()
            flops += 20 * maps * math.prod(stack) * min(rows, columns) * rows * columns
    work = with_muon(describe(config, seq_len=64), config, steps=5, routers=routers)
    assert work.muon is not None
    vectors = [one for one in expert_names(model) if not roles[one].is_matrix]
    biases = sum(model.get_parameter(one).numel() for one in vectors)
    assert work.muon.weights + work.expert_parameters() == weights + biases
    assert work.muon.flops + work.muon.expert_flops == flops


def test_banks_of_a_moeut() -> None:
    work = describe(SMALL, seq_len=16)
    banks = {bank.kind: bank for bank, _ in work.uses}
    assert {bank.kind: uses for bank, uses in work.uses} == dict.fromkeys(
        ("value", "output", "feed_forward"), 4
    )
    value, output, experts = banks["value"], banks["output"], banks["feed_forward"]
    assert (value.heads, value.num_experts, value.source, value.target) == (2, 4, "row", "head")
    assert (output.d_in, output.d_out, output.source, output.target) == (16, 32, "head", "row")
    assert experts.routes == experts.top_k
    assert experts.flops == 2 * experts.top_k * 2 * 32 * 16
    assert work.repeats == 2
    alike = describe(SMALL.changed({"layers_per_group": 4}), seq_len=16)
    assert ([member.copies for member in alike.members], alike.repeats) == ([4], 1)


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
        tokens_BS = torch.randint(64, (num_sequences, 16))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = forward_in(model, getattr(torch, precision), tokens_BS)
        assert output.logits_BSV.requires_grad
        return sum(storage.nbytes() for storage in storages.values())

    # A CPU's attention keeps a row's log-sum-exp, the meta device's plain product keeps
    # softmax(q·k) and copies of q and k.
    assert (kept(3) - kept(2)) / 16 == pytest.approx(per_token, rel=0.15)


def test_learned_positions_are_no_limit_to_what_is_measured() -> None:
    """Kept bytes are measured on sequences longer than the model's learned positions."""
    learned = {"kind": "learned", "max_positions": 16}
    short, plenty = (
        describe(SMALL.changed({"attention.positions": learned | more}), seq_len=16)
        for more in ({}, {"max_positions": 1024})
    )
    assert short.saved_bytes == plenty.saved_bytes > 0
    assert plenty.dense_parameters - short.dense_parameters == (1024 - 16) * SMALL.d_model


@pytest.mark.slow
def test_launches_grow_with_depth() -> None:
    """Every further depth step of the same layer launches the same operations; a view launches
    none.
    """
    two, four, six = (
        describe(SMALL.changed({"num_layers": layers}), seq_len=16).launches for layers in (2, 4, 6)
    )
    assert six - four == four - two > 40
    with _Launches() as launches:
        torch.zeros(2, 3).view(6).add_(1).t()
    assert launches.count == 2
