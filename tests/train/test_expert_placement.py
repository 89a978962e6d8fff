"""Experts move during training: losses and weights stay, copies stay equal, and runs resume
exactly.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family import some_tokens, tiny_config
from meshes import meshed, model_on
from parts import layers, make_config
from trained import assembled, column, different, lines, newest_state, run_training
from world import run_ranks

from moebius.distributed.checkpoint.format import latest, read_meta
from moebius.distributed.dispatch.expert_map import contiguous_map
from moebius.distributed.layout import MeshConfig
from moebius.distributed.placement.expert_placement import ExpertPlacement
from moebius.distributed.placement.move import banks_of, expert_maps_of
from moebius.model.balance import collect_loads
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import CheckpointConfig, Config
from moebius.train.hooks import move_experts
from moebius.train.loop import step
from moebius.train.metrics.log import MetricsLog
from moebius.train.rank_data import open_loader
from moebius.train.run import OpenRun

# Seven and six experts: no EP degree but 1 divides both. No balancing loss, so that some experts
# get hot.
MODEL = ModelConfig(
    vocab_size=257,
    d_model=24,
    num_layers=4,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=2, d_head=12, num_experts=3, top_k=2, balance=0.0),
    feed_forward=ExpertsConfig(
        num_experts=7, router=SigmoidConfig(top_k=3, balance=0.0), d_expert=16
    ),
)
STEPS = 7


def config_of(data: Path, *, clip_norm: float = 0.5, **mesh: Any) -> Config:
    return make_config(
        data,
        model=MODEL,
        data__seq_len=24,
        optim__clip_norm=clip_norm,
        train__steps=STEPS,
        train__eval_rows=10,
        mesh=mesh,
    )


def run_of(config: Config, world: int, run_dir: Path) -> dict[str, list]:
    """Returns a column per figure of the train lines, and the moves."""
    assert run_ranks(run_training, world, config, run_dir) == ["finished"] * world
    columns = {name: column(run_dir, name) for name in ("loss", "grad_norm")}
    return columns | {"moves": lines(run_dir, "expert_placement")}


def same_state(one: Path, other: Path) -> list[str]:
    """Returns the names of tensors that differ in any bit."""
    return different(newest_state(one), newest_state(other))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list], Path]:
    """Returns the run on one rank, where nothing can move, and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    return run_of(config_of(data), 1, folder), folder


@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 4])
def test_moving_experts_changes_no_bit(ep: int, data: Path, tmp_path: Path) -> None:
    """Without clipping, because the norm is a sum over ranks that rounds by placement."""
    mesh = {"ep": ep, "dispatcher": "alltoall"}
    still = run_of(config_of(data, clip_norm=1e9, **mesh), 4, tmp_path / "still")
    moving = run_of(
        config_of(data, clip_norm=1e9, rebalance_every=2, **mesh), 4, tmp_path / "moving"
    )
    assert still["moves"] == []
    assert [line["step"] for line in moving["moves"]] == [2, 4, 6]
    assert sum(line["moved_experts"] for line in moving["moves"]) > 5
    assert all(line["hottest_after"] <= line["hottest_before"] for line in moving["moves"])
    assert moving["moves"][0]["hottest_after"] < moving["moves"][0]["hottest_before"]
    assert moving["loss"] == still["loss"]
    assert same_state(tmp_path / "still", tmp_path / "moving") == []
    newest = latest(tmp_path / "moving" / "checkpoints")
    assert newest is not None
    saved = read_meta(newest).meta["experts"]
    assert any(bank["homes"]["slot_of_expert"] is not None for bank in saved.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ep", "dispatcher"), [(2, "dedup"), pytest.param(4, "alltoall", marks=pytest.mark.slow)]
)
def test_copies_change_losses_by_rounding_alone(
    ep: int, dispatcher: str, alone: tuple, data: Path, tmp_path: Path
) -> None:
    still, folder = alone
    config = config_of(data, ep=ep, dispatcher=dispatcher, rebalance_every=2, replicas=1)
    moving = run_of(config, 4, tmp_path)
    assert moving["moves"][0]["moved_experts"] > 0
    assert moving["loss"] == pytest.approx(still["loss"], rel=1e-5)
    assert moving["grad_norm"] == pytest.approx(
        still["grad_norm"], rel=1e-4
    )  # each expert counted once
    first, second = newest_state(folder), newest_state(tmp_path)
    for name, tensor in first.items():
        assert (tensor - second[name]).norm() <= 2e-3 * tensor.norm(), name


