"""`moebius simulate` from the command line: fresh, trained and recorded models, shapes, and what it
says to bad requests.
"""

import json
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from pairwise import slow_but
from world import run_ranks

from moebius.cli.main import main
from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.distributed.layout import MeshConfig
from moebius.evaluation import restore
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.simulation import dispatch as simulate
from moebius.simulation import traffic_report as report
from moebius.simulation.calls import (
    RequestedRanks,
    initial_experts,
    layout_of,
    random_tokens,
    text_tokens,
)
from moebius.simulation.threads import run_threads
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import CheckpointConfig, Config, TrainConfig
from moebius.train.loop import train
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.route_trace import read_rank, recorded_steps

SMALL = [
    "model.d_model=16",
    "model.feed_forward.d_expert=8",
    "model.vocab_size=300",
    "prepare.vocab_size=300",
]


def moebius(*words: str, expect: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words])
    assert ended.value.code == expect


def result(capsys: pytest.CaptureFixture, *words: str) -> dict[str, Any]:
    moebius(*words, "--json")
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four recorded steps of two micro-batches on one rank, with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    words = np.random.default_rng(0).choice(["one", "two", "three", "many", "band"], size=(60, 30))
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(line)}) + "\n" for line in words)
    )
    prepared = PrepareConfig(
        input=(str(folder / "text.jsonl"),), tokenizer="bytes", validation_fraction=0.2
    )
    prepare(prepared, folder / "shards")
    model = ModelConfig(
        vocab_size=257,
        d_model=16,
        num_layers=4,
        layers_per_group=2,
        attention=SwitchHeadConfig(num_heads=2, d_head=8, num_experts=4, top_k=2),
        feed_forward=ExpertsConfig(num_experts=8, router=SigmoidConfig(top_k=3), d_expert=8),
    )
    config = Config(
        model=model,
        data=DataConfig(seq_len=24, directory=str(folder / "shards")),
        prepare=prepared,
        checkpoint=CheckpointConfig(every=0),
        train=TrainConfig(steps=4, global_batch=4, micro_batch=2, eval_rows=4, record_routing=1),
    )
    run = folder / "run"
    run.mkdir()
    config.save(run / "config.json")
    train(config, run)
    return run


# Models of all kinds ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "moeut",
        "switch",
        "gshard",
        "deepseek",
        "sut",
        "x_moe",
        "mh_moe",
        "expert_choice",
        "mixture_of_tokens",
        "soft_moe",
    ],
)
def test_every_kind_of_router_reaches_its_experts(name: str, capsys: pytest.CaptureFixture) -> None:
    tokens = "32" if name in ("expert_choice", "mixture_of_tokens") else "8"
    found = result(
        capsys,
        name,
        "--ep",
        "2",
        "--world-size",
        "4",
        "--tokens-per-rank",
        tokens,
        "--ranks-per-node",
        "2",
    )
    assert found["violations"] == []
    assert (found["world_size"], found["ep"], found["ep_groups"]) == (4, 2, 2)
    for kind in found["experts"]:
        assert sum(kind["load_per_rank"]) == kind["routes"]
    [simulation] = found["dispatchers"]
    assert simulation["bytes_inter_node"] == 0  # an ep group is a node
    assert 0 < simulation["rows"] <= simulation["rows_one_per_route"]


def test_dispatchers_carry_the_same_routes(capsys: pytest.CaptureFixture) -> None:
    names = ["alltoall", "dedup", "allgather", "hierarchical"]
    found = result(
        capsys,
        "smoke",
        *SMALL,
        "--ep",
        "8",
        "--ranks-per-node",
        "4",
        "--tokens-per-rank",
        "16",
        "--dispatcher",
        *names,
    )
    assert [each["dispatcher"] for each in found["dispatchers"]] == names
    assert found["violations"] == []
    alltoall, dedup, _, hierarchical = found["dispatchers"]
    assert alltoall["rows"] == alltoall["rows_one_per_route"] == dedup["rows_one_per_route"]
    assert all(call["difference"] == 0 for call in alltoall["calls"])
    assert any(call["difference"] > 0 for call in dedup["calls"])
    assert (
        hierarchical["bytes_inter_node"] < dedup["bytes_inter_node"] < alltoall["bytes_inter_node"]
    )
    for each in found["dispatchers"]:
        matrix = np.array(each["bytes_by_pair"])
        node = np.arange(8) // 4
        assert each["bytes_inter_node"] == matrix[node[:, None] != node].sum()
        assert [call["load_per_expert"] for call in each["calls"]] == [
            call["load_per_expert"] for call in alltoall["calls"]
        ]


