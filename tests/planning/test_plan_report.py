"""`moebius plan`, through the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from moebius.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys: Capture, *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    captured = capsys.readouterr()
    assert ended.value.code == code, captured.err
    return captured.out if code == 0 else captured.err


def words_of(capsys: Capture, *arguments: str) -> str:
    return " ".join(run(capsys, *arguments).split())


def as_json(capsys: Capture, *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


def best_of(capsys: Capture, *arguments: str) -> Any:
    return as_json(capsys, *arguments)["plans"][0]["layouts"][0]


HEADER = "GPUs layout ep shard dispatcher recompute GB ms c+x+w % tok/s MFU"


@pytest.mark.parametrize(
    "arguments",
    [
        "smoke",
        "moeut_244m --nodes 1250 --ep 16 --dispatcher hierarchical",
    ],
)
def test_one_line_per_layout_best_first_and_nothing_cut(arguments: str, capsys: Capture) -> None:
    printed = run(capsys, *arguments.split())
    lines = printed.splitlines()
    assert "…" not in printed
    assert max(map(len, lines)) <= 80
    header, *rows = (line.split() for line in lines[: lines.index("")])
    assert " ".join(header) == HEADER
    assert {len(row) for row in rows} == {len(header) - 1}  # "%" belongs to its column's name
    times = [float(row[7]) for row in rows[:10] if row[0] == rows[0][0]]
    assert times == sorted(times)


def test_json_says_what_the_table_says(capsys: Capture) -> None:
    found = as_json(capsys, "smoke", "--nodes", "1", "2")
    assert [planned["ranks"] for planned in found["plans"]] == [8, 16]
    best = found["plans"][1]["layouts"][0]
    for parts in (best["seconds"], best["memory_bytes"]):
        total = parts.pop("total")
        assert total == pytest.approx(sum(parts.values()))
    tokens = 16 * found["tokens_per_rank"]
    assert best["tokens_per_s"] == pytest.approx(tokens / sum(best["seconds"].values()))
    spread = next(layout for layout in found["plans"][0]["layouts"] if layout["ep"] == 4)
    names = {call["name"] for call in spread["collectives"]}
    assert {"feed_forward dispatch", "value dispatch", "output dispatch", "value combine"} <= names
    assert found["tokens_per_rank"] == 4 * 128
    assert set(found["hottest_rank"]["factors"]) == {"feed_forward", "value", "output"}
    assert set(found["sources"]) >= set(found["hardware"]) - {"name"}


def test_tokens_precision_and_overrides_reach_the_model(capsys: Capture) -> None:
    options = ["--ep", "1", "--sharding", "none", "--recompute", "none"]
    plain, more, wide, exact, half = (
        best_of(capsys, "smoke", *changes, *options)["memory_bytes"]
        for changes in (
            [],
            ["--tokens-per-rank", "1024"],
            ["model.feed_forward.num_experts=64"],
            ["train.precision=float32"],
            ["train.precision=bfloat16"],
        )
    )
    assert more["activations"] == pytest.approx(2 * plain["activations"])
    assert wide["master"] > plain["master"]
    assert exact["weights"] == plain["weights"] == 0  # the recipe itself is in float32
    assert half["weights"] == pytest.approx(plain["master"] / 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("moeut_244m", "expert parallelism pays at none of 8 GPUs"),
        ("moeut_244m", "feed_forward 388"),
        ("moeut_244m", "Dirichlet loads of concentration 5 per expert"),
        (
            "moeut_244m model.feed_forward.num_experts=24576",
            "expert parallelism pays at 8 of 8 GPUs",
        ),
        ("dense", "the model has no experts"),
        ("smoke --ep 1", "no layout spreads the experts over several ranks"),
        (
            "smoke --ep 16 --nodes 1 2",
            "1 node: no layout: ep 16 needs 16 ranks, and there are only 8",
        ),
    ],
)
def test_words_below_the_table(arguments: str, expected: str, capsys: Capture) -> None:
    assert expected in words_of(capsys, *arguments.split())


def test_small_models_wait_for_the_host(capsys: Capture) -> None:
    waiting = best_of(capsys, "smoke")["seconds"]["host"]
    assert waiting > 0
    assert f"{1e3 * waiting:.1f} ms more than the device" in words_of(capsys, "smoke")
    assert "host-bound:" not in run(capsys, "smoke", "--tokens-per-rank", "1000000")


def test_a_slow_network_makes_expert_parallelism_pay(capsys: Capture, tmp_path: Path) -> None:
    """Moving weights is expensive from the second node on."""
    slow = tmp_path / "slow.toml"
    slow.write_text('base = "h200"\nslow_bandwidth = 1e9\nlaunch_s = 1e-9\n')
    words = [
        *("smoke", "model.feed_forward.num_experts=256", "--hardware", str(slow)),
        *("--nodes", "1", "2", "4", "--sharding", "none"),
    ]
    found = as_json(capsys, *words)["expert_parallelism_pays"]
    assert found == {"8": False, "16": True, "32": True}


def test_recorded_loads_are_taken(capsys: Capture, tmp_path: Path) -> None:
    heads = [[0.0625] * 16] * 4
    loads = {
        "kind": "train",
        "step": 1,
        "expert_load": [[0.4] + [0.04] * 15] * 4,
        "value_expert_load": heads,
        "output_expert_load": heads,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(loads) + "\n")
    text = words_of(capsys, "smoke", "--ep", "4", "--skew", str(tmp_path))
    assert "feed_forward 2.08 / 2.08 / 2.08" in text
    assert "value 1.00 / 1.00 / 1.00" in text


def test_balanced_routing_waits_for_nobody(capsys: Capture) -> None:
    words = ["smoke", "--ep", "8", "--tokens-per-rank", "1000000", "--skew"]
    even, skewed = (best_of(capsys, *words, skew)["seconds"]["total"] for skew in ("balanced", "1"))
    assert even < skewed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("smoke --hardware h2000", "there is no hardware 'h2000': choose h100, h200"),
        ("smoke --nodes 4 0", "--nodes 0: must be at least 1"),
        ("smoke --tokens-per-rank 0", "--tokens-per-rank 0"),
        ("smoke --skew missing", "missing: cannot be read"),
        ("smoke --skew -1", "a Dirichlet concentration must be above 0"),
        ("smok", "there is no recipe 'smok'"),
        ("smoke mesh.rebalance_every=5 mesh.replicas=1", "mesh.replicas=1"),
        ("smoke --ep 64", "ep 64 needs 64 ranks"),
        ("smoke --tokens-per-rank 90000000", "the model fits on no layout of 1 node of h200"),
    ],
)
def test_a_wrong_request_is_refused(capsys: Capture, arguments: str, message: str) -> None:
    assert message in " ".join(run(capsys, *arguments.split(), code=2).split())
