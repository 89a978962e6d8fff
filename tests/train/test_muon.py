"""Muon: the recorded steps, one bit pattern on every layout, and what belongs to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from family import MODELS, tiny_config, tiny_model
from meshes import model_on, saver_in
from pairwise import slow_but
from parts import make_config
from shared import shared_folder
from small_model import ODD, TINY
from torch import Tensor, nn
from trained import column, different, lines, newest_state, run_training
from world import run_ranks

from moebius.distributed import muon
from moebius.distributed.checkpoint.loading import load
from moebius.distributed.dispatch.expert_map import ExpertMap
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.local_shard import local_shard_of, local_tensor
from moebius.distributed.mesh import build_mesh
from moebius.distributed.muon import Muon, orthogonalise
from moebius.distributed.placement.balance_load import packed
from moebius.distributed.placement.move import expert_maps_of, move_experts
from moebius.distributed.process.process import start_process
from moebius.model.config.model_config import ModelConfig
from moebius.model.execution.roles import Role, roles_of
from moebius.model.transformer import Transformer
from moebius.plugins import PluginError
from moebius.train.config.errors import ConfigError
from moebius.train.optim import MuonConfig, OptimConfig, optimizer_of, rate_notes, set_rates
from moebius.train.record.run_folder import check_branch
from moebius.train.state import allocate_moments, check_state, state_tensors

CONFIG = OptimConfig(kind="muon", learning_rate=0.02, weight_decay=0.1)
THEIRS = {"spectral": "original", "match_rms_adamw": "match_rms_adamw"}  # torch's words
MATRIX, BANK, GATED = Role("body", "matrix"), Role("body", "bank"), Role("body", "bank", 2)

RECORDED = {f"m/{name}": MATRIX for name in ("wide", "tall", "square", "row")}
RECORDED |= {"bank/w_up": GATED, "bank/w_down": BANK}


def steps_of(start: Tensor, grads: Tensor, role: Role, **changes: Any) -> Tensor:
    """Returns the weights after every step."""
    parameter, other = nn.Parameter(start.clone()), nn.Parameter(torch.zeros(3))
    group = {"params": [parameter], "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "steps": 5}
    group |= {"scale": "match_rms_adamw", "cautious": False} | changes
    optimizer = Muon([group], {parameter: role}, torch.optim.AdamW([other]))
    found = []
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
        found.append(parameter.detach().clone())
    return torch.stack(found)


@pytest.mark.needs_shared
@pytest.mark.parametrize("scale", THEIRS)
@pytest.mark.parametrize("name", RECORDED)
def test_the_recorded_steps(name: str, scale: str) -> None:
    role = RECORDED[name]
    with np.load(shared_folder() / "golden/muon_steps.npz") as arrays:
        recorded = {key: torch.from_numpy(arrays[key]) for key in arrays}
    ours = steps_of(recorded[f"{name}/start"], recorded[f"{name}/grads"], role, scale=scale)
    exact, torchs = (recorded[f"{name}/{kind}/{THEIRS[scale]}"] for kind in ("exact", "torch"))
    assert (ours - exact).abs().max() < 1e-6
    assert (ours - torchs).abs().max() < 1.5e-3  # it multiplies in bfloat16
    for wrong in ("fused", "flattened") if name == "bank/w_up" else ():
        assert (ours - recorded[f"wrong/{wrong}"]).abs().max() > 5e-3


def test_torchs_own_steps_of_every_expert_alone_and_of_gate_and_up_apart() -> None:
    generator = torch.Generator().manual_seed(1)
    start_EIO, grads = (torch.randn(*n, 3, 12, 20, generator=generator) for n in ((), (4,)))
    ours = steps_of(start_EIO, grads, GATED, lr=0.02, scale="spectral")[-1]
    for expert in range(3):
        for half in (slice(10), slice(10, 20)):
            alone = nn.Parameter(start_EIO[expert, :, half].T.clone())  # (out, in)
            optimizer = torch.optim.Muon([alone], lr=0.02, weight_decay=0.1)
            for grad_EIO in grads:
                alone.grad = grad_EIO[expert, :, half].T.clone()
                optimizer.step()
            assert (ours[expert, :, half] - alone.T).abs().max() < 2e-3, (expert, half)


def test_updates_are_orthogonal_and_zeros_stay_zeros() -> None:
    u_NAB = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    u_NAB[1] = 0
    for tall in (False, True):
        found = orthogonalise(u_NAB.mT if tall else u_NAB, 5)
        values = torch.linalg.svdvals(found[::2])
        assert 0.6 < values.min() < values.max() < 1.3
        assert not found[1].any()
        assert torch.equal(found[2], orthogonalise((u_NAB.mT if tall else u_NAB)[2:], 5)[0])


def test_cautious_decay_leaves_weights_whose_update_has_the_other_sign() -> None:
    generator = torch.Generator().manual_seed(2)
    start, grads = (torch.randn(*n, 6, 9, generator=generator) for n in ((), (1,)))
    plain, cautious, none = (
        steps_of(start, grads, MATRIX, weight_decay=decay, cautious=is_cautious)[0]
        for decay, is_cautious in ((0.5, False), (0.5, True), (0.0, False))
    )
    decays = start * (start - none) > 0
    assert torch.equal(cautious, torch.where(decays, plain, none))
    assert decays.any()
    assert not decays.all()


# Roles --------------------------------------------------------------------------------------------


def test_every_parameter_of_every_model_has_a_role() -> None:
    for name in MODELS:
        model = tiny_model(name)
        roles = roles_of(model)
        assert roles.keys() == {name for name, _ in model.named_parameters()}
        assert {role.kind for role in roles.values()} <= {"matrix", "bank", "table", "vector"}, name
        for key, parameter in model.named_parameters():
            role = roles[key]
            assert role.is_matrix <= (parameter.ndim == (3 if role.kind == "bank" else 2)), key
            assert (role.kind == "table") == (key in ("embedding", "position_embedding")), key
            assert (role.part == "router") == ("router" in key), key
            is_beside = any(word in key for word in ("norm", "gate", "injection", "halting"))
            assert role.is_matrix or is_beside or role.kind in ("table", "vector"), key


def tensors_by_rule(model: nn.Module, **changes: Any) -> tuple[set[str], set[str]]:
    """Returns the names of Muon's parameters, and of AdamW's."""
    optimizer = optimizer_of(CONFIG.model_copy(update={"muon": MuonConfig(**changes)}), model)
    by_rule: tuple[set[str], set[str]] = (set(), set())
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        by_rule["momentum" not in group].update(names[one] for one in group["params"])
    return by_rule


def test_matrices_are_known_by_their_module() -> None:
    own, others = tensors_by_rule(tiny_model("moeut"))
    layers = {name.partition(".")[2].partition(".")[2] for name in own}
    assert layers == {
        *("attention.query.weight", "attention.key.weight"),
        *("attention.value.experts.weight", "attention.output.experts.weight"),
        *("feed_forward.sparse.experts.w_up", "feed_forward.sparse.experts.w_down"),
    }
    assert {"embedding", "head.weight", "group.0.feed_forward.router.weight"} <= others
    with_routers, _ = tensors_by_rule(tiny_model("moeut"), routers=True)
    assert with_routers - own == {name for name in others if "router" in name}
    _, others = tensors_by_rule(tiny_model("ouro_moe"))
    assert {"loops.exit_gate.weight"} <= others
    _, others = tensors_by_rule(tiny_model("sut"))
    assert any(name.endswith("attention.relative") for name in others)
    assert any(name.endswith("b_up") for name in others)


def test_gated_experts_and_gated_layers_have_two_maps() -> None:
    gated = {"feed_forward.activation": "swiglu", "feed_forward.num_shared_experts": 1}
    roles = roles_of(Transformer(TINY.changed(gated)))
    assert {name.split(".feed_forward.")[-1] for name, role in roles.items() if role.maps == 2} == {
        "sparse.experts.w_up",
        "shared.up.weight",
    }


class Own(nn.Module):
    """A user's own part with a matrix that is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.ones(3, 3))
        self.norm = nn.LayerNorm(3)
        self.map = nn.Linear(3, 3)
        self.aggregate = nn.Linear(3, 3)  # no gate
        self.table = nn.Embedding(4, 3)