def copies_after_steps(config: Config, run_dir: Path) -> tuple[int, list[str]]:
    """Returns the number of expert copies, and which tensors differ between copies or replicas."""
    with assembled(config, run_dir) as run, open_loader(run, None) as loader:
        before = {id(parameter) for parameter in run.model.parameters()}
        run = OpenRun(**vars(run), loader=loader, log=MetricsLog(run_dir, active=False))
        for _ in range(STEPS):
            move_experts(run, step(run, next(loader), 1e-3))
        after = {id(parameter) for parameter in run.model.parameters()}
        assert after == before == set(map(id, run.optimizer.state))
        world, ep = run.process.world_size, config.mesh.ep
        expert_maps, unlike, copies = expert_maps_of(run.model), [], 0
        for name, bank in banks_of(run.model).items():
            expert_map = expert_maps[name]
            copies += len(expert_map.copies)
            for parameter_name, parameter in bank.experts.named_parameters():
                state = run.optimizer.state[parameter]
                own = [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
                everywhere: list = [None] * world
                dist.all_gather_object(everywhere, own)
                for expert, slots in enumerate(expert_map.slots_E):
                    held = [
                        [tensor[slot - places.start] for tensor in everywhere[rank]]
                        for rank in range(world)
                        for slot in slots
                        if slot in (places := expert_map.own_slots(rank % ep))
                    ]
                    assert len(held) == len(slots) * world // ep
                    assert held[0][0].any()
                    if not all(all(map(torch.equal, held[0], each)) for each in held):
                        unlike.append(f"{name}.{parameter_name} of expert {expert}")
        return copies, unlike


@pytest.mark.slow
@pytest.mark.parametrize(("ep", "replicas"), [pytest.param(2, 1, marks=pytest.mark.slow), (4, 2)])
def test_copies_stay_equal_bit_for_bit(ep: int, replicas: int, data: Path, tmp_path: Path) -> None:
    config = config_of(data, ep=ep, rebalance_every=3, replicas=replicas)
    for copies, unlike in run_ranks(copies_after_steps, 4, config, tmp_path):
        assert copies >= replicas * ep
        assert unlike == []


PLACED = {"ep": 4, "rebalance_every": 3, "replicas": 1}


@pytest.fixture(scope="module")
def placed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list], Path]:
    """Returns a run on 4 ranks with moves after steps 3 and 6 and a checkpoint of step 4, and its
    folder.
    """
    folder = tmp_path_factory.mktemp("placed")
    config = config_of(data, **PLACED)
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every=4)})
    return run_of(config, 4, folder), folder


def go_on_from_step_4(run: Path, config: Config, world: int, folder: Path) -> dict[str, list]:
    checkpoint = "checkpoints/step_00000004"
    shutil.copytree(run / checkpoint, folder / checkpoint)
    return run_of(config, world, folder)


