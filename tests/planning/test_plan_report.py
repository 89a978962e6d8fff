"""`moebius plan`, through the command."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from moebius.cli.main import main
from moebius.planning import plan_report as report
from moebius.planning.plan_report import parse_nodes
from moebius.planning.planner import SizeRange


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    captured = capsys.readouterr()
    assert ended.value.code == code, captured.err
    return captured.out if code == 0 else captured.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


def test_one_line_per_layout_best_first_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "smoke", "--nodes", "1", "--top", "100").splitlines()
    assert max(map(len, lines)) <= 80
    header, *rows = lines[: lines.index("")]
    assert header.split()[:9] == [
        "GPUs",
        "layout",
        "ep",
        "shard",
        "dispatcher",
        "recompute",
        "GB",
        "ms",
        "c+x+w",
    ]
    assert len(rows) == 4 + 9
    times = [float(row.split()[7]) for row in rows]
    assert times == sorted(times)
    assert {row.split()[0] for row in rows} == {"8"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["moeut_244m", "--nodes", "1250", "--ep", "16", "--dispatcher", "hierarchical"],
        pytest.param(
            ["moeut_244m", "--nodes", "1249", "--recompute", "selective"], marks=pytest.mark.slow
        ),
        pytest.param(["smoke", "--nodes", "1250", "--detail"], marks=pytest.mark.slow),
    ],
)
def test_nothing_is_cut_at_80_columns(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(capsys, *arguments)
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    header, row = (line.split() for line in printed.splitlines()[:2])
    assert header == [
        "GPUs",
        "layout",
        "ep",
        "shard",
        "dispatcher",
        "recompute",
        "GB",
        "ms",
        "c+x+w",
        "%",
        "tok/s",
        "MFU",
    ]
    assert len(row) == len(header) - 1  # "%" belongs to its column's name
    assert float(row[-1]) > 0


def test_a_narrower_terminal_folds_and_cuts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    arguments = ("moeut_244m", "--nodes", "1250", "--ep", "16", "--dispatcher", "hierarchical")
    assert "…" not in run(capsys, *arguments)


def test_json_says_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "smoke", "--nodes", "1", "2")
    assert [planned["ranks"] for planned in found["plans"]] == [8, 16]
    best = found["plans"][1]["layouts"][0]
    assert best["seconds"]["total"] == pytest.approx(
        sum(value for key, value in best["seconds"].items() if key != "total")
    )
    assert best["memory_bytes"]["total"] == pytest.approx(
        sum(value for key, value in best["memory_bytes"].items() if key != "total")
    )
    assert best["tokens_per_s"] == pytest.approx(
        16 * found["tokens_per_rank"] / best["seconds"]["total"]
    )
    spread = next(layout for layout in found["plans"][0]["layouts"] if layout["ep"] == 4)
    names = {call["name"] for call in spread["collectives"]}
    assert {"feed_forward dispatch", "value dispatch", "output dispatch", "value combine"} <= names
    assert found["tokens_per_rank"] == 4 * 128
    at_quantiles = list(found["hottest_rank"]["step_seconds"].values())
    assert at_quantiles == pytest.approx(sorted(at_quantiles))  # equal where all wait for the host
    assert set(found["hottest_rank"]["factors"]) == {"feed_forward", "value", "output"}
    assert set(found["sources"]) >= set(found["hardware"]) - {"name"}


def test_tokens_precision_and_overrides_reach_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["smoke", "--ep", "1", "--sharding", "none", "--recompute", "none"]
    plain, more, wide, exact = (
        as_json(capsys, *arguments)["plans"][0]["layouts"][0]
        for arguments in (
            base,
            [*base, "--tokens-per-rank", "1024"],
            ["smoke", "model.feed_forward.num_experts=64", *base[1:]],
            [*base, "--precision", "fp32"],
        )
    )
    assert more["memory_bytes"]["activations"] == pytest.approx(
        2 * plain["memory_bytes"]["activations"]
    )
    assert wide["memory_bytes"]["master"] > plain["memory_bytes"]["master"]
    assert (
        exact["memory_bytes"]["weights"] == plain["memory_bytes"]["weights"] == 0
    )  # the recipe itself is in float32
    half = as_json(capsys, *base, "--precision", "bf16")["plans"][0]["layouts"][0]
    assert half["memory_bytes"]["weights"] == pytest.approx(plain["memory_bytes"]["master"] / 2)


def test_the_words_compare_tokens_and_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(run(capsys, "moeut_244m", "--nodes", "1").split())
    assert "gathered anew for each of 9 repeats" in words
    assert (
        "expert parallelism pays at none of the sizes planned (8 GPUs); at 8 it would with" in words
    )
    assert "feed_forward 387 → 388" in words
    assert "Dirichlet loads of concentration 5 per expert" in words
    many = " ".join(
        run(capsys, "moeut_244m", "model.feed_forward.num_experts=12288", "--nodes", "1").split()
    )
    assert "expert parallelism pays from 8 GPUs on" in many
    dense = " ".join(run(capsys, "dense", "--nodes", "1").split())
    assert "the model has no experts" in dense
    alone = " ".join(run(capsys, "smoke", "--ep", "1").split())
    assert "tokens or weights: no layout spreads the experts over several ranks" in alone


def test_sizes_between_which_ep_pays_are_named() -> None:
    """It may begin to pay and stop again, as at sizes that split a node."""
    ranges = (
        SizeRange(8, 8, ep_pays=True),
        SizeRange(16, 32, ep_pays=False),
        SizeRange(64, 1024, ep_pays=True),
    )
    found: Any = SimpleNamespace(size_ranges=ranges, growth=None)
    assert report._where_it_pays(found) == "pays at 8 GPUs, 64 to 1,024 GPUs"
    found.size_ranges = ranges[:2]
    assert report._where_it_pays(found) == "pays at 8 GPUs"


def test_a_picture_has_lines_and_a_crossover(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A slow network makes weights dear from the second node on: EP begins to pay between 8 and 16
    GPUs.
    """
    slow = tmp_path / "slow.toml"
    slow.write_text('base = "h200"\nslow_bandwidth = 1e9\nlaunch_s = 1e-9\n')
    words = [
        "smoke",
        "model.feed_forward.num_experts=256",
        "--hardware",
        str(slow),
        "--nodes",
        "1",
        "2",
        "4",
        "--sharding",
        "none",
    ]
    found = as_json(capsys, *words)["expert_parallelism"]
    assert [size_range["ep_pays"] for size_range in found] == [False, True]
    picture = tmp_path / "plan.png"
    assert f"picture: {picture.name}" in run(capsys, *words, "--png", str(picture)).replace(
        f"{tmp_path}/", ""
    )
    pixels = (255 * imread(picture)[..., :3]).round().astype(int).reshape(-1, 3)
    for color in (
        (0xD1, 0x49, 0x5B),
        (0x2E, 0x6F, 0x95),
        (0x8D, 0x6A, 0x9F),
    ):  # with EP, without, the crossover
        assert (np.abs(pixels - color).sum(1) < 6).sum() > 100