def test_steps_differ_and_seeds_repeat(capsys: pytest.CaptureFixture) -> None:
    words = ("smoke", *SMALL, "--ep", "2", "--tokens-per-rank", "8", "--steps", "2")
    first, again, other = (result(capsys, *words, "--seed", seed) for seed in ("0", "0", "1"))
    assert first == again != other
    calls = first["dispatchers"][0]["calls"]
    assert {call["step"] for call in calls} == {1, 2}
    loads = [[call["load_per_expert"] for call in calls if call["step"] == step] for step in (1, 2)]
    assert loads[0] != loads[1]


def test_the_tokens_of_a_rank_do_not_depend_on_the_others() -> None:
    config = resolve("smoke", SMALL, RECIPES)
    few, many = (random_tokens(config, 2, 8, seed=3, num_ranks=count) for count in (2, 256))
    drawn = {(step, rank): many(step, rank) for step in (1, 2) for rank in (0, 1, 255)}
    assert all(
        torch.equal(few(step, rank), drawn[step, rank]) for step in (1, 2) for rank in (0, 1)
    )
    assert len({tuple(tokens.flatten().tolist()) for tokens in drawn.values()}) == len(drawn)


def test_bfloat16(capsys: pytest.CaptureFixture) -> None:
    found = result(
        capsys,
        "smoke",
        *SMALL,
        "train.precision=bfloat16",
        "--ep",
        "2",
        "--tokens-per-rank",
        "8",
        "--dispatcher",
        "alltoall",
        "dedup",
    )
    assert found["violations"] == []
    exact = result(
        capsys, "smoke", *SMALL, "--ep", "2", "--tokens-per-rank", "8", "--dispatcher", "alltoall"
    )
    half, whole = found["dispatchers"][0], exact["dispatchers"][0]
    assert half["bytes_intra_node"] < 0.7 * whole["bytes_intra_node"]


# A trained run ------------------------------------------------------------------------------------