def test_a_parameter_that_is_not_known_is_refused_by_name_unless_its_class_says_what_it_is() -> (
    None
):
    with pytest.raises(
        PluginError,
        match=r"optim.kind=muon does not know what mix is, of shape \(3, 3\): .* class Own",
    ):
        optimizer_of(CONFIG, Own())
    only = OptimConfig(weight_decay_on="matrices")
    with pytest.raises(
        PluginError, match=r"optim.weight_decay_on=matrices does not know what mix is"
    ):
        optimizer_of(only, Own())
    optimizer_of(OptimConfig(), Own())

    class Said(Own):
        roles: ClassVar = {"mix": "matrix"}

    own, others = tensors_by_rule(Said())
    assert own == {"mix", "map.weight", "aggregate.weight"}
    assert others == {"norm.weight", "norm.bias", "map.bias", "aggregate.bias", "table.weight"}
    for wrong in ("matrx", "bank"):
        model: Any = Own()
        model.roles = {"mix": wrong}
        with pytest.raises(PluginError, match=r"does not know what mix is, of shape \(3, 3\)"):
            optimizer_of(CONFIG, model)


def test_what_is_frozen_stays_and_what_never_decays_does_not() -> None:
    model: Any = Own()
    model.roles, model.decays = {"mix": "matrix"}, False
    model.map.weight.requires_grad_(requires_grad=False)
    model.mix.grad = torch.zeros_like(model.mix)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer_of(CONFIG, model).step()
    assert torch.equal(model.map.weight, before["map.weight"])
    assert torch.equal(model.mix, before["mix"])
    del model.decays
    optimizer_of(CONFIG, model).step()
    assert not torch.equal(model.mix, before["mix"])