def test_sizes_without_a_layout_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(run(capsys, "smoke", "--ep", "16", "--nodes", "1", "2").split())
    assert "1 node: no layout: ep 16 needs 16 ranks, and there are 8" in words
    assert words.split()[12] == "16"


def test_unused_ranks_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = run(capsys, "own_text", "--ep", "16", "--nodes", "3")
    assert "16/24" in words
    assert "stay unused" in words


def test_small_models_wait_for_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(run(capsys, "smoke").split())
    assert "the host: to launch" in words
    best = as_json(capsys, "smoke")["plans"][0]["layouts"][0]["seconds"]
    assert f"{1e3 * best['host']:.1f} ms more than what they do" in words
    assert best["host"] > 0
    assert "the host: to launch" not in run(capsys, "smoke", "--tokens-per-rank", "1000000")


def test_detail_lists_every_collective(capsys: pytest.CaptureFixture[str]) -> None:
    words = run(capsys, "smoke", "--detail")
    without, spread = words.split("dp_replicate ")[-2:]
    assert "gather layer, dense" in without + spread
    assert "dispatch" not in without
    for kind in ("feed_forward", "value", "output"):
        assert f"{kind} dispatch" in spread
        assert f"{kind} combine" in spread
    assert "memory: weights" in spread or "memory: gradients" in spread


def test_kernels_are_shown_with_what_bounds_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    words = run(capsys, "moeut_244m", "--kernels")
    assert "computation: predicted kernel by kernel, never measured" in " ".join(words.split())
    table = words.partition("kernels of a micro-batch, predicted")[2]
    [k1] = [line for line in table.splitlines() if line.split()[:2] == ["K1", "forward"]]
    assert k1.split()[-1] == "L2"
    assert k1.split()[-5] == "18"
    assert max(map(len, table.splitlines())) <= 100
    [whole] = [line.split() for line in table.splitlines() if line.startswith("all ")]
    found = as_json(capsys, "moeut_244m")
    of_json = 1e3 * sum(line["seconds"] for line in found["kernels"]["lines"])
    assert float(whole[1]) == pytest.approx(of_json, abs=0.01)
    best = found["plans"][-1]["layouts"][0]
    assert of_json == pytest.approx(1e3 * best["seconds"]["compute"])
    fitted = " ".join(run(capsys, "moeut_244m", "--hardware", "b200", "--kernels").split())
    assert "at a flat share of the peak, for that of b200 was fitted to measured runs" in fitted
    assert as_json(capsys, "sut")["kernels"] == {
        "why_not": "the list of kernels does not know attention of kind momha",
        "lines": [],
    }


