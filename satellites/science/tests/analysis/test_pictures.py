"""Which pictures each model of the family has, and what is drawn and written."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from analysed import analysed, count_by_loops
from matplotlib.image import imread

from moebius_science.analysis.analyse import Analysis
from moebius_science.pictures import drawing
from moebius_science.pictures.write import PICTURES, as_json, parquet, write_analysis

ALL = [
    *("expert_usage", "layer_preference", "unique_experts", "frequent_items", "item_slices"),
    *("similarity", "update_magnitude", "balance", "repeat_overlap", "co_occurrence"),
    "attention_heads",
]


def absent(analysis: Analysis) -> dict[str, str]:
    pictures = [make(analysis) for make in PICTURES]
    assert [picture.name for picture in pictures] == ALL
    return {picture.name: picture.absent for picture in pictures if picture.absent}


PER_ITEM = {"unique_experts", "frequent_items", "item_slices"}
CHOICE = {"expert_usage", "layer_preference", *PER_ITEM, "similarity"}
REPEATS = {"layer_preference", "frequent_items", "item_slices", "similarity", "repeat_overlap"}
ROUTED = {*CHOICE, "repeat_overlap", "co_occurrence"}


ONE_EXPERT = ("model.feed_forward.num_experts=1", "model.feed_forward.router.top_k=1")
ALL_EXPERTS = ("model.feed_forward.num_experts=3", "model.feed_forward.router.top_k=3")
ONE_LAYER = ("model.num_layers=1", "model.layers_per_group=1")
NO_EXPERTS = {*ROUTED, "balance", "attention_heads"}


@pytest.mark.parametrize(
    ("name", "changes", "missing", "reason"),
    [
        ("moeut", (), set(), ""),
        ("moeut_aabb", (), set(), ""),
        ("sut", (), set(), ""),
        ("dense", (), NO_EXPERTS, "is dense"),
        ("naive_ut", (), NO_EXPERTS, "is dense"),
        ("switchhead", (), ROUTED, "is dense"),
        ("sigma_moe", (), {*REPEATS, "attention_heads"}, "applied twice"),
        ("mixture_of_tokens", (), NO_EXPERTS, "router.kind='mixture_of_tokens'"),
        ("soft_moe", (), NO_EXPERTS, "router.kind='soft_moe'"),
        ("transition", (), NO_EXPERTS, "router.kind='transition'"),
        (
            "expert_choice",
            (),
            {*REPEATS, "expert_usage", "balance", "attention_heads"},
            "experts choose their tokens",
        ),
        ("moeut", ONE_EXPERT, ROUTED, "one expert"),
        ("moeut", ALL_EXPERTS, ROUTED, "through all 3 experts"),
        ("moeut", ONE_LAYER, REPEATS, "layers_per_group = num_layers = 1"),
    ],
)
def test_a_picture_without_meaning_is_not_drawn_and_says_why(
    name: str, changes: tuple[str, ...], missing: set[str], reason: str
) -> None:
    found = absent(analysed(name, *changes, count=1, length=3)[1])
    assert found.keys() == missing
    assert not missing or any(reason in words for words in found.values()), found


@pytest.mark.slow
def test_an_analysis_is_written_and_replaced(tmp_path: Path) -> None:
    written = write_analysis(analysed("moeut")[1], tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{name}.{kind}" for name in ALL for kind in ("png", "parquet")}
    assert [Path(picture["png"]).stem for picture in written] == ALL
    write_analysis(analysed("dense")[1], tmp_path)  # removes what no longer belongs there
    assert {path.name for path in tmp_path.iterdir()} == {
        "update_magnitude.png",
        "update_magnitude.parquet",
    }


def test_the_data_say_what_was_counted_and_of_what(tmp_path: Path) -> None:
    _, analysis = analysed("moeut")
    metadata = {name: str(value) for name, value in analysis.facts.items()}
    for make in PICTURES:
        picture = make(analysis)
        table = picture.table()
        assert len({len(column) for column in table.values()}) == 1
        (tmp_path / f"{picture.name}.parquet").write_bytes(parquet(table, metadata))
    usage = pq.read_table(tmp_path / "expert_usage.parquet")
    assert usage.schema.metadata[b"step"] == b"7"
    assert usage.schema.metadata[b"tokens"] == b"48"
    counts = dict.fromkeys(range(1, analysis.config.model.num_layers + 1), 0)
    for row in usage.to_pylist():
        [each] = [e for e in analysis.of_kind("feed_forward") if e.bank.member == row["member"]]
        repeat = each.bank.depths.index(row["depth"])
        assert row["routes"] == each.usage.counts_RE[repeat, row["expert"]]
        counts[row["depth"]] += row["routes"]
    top_k = analysis.config.model.experts.router.top_k  # type: ignore[union-attr]
    assert set(counts.values()) == {48 * top_k}
    items = pq.read_table(tmp_path / "unique_experts.parquet").to_pylist()
    assert {row["token_id"] for row in items} == set(analysis.item_counts_V.nonzero()[0].tolist())
    heads = pq.read_table(tmp_path / "attention_heads.parquet").to_pylist()
    per_head: dict[tuple, float] = {}
    for row in heads:
        key = (row["kind"], row["depth"], row["head"])
        per_head[key] = per_head.get(key, 0) + row["share_of_head"]
    assert np.allclose(list(per_head.values()), 1)
    assert (
        len(per_head)
        == 2 * analysis.config.model.num_layers * analysis.config.model.attention.num_heads
    )
    preference = pq.read_table(tmp_path / "layer_preference.parquet").to_pylist()
    assert {row["place"] for row in preference} == set(range(analysis.banks[0].bank.num_experts))
    similarity = pq.read_table(tmp_path / "similarity.parquet").to_pylist()
    assert all(row["jaccard"] == 1 for row in similarity if row["depth_a"] == row["depth_b"])


def test_attention_counts_each_head_by_itself() -> None:
    traces, analysis = analysed("moeut", count=1)
    [each, *_] = analysis.of_kind("value")
    counted = count_by_loops(traces, each.bank.layer)
    per_head = each.bank.num_experts // each.bank.num_heads
    shares = each.usage.head_share_RHA
    for repeat, tokens in enumerate(counted.choices):
        for head in range(each.bank.num_heads):
            own = [e % per_head for made in tokens for e, _ in made if e // per_head == head]
            expected = [own.count(expert) / len(own) for expert in range(per_head)]
            assert shares[repeat, head].tolist() == pytest.approx(expected)


def test_figures_for_scripts_have_null_for_the_unknown() -> None:
    found = as_json(analysed("sigma_moe")[1])
    [bank, *_] = found["banks"]
    assert bank["universal_score"] is None
    assert bank["kept_share"] == [None]
    assert len(found["updates"]["ratio"]) == len({d for b in found["banks"] for d in b["depths"]})
    [mixture, *_] = as_json(analysed("mixture_of_tokens")[1])["banks"]
    assert mixture["chosen_by"] == "nobody"
    assert "routes" not in mixture


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("moeut", "moeut_aabb", "sut", "dense", "sigma_moe", "switchhead", "switch", "mh_moe"),
        *("expert_choice", "mixture_of_tokens", "deepseek", "x_moe"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_every_model_of_the_family_is_drawn(name: str, tmp_path: Path) -> None:
    """At full size, without warnings from matplotlib or numpy."""
    for picture in write_analysis(analysed(name, count=1)[1], tmp_path):
        if not picture["absent"]:
            pixels = imread(picture["png"])
            assert pixels.shape[1] == drawing.WIDTH * drawing.DPI
            assert pixels[..., :3].std() > 0.03