def test_norms_and_biases_do_not_decay_under_matrices_and_rates_follow_parts() -> None:
    config = OptimConfig(
        learning_rate=1e-3,
        weight_decay=0.1,
        weight_decay_on="matrices",
        embedding_rate=2.0,
        head_rate=0.5,
        router_rate=0.25,
    )
    for kind in ("adamw", "muon"):
        model = tiny_model("huginn_moe")
        optimizer = optimizer_of(config.model_copy(update={"kind": kind}), model)
        of = {one: group for group in optimizer.param_groups for one in group["params"]}
        for name, parameter in model.named_parameters():
            factor = 2.0 if name == "embedding" else 0.5 if name == "head.weight" else 1.0
            factor = 0.25 if ".router." in name else factor
            assert of[parameter]["lr"] == pytest.approx(1e-3 * factor), name
            beside = ("norm", "bias", "embedding", "injection")
            decays = not any(word in name for word in beside)
            assert of[parameter]["weight_decay"] == (0.1 if decays else 0.0), name


# One bit pattern on every layout ------------------------------------------------------------------

SIZES = {
    "gated, odd": ODD.changed(
        {"feed_forward.activation": "swiglu", "feed_forward.num_shared_experts": 1, "num_layers": 2}
    ),
    "few experts, and a rank without rows": ODD.changed(
        {"feed_forward.num_experts": 4, "feed_forward.router.top_k": 1, "num_layers": 2}
        | {"attention.num_heads": 1, "attention.d_head": 6}
    ),
    "tied, drawn depth": tiny_config("huginn_moe", {"tied_head": True}),
    "latent": tiny_config("deepseek_v3_small"),
    "experts of heads": tiny_config("sut"),
}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"sharding": "fsdp"}],
    2: [{}, {"ep": 2}, {"dp_shard": 2, "sharding": "fsdp"}],
    4: [
        *({}, {"ep": 2}, {"ep": 4}, {"dp_shard": 4, "sharding": "fsdp"}),
        *({"ep": 2, "dp_shard": 4, "sharding": "fsdp"}, {"ep": 4, "sharding": "fsdp"}),
        {"dp_shard": 2, "sharding": "fsdp"},  # two replicas
    ],
}
MOVED = {"ep": 2, "rebalance_every": 1, "replicas": 2}
SAVED = {"ep": 2, "dp_shard": 4, "sharding": "fsdp"}
WHOLE, HALF, REST = range(10), range(5), range(5, 10)