def test_sources_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(run(capsys, "smoke", "--sources").split())
    assert "NCCL's tuning table" in words
    assert "DeepEP" in words
    assert "measured in the second half of the recipe smoke" in words


def test_measured_tables_and_recorded_loads_are_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "table.json"
    rows = [{"op": "all_to_all", "world": 4, "bytes": size, "seconds": 1.0} for size in (1e3, 1e9)]
    table.write_text(json.dumps({"rows": rows}))
    loads = tmp_path / "metrics.jsonl"
    uneven = [[0.4] + [0.04] * 15] * 4
    heads = [[0.0625] * 16] * 4
    loads.write_text(
        json.dumps(
            {
                "kind": "train",
                "step": 1,
                "expert_load": uneven,
                "value_expert_load": heads,
                "output_expert_load": heads,
            }
        )
        + "\n"
    )
    words = ["smoke", "--ep", "4", "--dispatcher", "alltoall"]
    plain = as_json(capsys, *words)["plans"][0]["layouts"][0]
    measured = as_json(capsys, *words, "--measured", str(table))["plans"][0]["layouts"][0]
    assert measured["seconds"]["exchange"] > 48 > plain["seconds"]["exchange"]
    words += ["--measured", str(table), "--sources"]
    text = " ".join(run(capsys, *words, "--skew", str(tmp_path)).split())
    assert re.search(r"collectives .*where groups of that size were measured", text)
    assert "feed_forward 2.08 / 2.08 / 2.08" in text
    assert "value 1.00 / 1.00 / 1.00" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smoke", "--hardware", "h2000"], "there is no hardware 'h2000': choose h100, h200"),
        (["smoke", "--nodes", "0"], "'0' is no number of nodes"),
        (["smoke", "--nodes", "1", "…"], "a number must follow …"),
        (["smoke", "--nodes", "…", "4"], "--nodes … 4: … must stand between two numbers"),
        (["smoke", "--nodes", "1", "…", "..", "4"], ".. must stand between two numbers"),
        (["smoke", "--tokens-per-rank", "0"], "--tokens-per-rank 0"),
        (["smoke", "--skew", "missing"], "missing: cannot be read"),
        (["smoke", "--skew", "-1"], "a Dirichlet concentration must be above 0"),
        (["smoke", "--measured", "missing.json"], "missing.json: cannot be read"),
        (["smoke", "--measured-kernels", "missing.json"], "missing.json: cannot be read"),
        (["smoke", "--launches", "0"], "--launches 0: a number above 0 is needed"),
        (["smok"], "there is no recipe 'smok'"),
        (
            ["smoke", "mesh.rebalance_every=5", "mesh.replicas=1"],
            "the planner counts neither the memory of copies",
        ),
        (["smoke", "--ep", "64"], "ep 64 needs 64 ranks"),
        (
            ["smoke", "--tokens-per-rank", "90000000"],
            "the model fits on no layout of 1 node of h200",
        ),
    ],
)
def test_what_is_wrong_is_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in " ".join(run(capsys, *arguments, code=2).split())


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["4"], [4]),
        (["8", "1", "2"], [1, 2, 8]),
        (["1", "…", "6"], [1, 2, 4, 6]),
        (["1", "...", "8", "10"], [1, 2, 4, 8, 10]),
        (["3", "..", "3"], [3]),
        (["1", "…", "1250"], [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1250]),
    ],
)
def test_nodes_may_be_doubled(words: list[str], nodes: list[int]) -> None:
    assert parse_nodes(words) == nodes


@pytest.mark.parametrize(
    ("words", "lines_with_ep"),
    [
        (["dense", "--nodes", "1", "2"], False),
        (["moeut_244m", "--nodes", "1", "2", "--skew", "balanced"], True),
    ],
    ids=["no experts", "one verdict for all sizes"],
)
def test_a_picture_without_a_crossover(
    words: list[str], lines_with_ep: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    run(capsys, *words, "--png", str(picture))
    pixels = (255 * imread(picture)[..., :3]).round().astype(int).reshape(-1, 3)
    for color, drawn in (((0x2E, 0x6F, 0x95), True), ((0xD1, 0x49, 0x5B), lines_with_ep)):
        assert ((np.abs(pixels - color).sum(1) < 6).sum() > 100) == drawn


def test_balanced_routing_waits_for_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["smoke", "--nodes", "1", "--ep", "8", "--tokens-per-rank", "1000000"]
    times = [
        as_json(capsys, *words, "--skew", skew)["plans"][0]["layouts"][0]["seconds"]["total"]
        for skew in ("balanced", "1")
    ]
    assert times[0] < times[1]
