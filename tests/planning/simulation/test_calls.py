"""`moebius simulate` from the command line: fresh and trained models, refusals."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_model
import torch
import torch.distributed as dist
from bytes_run import prepare_bytes
from parts import make_config
from world import run_ranks

from moebius.cli.main import main
from moebius.planning.simulation import dispatch as simulate
from moebius.planning.simulation.calls import expert_maps_of, random_tokens, text_tokens
from moebius.planning.simulation.ranks import RequestedRanks, layout_of
from moebius.planning.simulation.threads import run_threads
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.loop import train
from moebius.train.recipes.smoke import RECIPES

Command = Callable[..., Any]  # the fixture `moebius`
SMALL = (
    *("smoke", "model.d_model=16", "model.feed_forward.d_expert=8"),
    *("model.vocab_size=300", "prepare.vocab_size=300"),
)
FEW = (*SMALL, "--ep", "2", "--tokens-per-rank", "4")
MODEL = small_model.MODEL.changed(
    {"d_model": 16, "attention.d_head": 8, "feed_forward.d_expert": 8}
)


def result(moebius: Command, *words: object) -> dict[str, Any]:
    answer = moebius("simulate", *words, "--json")
    assert answer.code == 0, answer.text
    found = json.loads(answer.out)
    assert found["violations"] == []
    return found


def calls_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    return found["dispatchers"][0]["calls"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of two micro-batches on one rank, with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    shards = prepare_bytes(folder)
    config = make_config(
        shards,
        model=MODEL,
        data__seq_len=24,
        train={"global_batch": 4, "micro_batch": 2, "eval_rows": 4},
    )
    run = folder / "run"
    run.mkdir()
    config.save(run / "config.json")
    train(config, run)
    return run


# Models of all kinds ------------------------------------------------------------------------------


ROUTERS = (
    *("moeut", "switch", "gshard", "deepseek", "sut", "x_moe", "mh_moe", "expert_choice"),
    *("mixture_of_tokens", "soft_moe"),
)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_kind_of_router_reaches_its_experts(name: str, moebius: Command) -> None:
    tokens = "32" if name in ("expert_choice", "mixture_of_tokens") else "8"
    ranks = ("--ep", "2", "--world-size", "4", "--ranks-per-node", "2")
    found = result(moebius, name, *ranks, "--tokens-per-rank", tokens)
    assert (found["world_size"], found["ep"], found["ep_groups"]) == (4, 2, 2)
    for kind in found["experts"]:
        assert sum(kind["load_per_rank"]) == kind["routes"]
    [simulation] = found["dispatchers"]
    assert simulation["bytes_inter_node"] == 0  # an ep group is a node
    assert 0 < simulation["rows"] <= simulation["rows_one_per_route"]


def test_dispatchers_carry_the_same_routes(moebius: Command) -> None:
    names = ["alltoall", "dedup", "allgather", "hierarchical"]
    ranks = ("--ep", "8", "--ranks-per-node", "4", "--tokens-per-rank", "16")
    found = result(moebius, *SMALL, *ranks, "--dispatcher", *names)
    assert [each["dispatcher"] for each in found["dispatchers"]] == names
    alltoall, dedup, _, hierarchical = found["dispatchers"]
    assert alltoall["rows"] == alltoall["rows_one_per_route"] == dedup["rows_one_per_route"]
    assert all(call["difference"] == 0 for call in alltoall["calls"])
    assert any(call["difference"] > 0 for call in dedup["calls"])
    between = [each["bytes_inter_node"] for each in (hierarchical, dedup, alltoall)]
    assert between == sorted(between)
    loads = [call["load_E"] for call in alltoall["calls"]]
    for each in found["dispatchers"]:
        matrix, node = np.array(each["bytes_by_pair"]), np.arange(8) // 4
        assert each["bytes_inter_node"] == matrix[node[:, None] != node].sum()
        assert [call["load_E"] for call in each["calls"]] == loads


def test_steps_differ_and_seeds_repeat(moebius: Command) -> None:
    words = (*FEW, "--steps", "2")
    first, again, other = (result(moebius, *words, f"train.seed={seed}") for seed in (0, 0, 1))
    assert first == again != other
    loads = [[c["load_E"] for c in calls_of(first) if c["step"] == step] for step in (1, 2)]
    assert loads[0] != loads[1]


def test_the_tokens_of_a_rank_do_not_depend_on_the_others() -> None:
    config = resolve("smoke", SMALL[1:], RECIPES)
    few, many = (random_tokens(config, 2, 8, num_ranks=count) for count in (2, 256))
    drawn = {(step, rank): many(step, rank) for step in (1, 2) for rank in (0, 1, 255)}
    for step in (1, 2):
        for rank in (0, 1):
            assert torch.equal(few(step, rank), drawn[step, rank])
    assert len({tuple(tokens.flatten().tolist()) for tokens in drawn.values()}) == len(drawn)


def test_bfloat16(moebius: Command) -> None:
    dispatchers = ("--dispatcher", "alltoall", "dedup")
    half, whole = (
        result(moebius, *FEW, f"train.precision={precision}", *dispatchers)["dispatchers"][0]
        for precision in ("bfloat16", "float32")
    )
    assert half["bytes_intra_node"] < 0.7 * whole["bytes_intra_node"]


# A trained run ------------------------------------------------------------------------------------


def test_a_trained_run_routes_its_validation_text(run_dir: Path, moebius: Command) -> None:
    found = result(moebius, run_dir, "--ep", "4", "--tokens-per-rank", "24", "--steps", "2")
    assert found["title"] == "run, step 4"
    assert "1 × 24 tokens of the validation text" in found["tokens"]


# A run that moves its experts ---------------------------------------------------------------------


def train_on_ranks(config: Config, run: Path) -> str:
    return train(config, run)


@pytest.fixture(scope="module")
def moving_run(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on two ranks, whose experts move after every second step, with copies."""
    run = tmp_path_factory.mktemp("moving")
    values = Config.load(run_dir / "config.json").model_dump(mode="json")
    values["mesh"] |= {"ep": 2, "dp_replicate": 1, "rebalance_every": 2, "replicas": 1}
    values["checkpoint"] |= {"every": 1, "keep_last": 4}
    config = Config.model_validate(values)
    config.save(run / "config.json")
    assert run_ranks(train_on_ranks, 2, config, run) == ["finished"] * 2
    return run