def set_gradients(model: nn.Module, step: int) -> None:
    """Gives every parameter its part of a gradient that its name and the step draw."""
    for name, parameter in model.named_parameters():
        shard = local_shard_of(parameter)
        generator = torch.Generator().manual_seed(step * 1000 + sum(name.encode()))
        whole = torch.randn(shard.global_shape, generator=generator)
        if shard.has_experts:
            whole[step % len(whole)] = 0  # an expert without tokens
        parameter.grad = torch.zeros_like(parameter)
        for slice_ in shard.slices:
            slice_.view(local_tensor(parameter.grad)).copy_(slice_.copy_from(whole))


def whole_state(model: Any, optimizer: Any) -> Iterator[tuple[str, tuple, Tensor]]:
    """Yields this rank's blocks of the weights and moments, with their places."""
    tensors, shards = state_tensors(model, optimizer)
    for name, tensor in tensors.items():
        if name in shards:
            for slice_ in shards[name].slices:
                yield name, slice_.offsets, slice_.view(tensor).clone()


def trained_on(
    model_config: ModelConfig, asked: list[tuple[dict[str, Any], range]], folder: Path
) -> list[list]:
    """Returns the blocks of the state after the steps of each layout.

    Steps that end early leave a checkpoint in the folder; those that begin late begin with it.
    """
    found = []
    muon.STACK_BYTES = 4000  # several stacks of a shape
    with start_process("cpu", timeout_s=60) as process:
        for values, steps in asked:
            config = MeshConfig(**values)
            mesh = build_mesh(plan_layout(config, process.world_size), process)
            model = model_on(mesh, model_config, seed=3, sharding=config.sharding)
            optimizer = optimizer_of(CONFIG, model, mesh)
            if steps.start:
                allocate_moments(model, optimizer, steps.start)
                [path] = folder.glob("step_*")
                load(path, *state_tensors(model, optimizer), mesh=mesh)
            for step in steps:
                if config.replicas and step == HALF.stop:
                    move_experts(model, optimizer, mesh, moved_maps(model))
                set_gradients(model, step)
                optimizer.step()
            if steps == HALF:
                saver = saver_in(folder, process, mesh)
                saver.save(steps.stop, *state_tensors(model, optimizer), {})
                saver.wait()
            check_state(model, optimizer)
            found.append(list(whole_state(model, optimizer)))
    return found