def test_a_trained_run_routes_its_validation_text(
    run_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    found = result(capsys, str(run_dir), "--ep", "4", "--tokens-per-rank", "24", "--steps", "2")
    assert found["title"] == "run, step 4"
    assert "1 × 24 tokens of the validation text" in found["tokens"]
    assert found["violations"] == []


def test_a_trace_on_one_rank_is_what_was_recorded(
    run_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    found = result(capsys, "--trace", str(run_dir), "--ep", "1")
    recorded = [
        call for files in recorded_steps(run_dir).values() for call in read_rank(files[0]).calls
    ]
    calls = found["dispatchers"][0]["calls"]
    assert len(calls) == len(recorded) == 4 * 2 * 12
    for call, then in zip(calls, recorded, strict=True):
        assert call["load_per_expert"] == np.bincount(then.routes.expert_N, minlength=8).tolist()
        assert (call["kind"], call["depth"], call["micro_batch"]) == (
            then.id.kind,
            then.id.depth,
            then.id.micro_batch,
        )


@pytest.mark.parametrize(
    "ranks",
    slow_but([("--ep", "8"), ("--ep", "4", "--world-size", "12"), ("--ep", "3")], ("--ep", "3")),
)
def test_a_trace_is_dealt_to_any_number_of_ranks(
    ranks: tuple, run_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    one, many = (
        result(capsys, "--trace", str(run_dir), "--steps", "2", *words)
        for words in (("--ep", "1"), ranks)
    )
    assert many["violations"] == []
    for then, now in zip(
        one["dispatchers"][0]["calls"], many["dispatchers"][0]["calls"], strict=True
    ):
        assert now["load_per_expert"] == then["load_per_expert"]
        assert sum(now["load_per_rank"]) == sum(then["load_per_rank"])


def test_some_steps_of_a_trace(run_dir: Path, capsys: pytest.CaptureFixture) -> None:
    found = result(capsys, "--trace", str(run_dir), "--ep", "2", "--steps", "2")
    assert sorted({call["step"] for call in found["dispatchers"][0]["calls"]}) == [1, 4]


# A run that moves its experts ---------------------------------------------------------------------


def train_on_ranks(config: Config, run: Path) -> str:
    return train(config, run)


@pytest.fixture(scope="module")
def moving_run(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on two ranks, whose experts move after every second step, with copies; checkpoints
    after every step.
    """
    run = tmp_path_factory.mktemp("moving")
    config = Config.load(run_dir / "config.json").model_copy(
        update={
            "mesh": MeshConfig(ep=2, dp_replicate=1, rebalance_every=2, replicas=1),
            "checkpoint": CheckpointConfig(every=1, keep_last=4),
        }
    )
    config.save(run / "config.json")
    assert run_ranks(train_on_ranks, 2, config, run) == ["finished"] * 2
    return run


def hottest_at(found: dict[str, Any], step: int) -> dict[str, float]:
    """By "member/kind", as metrics.jsonl has it: the busiest rank's routes over the mean."""
    loads: dict[str, Any] = {}
    for call in found["dispatchers"][0]["calls"]:
        if call["step"] == step:
            name = f"{call['layer'].split('.')[1]}/{call['kind']}"
            loads[name] = loads.get(name, 0) + np.array(call["load_per_rank"])
    return {name: round(load_P.max() / load_P.mean(), 5) for name, load_P in loads.items()}


@pytest.mark.slow
def test_a_trace_with_the_homes_of_a_checkpoint_loads_ranks_as_training_did(
    moving_run: Path, capsys: pytest.CaptureFixture
) -> None:
    lines = [json.loads(line) for line in (moving_run / "metrics.jsonl").read_text().splitlines()]
    served = {
        line["step"]: {name: figures["hottest_rank"] for name, figures in line["exchange"].items()}
        for line in lines
        if line["kind"] == "train"
    }
    trace = ("--trace", str(moving_run))
    placed, plain = (result(capsys, *trace, *words) for words in (("--expert-map", "2"), ()))
    assert placed["violations"] == plain["violations"] == []
    assert "experts where they were at step 2" in placed["tokens"]
    assert "experts in contiguous blocks, none moved" in plain["tokens"]
    for step in (1, 2):  # before the first move
        assert hottest_at(plain, step) == served[step] != hottest_at(placed, step)
    for step in (3, 4):  # before the second
        assert hottest_at(placed, step) == served[step] != hottest_at(plain, step)


def test_a_run_is_simulated_with_its_experts_where_they_are(
    moving_run: Path, capsys: pytest.CaptureFixture
) -> None:
    words = (str(moving_run), "--tokens-per-rank", "24")
    placed, plain, other = (
        result(capsys, *words, *more)
        for more in ((), ("--expert-map", "contiguous"), ("--ep", "4"))
    )
    assert placed["violations"] == plain["violations"] == other["violations"] == []
    assert placed["tokens"].endswith("; experts where they were at step 4")
    assert plain["tokens"].endswith("; experts in contiguous blocks, none moved")
    assert other["tokens"].endswith("none moved (those of step 4 are for ep 2)")
    assert hottest_at(placed, 1) != hottest_at(plain, 1)
    for one, two in zip(
        placed["dispatchers"][0]["calls"], plain["dispatchers"][0]["calls"], strict=True
    ):
        assert one["load_per_expert"] == two["load_per_expert"]


def test_homes_that_are_not_there(
    moving_run: Path, run_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    for words, message in (
        (
            ("--trace", str(moving_run), "--expert-map", "2", "--ep", "4"),
            "--expert-map 2: its experts are spread over 2 ranks, and not",
        ),
        (
            ("--trace", str(moving_run), "--expert-map", "7"),
            "has no checkpoint of step 7; there are those of 1, 2, 3, 4",
        ),
        (
            ("--trace", str(run_dir), "--expert-map", "4"),
            "--expert-map 4: run moved no experts up to there",
        ),
        (("smoke", "--expert-map", "4"), "--expert-map 4: fresh weights have no checkpoint"),
        (
            ("smoke", "--expert-map", "newest"),
            "--expert-map newest: write the step of a checkpoint, or contiguous",
        ),
        (
            ("smoke", "--shapes-only", "--expert-map", "4"),
            "--expert-map 4: means nothing with --shapes-only",
        ),
    ):
        moebius(*words, expect=2)
        [printed] = capsys.readouterr().err.strip().splitlines()
        assert message in printed, words


@pytest.mark.parametrize(
    ("expert_map", "message"),
    [
        ("newest", "--expert-map newest: write the step of a checkpoint, or contiguous"),
        ("7", "has no checkpoint of step 7; there are those of 1, 2, 3, 4"),
    ],
)
def test_bad_homes_are_refused_before_the_model_is_read(
    expert_map: str,
    message: str,
    moving_run: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_early(*_: Any) -> None:
        raise AssertionError("the model was restored")

    monkeypatch.setattr(restore, "restore", too_early)
    moebius(str(moving_run), "--expert-map", expert_map, expect=2)
    [printed] = capsys.readouterr().err.strip().splitlines()
    assert message in printed


# For people ---------------------------------------------------------------------------------------


def test_words_and_picture(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    picture = tmp_path / "traffic.png"
    names = ("alltoall", "dedup")
    moebius(
        "--trace",
        str(run_dir),
        "--steps",
        "2",
        "--ep",
        "4",
        "--png",
        str(picture),
        "--dispatcher",
        *names,
    )
    printed = capsys.readouterr().out
    assert "trace of run: 4 ranks, one ep group, one node" in printed
    assert "2 recorded steps, 1 to 4, of 96 tokens; ranks: 1 then, 4 now; float32" in printed
    assert "✓ each of" in printed
    assert "alltoall bit for bit; dedup up to rounding" in printed
    assert "hottest rank by step" in printed
    assert "load by rank" in printed
    assert "…" not in printed  # nothing is cut at 80 columns
    assert [
        line.split()[0]
        for line in printed.splitlines()
        if line.strip() and line.strip()[0].isdigit()
    ][-4:] == list("0123")
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) > (800, 400)


def test_what_would_say_nothing_is_left_out() -> None:
    """No bars of more ranks than lines can hold, and no course over a single moment."""
    load_P = np.array([1, 0, 2, 1])
    own: Any = SimpleNamespace(step=1, depth=0, kind="feed_forward")
    call: Any = SimpleNamespace(
        id=own, load_P=load_P, load_E=load_P, routes=4, hottest_rank=2.0, hottest_expert=2.0
    )
    found: Any = SimpleNamespace(
        first=SimpleNamespace(calls=[call]), layout=SimpleNamespace(world_size=128)
    )
    assert report._bar_lines(found)[-1].split() == ["feed_forward", "▅▁█▅"]
    found.layout.world_size = 129
    assert report._bar_lines(found) == []
    assert report._time_lines(found) == []
    found.first.calls.append(
        SimpleNamespace(id=SimpleNamespace(step=1, depth=1, kind="feed_forward"), hottest_rank=3.0)
    )
    assert report._time_lines(found)[-1].split() == ["feed_forward", "2.00", "3.00"]


def test_the_picture_parts_the_nodes() -> None:
    simulation: Any = SimpleNamespace(
        bytes_PP=np.ones((6, 6)), cluster=SimpleNamespace(ranks_per_node=2), dispatcher="dedup"
    )
    figure = Figure()
    panel = figure.subplots()
    report._draw_matrix(figure, panel, simulation)
    lines = list(panel.lines)
    across = [np.asarray(line.get_ydata()).tolist() for line in lines[::2]]
    down = [np.asarray(line.get_xdata()).tolist() for line in lines[1::2]]
    assert across == down == [[1.5, 1.5], [3.5, 3.5]]
    panel.clear()
    simulation.cluster.ranks_per_node = None  # one node
    report._draw_matrix(figure, panel, simulation)
    assert not panel.lines


def test_a_fault_is_shown_and_ends_with_1(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "TOLERANCE", {torch.float32: 0.0})
    moebius(
        "smoke", *SMALL, "--ep", "4", "--tokens-per-rank", "8", "--dispatcher", "dedup", expect=1
    )
    printed = capsys.readouterr().out
    assert "✗ dedup: step 1, micro-batch 0, depth step" in printed
    assert "✓" not in printed


def disagree(*_: Any) -> None:
    """About one exchange of two ranks."""
    received = [1, 1 + (dist.get_rank() == 0)]
    dist.all_to_all_single(torch.empty(sum(received), 3), torch.ones(2, 3), received, [1, 1])


@pytest.mark.parametrize(
    ("fail", "printed"),
    [
        (disagree, "ExchangeMismatch: rank 1 of the group sends 1 rows to rank 0, which expects 2"),
        (
            lambda *_: torch.empty(2**50),
            r"RuntimeError: .*you tried to allocate 4503599627370496 bytes.*",
        ),
        (lambda *_: np.empty(2**50), r"MemoryError: Unable to allocate 8\.00 PiB .*"),
    ],
    ids=["mismatch", "memory of torch", "memory of numpy"],
)
def test_what_a_user_understands_is_told_in_one_line(
    fail: Any, printed: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "_arrived", fail)
    moebius("smoke", *SMALL, "--ep", "2", "--tokens-per-rank", "4", expect=1)
    [line] = capsys.readouterr().err.strip().splitlines()
    assert re.fullmatch(rf"error: simulated rank \d of 2: {printed}", line)


def test_a_late_rank_is_told_in_one_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_in_vain(*_: Any, **__: Any) -> None:
        run_threads(lambda rank: rank == 1 or dist.all_reduce(torch.zeros(1)), 2, timeout_s=0.3)

    monkeypatch.setattr(simulate, "run_threads", wait_in_vain)
    moebius("smoke", *SMALL, "--ep", "2", "--tokens-per-rank", "4", expect=1)
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line == "error: for 0.3 s nothing moved: the simulated ranks 0 still wait for others"


@pytest.mark.parametrize("error", [AssertionError, RuntimeError, KeyError])
def test_a_mistake_of_ours_is_told_with_its_traceback(
    error: type[Exception], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_here(*_: Any) -> None:
        raise error("rows do not fit\n  where: dispatch")

    monkeypatch.setattr(simulate, "_arrived", fail_here)
    moebius("smoke", *SMALL, "--ep", "2", "--tokens-per-rank", "4", expect=1)
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback (most recent call last):")
    assert re.search(r'File ".*dispatch\.py", line \d+, in run\n', printed)
    assert re.search(r'File ".*test_request\.py", line \d+, in fail_here\n', printed)
    assert re.match(
        rf"error: simulated rank \d of 2: {error.__name__}: .?rows do not fit",
        printed.splitlines()[-1],
    )


def test_a_rank_without_what_its_tables_say_is_told_in_one_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moebius.simulation import shapes as simulate_shapes

    monkeypatch.setattr(simulate_shapes, "expert_blocks", lambda *_: [range(3)])
    moebius("smoke", *SMALL, "--shapes-only", "--ep", "2", expect=1)
    [printed] = capsys.readouterr().err.strip().splitlines()
    assert printed.startswith("error: group.0.")
    assert printed.endswith("the ranks of an ep group hold the experts [0, 1, 2]")


@pytest.mark.slow
def test_shapes_of_a_large_world(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    batch = "train.global_batch=40960"
    moebius("smoke", batch, "--shapes-only", "--ep", "8", "--world-size", "10240")
    printed = capsys.readouterr().out
    assert "world 10240 = dp_replicate 1280" in printed
    assert "rank 10,239: value experts 14-15 of 16, 2×128×32" in printed
    assert "…" not in printed
    moebius(
        "smoke", batch, "--shapes-only", "--ep", "8", "--world-size", "1024", "--json", expect=0
    )
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 512, 1023]
    assert found["refused"] is None


def test_shapes_that_training_would_refuse(capsys: pytest.CaptureFixture) -> None:
    moebius("smoke", "--shapes-only", "--ep", "8", "--world-size", "1024", expect=1)
    assert (
        "training would refuse it: train.global_batch=16 is not a multiple of 1024 ranks"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("overrides", "ranks", "expected"),
    [
        ([], RequestedRanks(), (4, 2)),  # as the mesh says: ep 2, twice
        (["mesh.dp_replicate=3"], RequestedRanks(), (6, 2)),
        (["mesh.ep=1"], RequestedRanks(), (16, 8)),
        ([], RequestedRanks(ep=8), (8, 8)),
        ([], RequestedRanks(world_size=8), (8, 2)),
        (["mesh.dp_shard=8"], RequestedRanks(ep=4), (8, 4)),
    ],
)
def test_ranks_are_as_asked_or_as_the_mesh_says(
    overrides: list[str], ranks: RequestedRanks, expected: tuple[int, int]
) -> None:
    layout, _ = layout_of(resolve("smoke", overrides, RECIPES), ranks)
    assert (layout.world_size, layout.ep) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name what to simulate"),
        (("smoke", "--trace", "x"), "name what to simulate"),
        (("nowhere",), "there is no recipe 'nowhere'"),
        (("smoke", "--ep", "32"), "mesh.ep 32 is more than the experts"),
        (("smoke", "--ep", "0"), "--ep 0: at least 1"),
        (("smoke", "--ep", "8", "--world-size", "12"), "the mesh does not fit the world"),
        (
            ("smoke", "--ep", "8", "--world-size", "1024"),
            "with real values there may be 256 at most; --shapes-only",
        ),
        (
            ("smoke", "--ep", "8", "--ranks-per-node", "3"),
            "--ranks-per-node 3 does not divide the 8 ranks",
        ),
        (("smoke", "--ep", "4", "--dispatcher", "local"), "the experts are on several ranks"),
        (
            ("smoke", "--ep", "4", "--dispatcher", "allgather", "--overlap-chunks", "2"),
            "allgather dispatcher has no chunks",
        ),
        (("smoke", "--steps", "0"), "--steps 0: at least 1"),
        (("smoke", "--seed", "-1"), "--seed -1: from 0 to"),
        (
            ("smoke", "--ep", "2", "mesh.tp=2"),
            "pipeline, context and tensor parallelism (pp, cp, tp) cannot run yet",
        ),
        (
            ("smoke", "--shapes-only", "mesh.rebalance_every=5", "mesh.replicas=1"),
            "builds no slots for copies of experts",
        ),
        (
            ("smoke", "--shapes-only", "--png", "x.png"),
            "--png x.png: means nothing with --shapes-only",
        ),
        (
            ("smoke", "--shapes-only", "--dispatcher", "dedup", "alltoall"),
            "builds a model with one dispatcher",
        ),
        (
            ("--trace", "x", "--tokens-per-rank", "8"),
            "--tokens-per-rank 8: means nothing with --trace",
        ),
        (("smoke", "--tokens-per-rank", "0"), "--tokens-per-rank 0: at least 1"),
        (
            ("smoke", "--tokens-per-rank", "9" * 20),
            f"--tokens-per-rank {'9' * 20}: at most 16,777,216",
        ),
        (("dense", "--ep", "2"), "the model has no experts: there is nothing to route"),
        (("mixture_of_tokens", "--tokens-per-rank", "4"), "the router wants groups of"),
        (("--trace", "nowhere"), "is not a run folder"),
        (("--shapes-only", "--trace", "x"), "--shapes-only builds a model"),
        (
            ("smoke", "--shapes-only", "--ep", "8", "--world-size", "20480"),
            "20480 pretended ranks: there may be 1 to 10,240",
        ),
    ],
)
def test_bad_requests_are_answered_in_one_line(
    words: tuple, message: str, capsys: pytest.CaptureFixture
) -> None:
    moebius(*words, expect=2)
    printed = capsys.readouterr().err.strip().splitlines()
    assert message in printed[-1]
    assert printed[-1].startswith("error: ")
    assert len(printed) == 1


def test_a_run_is_simulated_as_it_is(run_dir: Path, capsys: pytest.CaptureFixture) -> None:
    for words in (
        ("model.feed_forward.num_experts=4",),
        ("--shapes-only", "model.feed_forward.num_experts=4"),
    ):
        moebius(str(run_dir), *words, expect=2)
        assert (
            "is a run and is simulated as it is: leave out model.feed_forward.num_experts=4"
            in capsys.readouterr().err
        )


def test_a_run_without_a_recording_is_told_how_to_record(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "config.json").write_bytes((run_dir / "config.json").read_bytes())
    moebius("--trace", str(tmp_path), expect=2)
    assert "has no recorded routing; train with train.record_routing=N" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    moebius(
        "smoke",
        *SMALL,
        "--ep",
        "2",
        "--tokens-per-rank",
        "4",
        "--png",
        str(tmp_path / "no" / "a.png"),
        expect=2,
    )
    assert "cannot be written" in capsys.readouterr().err


def test_a_layer_that_the_model_has_not_is_named() -> None:
    config = resolve("smoke", SMALL, RECIPES)
    experts_of_layer = initial_experts(config.model, "float32", backend="segments", seed=0)
    with pytest.raises(
        ValueError, match=r"group.9.feed_forward was recorded, but the model has no"
    ):
        experts_of_layer("group.9.feed_forward")


def test_outputs_of_another_shape_are_infinitely_far_apart() -> None:
    assert simulate._difference(torch.zeros(2, 3), torch.zeros(3, 2)) == float("inf")
    assert simulate._difference(torch.tensor([1.0]), torch.tensor([1.5])) == 0.5


def test_a_split_that_is_shorter_than_a_sequence_is_named(run_dir: Path) -> None:
    config = Config.load(run_dir / "config.json")
    with pytest.raises(ValueError, match="its validation split has not one row of 9999999 tokens"):
        text_tokens(config, 1, 9_999_999, seed=0, num_ranks=1)
