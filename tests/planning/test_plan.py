"""`moebius plan`: which layouts it tries, which is best, and what it prints."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebius.planning.cost_model import predict
from moebius.planning.hardware import HARDWARE, Hardware, find_hardware
from moebius.planning.planner import Constraints, rank_plans
from moebius.planning.prediction import LayoutCandidate, Scenario
from moebius.planning.routing_skew import FULL, RoutingSkew, recorded_skew
from moebius.planning.workload import Bank, Member, Workload
from moebius.train.config.resolve import resolve
from moebius.train.recipes.smoke import RECIPES

H200 = HARDWARE["h200"]
BANK = Bank("feed_forward", "feed_forward", 5, 2, 8, 8, 1, 1)
HEADER = "GPUs layout ep shard dispatcher recompute GB ms c+x+w % tok/s MFU"


def scenario(experts: int = 16, tokens: int = 4096, d_model: int = 512) -> Scenario:
    weights = 8 * d_model**2
    bank = Bank("feed_forward", "feed_forward", experts, 2, d_model, d_model, weights, 4 * d_model)
    member = Member(4.0 * d_model**2, (bank,), copies=2, repeats=4)
    work = Workload(
        (member,), 16_000.0 * d_model, 64.0 * d_model**2, 272.0 * d_model, d_model, 8000, "bfloat16"
    )
    return Scenario(work, H200, tokens, RoutingSkew())


# The search ---------------------------------------------------------------------------------------


def test_every_layout_is_there_and_takes_the_fastest_way_that_fits() -> None:
    """All pairs of ep and dp_shard, sharded or not, counted by hand for one node and 16 experts."""
    base = scenario(tokens=16_384)
    plans = rank_plans(base, 1, Constraints())
    layouts = {
        (plan.candidate.ep, plan.candidate.dp_shard, plan.candidate.sharding) for plan in plans
    }
    assert {plan.candidate.world_size for plan in plans} == {8}
    rates = [plan.tokens_per_s for plan in plans if plan.fits]
    assert rates == sorted(rates, reverse=True)
    whole = {(ep, ep, "none") for ep in (1, 2, 4, 8)}
    sharded = {(ep, shard, "fsdp") for ep in (1, 2, 4, 8) for shard in (2, 4, 8) if shard % ep == 0}
    assert layouts == whole | sharded
    for plan in plans:
        for name in ("allgather", "alltoall", "dedup") if plan.candidate.ep > 1 else ():
            other = predict(base, replace(plan.candidate, dispatcher=name, recompute="none"))
            assert not other.fits or other.tokens_per_s <= plan.tokens_per_s * (1 + 1e-9)


def test_recomputation_comes_when_memory_ends_or_is_asked_for() -> None:
    base = scenario(tokens=65_536)
    needed = predict(base, LayoutCandidate(1, 8, 1, "fsdp", "local")).memory.total
    for share, expected in ((1.01, "none"), (0.9, "selective")):
        machine = replace(H200, memory_bytes=needed * share / H200.usable_memory)
        ranked = rank_plans(replace(base, hardware=machine), 1, Constraints(1, "fsdp"))
        [plan] = [plan for plan in ranked if plan.candidate.dp_shard == 8]
        assert plan.candidate.recompute == expected
    [plan] = rank_plans(base, 4, Constraints(4, "none", "alltoall", "full"))
    assert plan.candidate == LayoutCandidate(8, 4, 4, "none", "alltoall", "full")


# The loads of a run -------------------------------------------------------------------------------


def write_loads(folder: Path, *lines: list[list[float]], **others: list[list[float]]) -> None:
    records: list[dict[str, Any]] = [{"kind": "start", "step": 0}]
    records += [{"kind": "train", "expert_load": loads} | others for loads in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))


def test_recorded_loads_of_a_run(tmp_path: Path) -> None:
    """Two depth steps at two steps: four observations of 5 experts, 3 and 2 on two ranks."""
    write_loads(
        tmp_path,
        [[0.4, 0.3, 0.0, 0.2, 0.1], [0.25, 0.25, 0.0, 0.25, 0.25]],
        [[0.1, 0.1, 0.0, 0.4, 0.4], [0.0, 0.5, 0.0, 0.5, 0.0]],
    )
    skew, hottest = recorded_skew(tmp_path), [1.4, 1.0, 1.6, 1.0]
    skew.check([BANK])
    assert skew.factor(BANK, 2) == pytest.approx(np.median(hottest))
    assert skew.factor(BANK, 2, FULL) == pytest.approx(np.quantile(hottest, 0.99))
    assert skew.factor(BANK, 1) == pytest.approx(1)
    assert skew.factor(replace(BANK, balanced=True), 2) == pytest.approx(3 / 2.5)
    assert "4 loads recorded in" in skew.source


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ('{"kind": "train", "step": 1}\n', "has no expert loads"),
        ('{"kind": "train"}\n{"kind": "tr\n', "is not JSON lines: Unterminated string"),
        ('{"expert_load": [[0.5, 0.5]]}\n', "2 feed_forward experts were recorded, but the model"),
        ('{"value_expert_load": [[0.5, 0.5]]}\n', "no loads of the feed_forward experts"),
    ],
)
def test_loads_that_do_not_fit_are_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        recorded_skew(tmp_path).check([BANK])


# Machines -----------------------------------------------------------------------------------------


def test_a_file_changes_figures_and_their_sources(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('base = "h200"\nslow_bandwidth = 25e9\nranks_per_node = 4\n')
    ours = find_hardware(str(file))
    assert ours == replace(H200, name="ours", slow_bandwidth=25e9, ranks_per_node=4)
    changed = dict.fromkeys(("slow_bandwidth", "ranks_per_node"), str(file))
    assert ours.sources == {**H200.sources, **changed}
    assert set(ours.sources) == {each.name for each in fields(Hardware)} - {"name", "sources"}


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def plan(moebius: Callable[..., Any], terminal: None) -> Callable[..., str]:
    """Runs the command in 80 columns and returns what it prints."""

    def run(words: str, *, code: int = 0) -> str:
        answer = moebius("plan", *words.split())
        assert answer.code == code, answer.text
        return answer.out if code == 0 else answer.err

    return run


@pytest.mark.parametrize(
    "words", ["smoke", "moeut_244m --nodes 1250 --ep 16 --dispatcher hierarchical"]
)
def test_one_line_per_layout_best_first_and_nothing_cut(words: str, plan: Any) -> None:
    lines = plan(words).splitlines()
    assert max(map(len, lines)) <= 80
    below = " ".join(map(str.strip, lines[lines.index("the rows as keys") + 1 :])).partition("  ")[
        0
    ]
    keys = [f"job.num_nodes={line}" for line in below.split("job.num_nodes=")[1:]]
    header, *rows = (line.split() for line in lines[: lines.index("")])
    for row, line in zip(rows, keys, strict=True):
        config = resolve(words.split()[0], line.split(), RECIPES)
        mesh, ranks = config.mesh, config.world_size
        assert (row[0], row[2:4]) == (str(ranks), [str(mesh.ep), mesh.sharding])
        assert row[1] == f"{mesh.dp_replicate}×{mesh.dp_shard}"
        assert row[5] == config.train.recompute
    assert " ".join(header) == HEADER
    assert {len(row) for row in rows} == {len(header) - 1}  # "%" belongs to its column's name
    times = [float(row[7]) for row in rows[:10] if row[0] == rows[0][0]]
    assert times == sorted(times)


def test_json_says_what_the_table_says(plan: Any) -> None:
    found = json.loads(plan("smoke --nodes 1 2 --json"))
    assert [planned["ranks"] for planned in found["plans"]] == [8, 16]
    best = found["plans"][1]["layouts"][0]
    for parts in (best["seconds"], best["memory_bytes"]):
        assert parts.pop("total") == pytest.approx(sum(parts.values()))
    tokens = 16 * found["tokens_per_rank"]
    assert best["tokens_per_s"] == pytest.approx(tokens / sum(best["seconds"].values()))
    for kind, bytes_per_weight in (("ema", 4), ("last", 8)):
        averaged = json.loads(plan(f"smoke train.average={kind} --nodes 2 --json"))["plans"][0]
        moments = averaged["layouts"][0]["memory_bytes"]["moments"]
        assert moments / best["memory_bytes"]["moments"] == pytest.approx(1 + bytes_per_weight / 8)
    spread = next(layout for layout in found["plans"][0]["layouts"] if layout["ep"] == 4)
    names = {call["name"] for call in spread["collectives"]}
    assert {"feed_forward dispatch", "value dispatch", "output combine"} <= names
    assert found["tokens_per_rank"] == 4 * 128
    assert set(found["sources"]) >= set(found["hardware"]) - {"name"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("moeut_244m", "feed_forward 1.00 / 1.00 (balanced)"),
        ("moeut_244m", "bound by the GPU if a run's start line says that its passes are captured"),
        ("smoke --sharding fsdp", "bound by the host: launching a step's operations takes"),
        ("smoke train.compile=true", "bound by the host: launching a step's operations takes"),
        ("moeut_244m optim.kind=muon", "Muon: one moment for 226M weights; their updates take"),
        (
            "smoke --ep 16 --nodes 1 2",
            "1 node: no layout: ep 16 needs 16 ranks, and there are only 8",
        ),
        ("smoke --ep 4 --skew {run}", "feed_forward 2.08 / 2.08 (1 loads recorded in"),
    ],
)
def test_words_below_the_table(words: str, expected: str, plan: Any, tmp_path: Path) -> None:
    heads = [[0.0625] * 16]
    loads = [[0.4] + [0.04] * 15]
    write_loads(tmp_path, loads, value_expert_load=heads, output_expert_load=heads)
    printed = plan(words.format(run=tmp_path))
    assert expected.replace(" ", "") in "".join(printed.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("smoke --hardware h2000", "there is no hardware 'h2000': choose h100, h200"),
        ("smoke --nodes 4 0", "--nodes 0: must be at least 1"),
        ("smoke --tokens-per-rank 0", "--tokens-per-rank 0"),
        ("smoke --skew missing", "missing: cannot be read"),
        ("smok", "there is no recipe 'smok'"),
        ("smoke mesh.rebalance_every=5 mesh.replicas=1", "mesh.replicas=1"),
        ("smoke --ep 64", "ep 64 needs 64 ranks, and there are only 8; take 8 nodes"),
        ("smoke --ep 3", "no layout of 8 ranks has ep 3: it must divide the ranks"),
        ("dense --ep 2", "holds at least one expert of every bank (none)"),
        ("smoke --tokens-per-rank 90000000", "fits on no layout of 1 node of h200: the smallest"),
    ],
)
def test_a_wrong_request_is_refused(plan: Any, words: str, message: str) -> None:
    assert message in " ".join(plan(words, code=2).split())