def moved_maps(model: nn.Module) -> dict[str, ExpertMap]:
    """Returns maps of two ranks with two more slots each, for copies."""
    return {
        name: packed(
            [float(expert % 3) for expert in range(own.num_experts)],
            [-(-own.num_experts // 2) + 2] * 2,
        )
        for name, own in expert_maps_of(model).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(SIZES, *[*SIZES][:2]))
def test_every_layout_has_the_same_bits_after_some_steps(name: str, tmp_path: Path) -> None:
    """Also one that goes on from another's checkpoint."""
    config, whole = SIZES[name], {}

    def check(world: int, asked: list[tuple[dict[str, Any], range]]) -> None:
        for rank in run_ranks(trained_on, world, config, asked, tmp_path):
            for (mesh, steps), blocks in zip(asked, rank, strict=True):
                for key, offsets, block in blocks if steps != HALF else []:
                    places = zip(offsets, block.shape, strict=True)
                    at = tuple(slice(start, start + size) for start, size in places)
                    expected = whole.setdefault(key, block) if world == 1 else whole[key]
                    assert torch.equal(expected[at], block), (world, mesh, key)

    check(1, [(mesh, WHOLE) for mesh in LAYOUTS[1]])
    assert any(".momentum_buffer." in key for key in whole)
    check(4, [*((mesh, WHOLE) for mesh in [*LAYOUTS[4], MOVED]), (SAVED, HALF)])
    check(2, [*((mesh, WHOLE) for mesh in LAYOUTS[2]), (LAYOUTS[2][1], REST)])
    for world in (1, 4):
        check(world, [(LAYOUTS[world][1], REST)])


def test_a_branch_may_change_muons_numbers_and_not_what_it_updates() -> None:
    before, asked = (make_config(optim__kind="muon", optim__muon=given) for given in ({}, CHANGED))
    with pytest.raises(
        ConfigError, match=r"differ optim.muon.routers: the run has False, now True;"
    ):
        check_branch(before.model_dump(mode="json"), asked, "--from a@4", trunk=Path("a"))


CHANGED = {"routers": True, "momentum": 0.9, "scale": "spectral"}


def test_what_muon_does_not_read_and_rates_of_the_other_scale_are_told() -> None:
    with pytest.raises(ValueError, match=r"optim.muon={'momentum': 0.9} with optim.kind='adamw'"):
        OptimConfig(muon=MuonConfig(momentum=0.9))
    matched, spectral = MuonConfig(), MuonConfig(scale="spectral")
    notes = {
        (scale.scale, rate): rate_notes(OptimConfig(kind="muon", muon=scale, learning_rate=rate))
        for scale in (matched, spectral)
        for rate in (1e-3, 0.02)
    }
    assert not notes["match_rms_adamw", 1e-3]
    assert not notes["spectral", 0.02]
    assert notes["match_rms_adamw", 0.02] == [
        "optim.learning_rate=0.02 with optim.muon.scale=match_rms_adamw, whose rates are those of "
        "AdamW, 2e-4 to 5e-3; for rates about 0.02 set optim.muon.scale=spectral"
    ]
    assert "set optim.muon.scale=match_rms_adamw" in notes["spectral", 1e-3][0]
    own = MuonConfig(learning_rate=0.02, scale="spectral")
    config = OptimConfig(kind="muon", muon=own, learning_rate=1e-3)
    assert not rate_notes(config)
    optimizer = optimizer_of(config, tiny_model("moeut"))
    set_rates(optimizer, 5e-4, peak=1e-3)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01, 5e-4}


@pytest.mark.slow
def test_a_run_says_once_what_takes_which_step_and_resumes_with_the_same_bits(
    data: Path, tmp_path: Path
) -> None:
    """On two ranks, and then on four that share the experts."""
    runs = []
    settings = {"steps": 6, "global_batch": 8, "micro_batch": 2}
    optim = {"kind": "muon", "muon": {"cautious": True}, "weight_decay_on": "matrices"}
    optim |= {"decay_steps": 20}
    for name, steps in (("whole", (6,)), ("resumed", (3, 6))):
        for number in steps:
            length = settings | {"steps": number}
            config = make_config(data, model=TINY, optim=optim, train=length, checkpoint__every=3)
            run_ranks(run_training, 2, config, tmp_path / name)
        runs.append(newest_state(tmp_path / name))
    assert not different(*runs)
    assert any(name.startswith("optimizer.momentum_buffer.group.0") for name in runs[0])
    assert len([name for name in runs[0] if name.startswith("optimizer.exp_avg.group.0")]) > 1
    [start] = lines(tmp_path / "whole", "start")
    assert start["optimizer"] == "Muon: 6 tensors of 18 matrices; AdamW: 12 tensors"
    resized = make_config(
        data, model=TINY, optim=optim, train=settings | {"steps": 8}, mesh={"ep": 2}
    )
    assert run_ranks(run_training, 4, resized, tmp_path / "whole") == ["finished"] * 4
    assert column(tmp_path / "whole")[-1] < column(tmp_path / "whole")[0]