@pytest.mark.slow
def test_resumed_equals_uninterrupted_bit_for_bit(
    placed: tuple, data: Path, tmp_path: Path
) -> None:
    """Between two moves: the expert maps are restored, with the counts for the next move."""
    whole, folder = placed
    resumed = go_on_from_step_4(folder, config_of(data, **PLACED), 4, tmp_path)
    assert len(whole["loss"]) == STEPS
    assert resumed["loss"] == whole["loss"][4:]
    before, after = (
        [{**line, "time": 0, "seconds": 0} for line in run["moves"]] for run in (whole, resumed)
    )
    assert [line["step"] for line in before] == [3, 6]
    assert after == before[1:]
    assert same_state(folder, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep"), [(1, 1), (4, 2)])
def test_a_placed_checkpoint_is_read_on_any_layout(
    world: int, ep: int, alone: tuple, placed: tuple, data: Path, tmp_path: Path
) -> None:
    config = config_of(data, ep=ep, rebalance_every=3 if ep > 1 else 0)
    moved = go_on_from_step_4(placed[1], config, world, tmp_path)
    assert moved["loss"] == pytest.approx(alone[0]["loss"][4:], rel=1e-5)


def refusals(config: Config, run_dir: Path) -> list[str]:
    """Returns a rank's errors about checkpoints of other models; all ranks meet after each."""
    with assembled(config, run_dir) as run:
        own, before = run.expert_placement.as_dict(), expert_maps_of(run.model)
        first = "group.0.feed_forward.sparse"
        fewer = {"homes": contiguous_map(5, 2).as_dict(), "load": [0] * 5}
        others = [
            {name: bank for name, bank in own.items() if name != first},
            {f"other.{name}": bank for name, bank in own.items()},
            own | {first: fewer},
        ]
        said = []
        for saved in others:
            with pytest.raises(ValueError, match="of another model") as error:
                run.expert_placement.restore(saved)
            said.append(str(error.value))
            dist.barrier()
        assert expert_maps_of(run.model) == before
        run.expert_placement.restore(own)
        return said


def test_a_checkpoint_of_another_model_is_refused_by_every_rank(data: Path, tmp_path: Path) -> None:
    config = config_of(data, ep=2, rebalance_every=2)
    for missing, renamed, fewer in run_ranks(refusals, 2, config, tmp_path):
        assert "(group.0.feed_forward.sparse: 0 saved, 7 here): it is of another model" in missing
        assert renamed.count(" saved, ") == 3
        assert ", …)" in renamed
        assert "(group.0.feed_forward.sparse: 5 saved, 7 here)" in fewer


def counted_and_seen(recipe: str, changes: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Returns for every bank the counted routes of its experts, and those that its layer reports."""
    with meshed(ep=2) as (process, mesh):
        model = model_on(mesh, tiny_config(recipe, changes))
        seen: dict[int, Any] = {}
        for member, layer in enumerate(layers(model)):

            def see(module: Any, given: Any, result: Any, member: int = member) -> None:
                if load := collect_loads([result[1]]).get("feed_forward"):
                    seen[member] = seen.get(member, 0) + load.load_LN[0]

            layer.register_forward_hook(see)
        optimizer = torch.optim.SGD(model.parameters())
        config = MeshConfig(ep=2, rebalance_every=2)
        placement = ExpertPlacement(config, model, optimizer, mesh)
        rows = some_tokens(2, 9, seed=process.rank)
        output = model(rows[:, :-1], targets_BS=rows[:, 1:])
        assert len(model.config.expert_depths) == len(output.loads["feed_forward"].load_LN)
        placement.count({kind: load.load_LN for kind, load in output.loads.items()})
        for load_N in seen.values():
            dist.all_reduce(load_N)
        counted = placement.as_dict()
        names = {member: f"group.{member}.feed_forward.sparse" for member in seen}
        return [(counted[names[member]]["load"], seen[member].tolist()) for member in seen]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("moeut_sandwich", {}),
        ("moeut_sandwich", {"loops.read_out": (1,)}),  # the coda runs twice
        ("moeut_sandwich", {"loops.exit_entropy": 0.1}),
        ("huginn_moe", {}),  # the number of loops is drawn
    ],
)
def test_every_layer_is_counted_as_it_was_used(recipe: str, changes: dict[str, Any]) -> None:
    for banks in run_ranks(counted_and_seen, 2, recipe, changes):
        assert len(banks) > 1
        for counted, seen in banks:
            assert counted == seen
            assert sum(seen) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"ep": 4}, {"ep": 2, "dp_shard": 4, "sharding": "fsdp"}])
def test_ranks_need_not_divide_the_experts(
    mesh: dict, alone: tuple, data: Path, tmp_path: Path
) -> None:
    shared = run_of(config_of(data, dispatcher="alltoall", **mesh), 4, tmp_path)
    assert shared["loss"] == pytest.approx(alone[0]["loss"], rel=1e-6)
    assert shared["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-5)
    [start] = lines(tmp_path, "start")
    assert start["parameters"] == sum(
        parameter.numel() for parameter in Transformer(MODEL).parameters()
    )