def test_a_run_is_simulated_with_its_experts_where_they_are(
    moving_run: Path, moebius: Command
) -> None:
    words = (moving_run, "--tokens-per-rank", "24")
    placed = result(moebius, *words)
    moved = expert_maps_of(moving_run, 4)["group.0.feed_forward.sparse"]
    [call, *_] = [c for c in calls_of(placed) if c["layer"] == "group.0.feed_forward.sparse"]
    alone = moved.seen_from(0).slots_of(torch.arange(8))
    assert len(call["load_P"]) == len(moved.slots_P) == 2
    assert sorted({moved.rank_S[slot] for slot in alone.tolist()}) == [0, 1]
    blocks = [sum(call["load_E"][:4]), sum(call["load_E"][4:])]
    assert call["load_P"] != blocks
    result(moebius, *words, "--ep", "4")  # groups of another size use contiguous blocks


# Output --------------------------------------------------------------------------------------------


def test_tables(run_dir: Path, moebius: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = (run_dir, "--steps", "2", "--ep", "4", "--tokens-per-rank", "24")
    printed = moebius("simulate", *words, "--dispatcher", "alltoall", "dedup").out
    for expected in (
        "run, step 4: 4 ranks, one ep group, one node",
        "1 × 24 tokens of the validation text per rank and step, 2 steps, float32",
        "✓ each of",
        "alltoall bit for bit; dedup up to rounding",
    ):
        assert expected in printed
    assert "…" not in printed  # nothing is cut at 80 columns


def test_a_violation_is_shown_and_ends_with_1(
    moebius: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "TOLERANCE", {torch.float32: 0.0})
    words = (*SMALL, "--ep", "4", "--tokens-per-rank", "8", "--dispatcher", "dedup")
    answer = moebius("simulate", *words)
    assert answer.code == 1
    assert "✗ dedup: step 1, depth step" in answer.out
    assert "✓" not in answer.out


def disagree(*_: Any) -> None:
    """Makes two ranks disagree about one exchange."""
    received = [1, 1 + (dist.get_rank() == 0)]
    dist.all_to_all_single(torch.empty(sum(received), 3), torch.ones(2, 3), received, [1, 1])


@pytest.mark.parametrize(
    ("fail", "printed"),
    [
        (disagree, "ExchangeMismatch: rank 1 of the group sends 1 rows to rank 0, which expects 2"),
        (lambda *_: torch.empty(2**50), r"RuntimeError: .*tried to allocate 4503599627370496 .*"),
        (lambda *_: np.empty(2**50), r"MemoryError: Unable to allocate 8\.00 PiB .*"),
    ],
    ids=["mismatch", "memory of torch", "memory of numpy"],
)
def test_an_error_that_a_user_understands_is_one_line(
    fail: Any, printed: str, moebius: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "_arrived", fail)
    answer = moebius("simulate", *FEW)
    [line] = answer.err.strip().splitlines()
    assert answer.code == 1
    assert re.fullmatch(rf"error: simulated rank \d of 2: {printed}", line)


def test_a_late_rank_is_one_line(moebius: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_in_vain(*_: Any, **__: Any) -> None:
        run_threads(lambda rank: rank == 1 or dist.all_reduce(torch.zeros(1)), 2, timeout_s=0.3)

    monkeypatch.setattr(simulate, "run_threads", wait_in_vain)
    answer = moebius("simulate", *FEW)
    expected = "error: no progress for 0.3 s: simulated ranks 0 are still waiting for others"
    assert (answer.code, answer.err.strip()) == (1, expected)


@pytest.mark.parametrize("error", [AssertionError, RuntimeError, KeyError])
def test_a_mistake_of_ours_comes_with_its_traceback(
    error: type[Exception], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_here(*_: Any) -> None:
        raise error("rows do not fit\n  where: dispatch")

    monkeypatch.setattr(simulate, "_arrived", fail_here)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *FEW])
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert printed.startswith("Traceback (most recent call last):")
    assert re.search(r'File ".*test_calls\.py", line \d+, in fail_here\n', printed)
    last = printed.splitlines()[-1]
    assert re.match(rf"error: simulated rank \d of 2: {error.__name__}: .?rows do not fit", last)


# Requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "ranks", "expected"),
    [
        ([], RequestedRanks(), (4, 2)),  # the mesh: ep 2, twice
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
        ("nowhere", "there is no recipe 'nowhere'"),
        ("smoke --ep 32", "mesh.ep 32 is more than the experts"),
        ("smoke --ep 0", "--ep 0 must be at least 1"),
        ("smoke --ep 8 --world-size 12", "the mesh does not fit the world"),
        ("smoke --ep 8 --world-size 1024", "at most 256 can be simulated"),
        ("smoke --ep 8 --ranks-per-node 3", "--ranks-per-node 3 must divide the 8 ranks"),
        ("smoke --ep 4 --dispatcher local", "the experts are on several ranks"),
        ("smoke --steps 0", "--steps 0 must be at least 1"),
        ("smoke --tokens-per-rank 0", "--tokens-per-rank 0 must be at least 1"),
        (f"smoke --tokens-per-rank {'9' * 20}", "at most 16,777,216"),
        ("dense --ep 2", "the model has no experts, so there is nothing to route"),
        ("mixture_of_tokens --tokens-per-rank 4", "the router needs groups of"),
    ],
)
def test_bad_requests_are_answered_in_one_line(words: str, message: str, moebius: Command) -> None:
    answer = moebius("simulate", *words.split())
    [printed] = answer.err.strip().splitlines()
    assert answer.code == 2
    assert printed.startswith("error: ")
    assert message in printed


def test_a_run_is_simulated_as_it_is(run_dir: Path, tmp_path: Path, moebius: Command) -> None:
    change = "model.feed_forward.num_experts=4"
    assert f"remove {change}" in moebius("simulate", run_dir, change).text
    assert "is not a run folder" in moebius("simulate", tmp_path).text


def test_a_split_that_is_shorter_than_a_sequence_is_named(run_dir: Path) -> None:
    config = Config.load(run_dir / "config.json")
    with pytest.raises(ValueError, match="shorter than one row of 9999999 tokens"):
        text_tokens(config, 1, 9_999_999, num_ranks=1)
