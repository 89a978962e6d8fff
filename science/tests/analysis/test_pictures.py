"""Which pictures a model of the family has, what is drawn, and the page that needs nothing else."""

import base64
import io
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from analysed import analysis_of, count_by_loops, passes_of
from family import NAMES, make_uneven, tiny_model
from matplotlib.image import imread

from moebius.data_pipeline.parquet import write_parquet
from moebius_science.analysis.analyse import Analysis
from moebius_science.analysis.page import page
from moebius_science.analysis.write import PAGE, PICTURES, as_json, write_analysis
from moebius_science.pictures import drawing

ALL = [
    *("expert_usage", "layer_preference", "unique_experts", "frequent_items", "item_slices"),
    *("similarity", "update_magnitude", "balance", "repeat_overlap", "co_occurrence"),
    *("attention_heads", "relu_pass_rate", "row_cosine"),
]


def analysed(name: str, changes: dict | None = None, *, run: str = "tiny") -> Analysis:
    model = make_uneven(tiny_model(name, changes or {}))
    group = model.config.evaluation_group_sequences
    passes = passes_of(model, count=1, rows=max(4, group), length=3 if group > 1 else 6)
    return analysis_of(model, passes, run=run)


def absent(analysis: Analysis) -> dict[str, str]:
    pictures = [make(analysis) for make in PICTURES]
    assert [picture.name for picture in pictures] == ALL
    return {picture.name: picture.absent for picture in pictures if picture.absent}


PER_ITEM = {"unique_experts", "frequent_items", "item_slices"}
CHOICE = {"expert_usage", "layer_preference", *PER_ITEM, "similarity"}
REPEATS = {"layer_preference", "frequent_items", "item_slices", "similarity", "repeat_overlap"}
ROUTED = {*CHOICE, "repeat_overlap", "co_occurrence"}


@pytest.mark.parametrize(
    ("name", "changes", "missing", "reason"),
    [
        ("moeut", {}, set(), ""),
        ("moeut_aabb", {}, set(), ""),
        ("sut", {}, set(), ""),
        ("dense", {}, {*ROUTED, "balance", "attention_heads"}, "is dense"),
        ("naive_ut", {}, {*ROUTED, "balance", "attention_heads"}, "is dense"),
        ("switchhead", {}, ROUTED, "is dense"),
        ("sigma_moe", {}, {*REPEATS, "attention_heads"}, "applied twice"),
        (
            "mixture_of_tokens",
            {},
            {*ROUTED, "balance", "attention_heads"},
            "router.kind='mixture_of_tokens'",
        ),
        ("soft_moe", {}, {*ROUTED, "balance", "attention_heads"}, "router.kind='soft_moe'"),
        ("transition", {}, {*ROUTED, "balance", "attention_heads"}, "router.kind='transition'"),
        (
            "expert_choice",
            {},
            {*REPEATS, "expert_usage", "balance", "attention_heads"},
            "experts choose their tokens",
        ),
        (
            "moeut",
            {"feed_forward.num_experts": 1, "feed_forward.router.top_k": 1},
            ROUTED,
            "one expert",
        ),
        (
            "moeut",
            {"feed_forward.num_experts": 3, "feed_forward.router.top_k": 3},
            ROUTED,
            "through all 3 experts",
        ),
        (
            "moeut",
            {"num_layers": 1, "layers_per_group": 1},
            REPEATS,
            "layers_per_group = num_layers = 1",
        ),
    ],
)
def test_what_has_no_meaning_is_said_and_not_drawn(
    name: str, changes: dict, missing: set[str], reason: str
) -> None:
    found = absent(analysed(name, changes))
    assert found.keys() == missing
    assert not missing or any(reason in words for words in found.values()), found


class Page(HTMLParser):
    """Collects links, pictures and text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.references: list[str] = []
        self.pictures: list[bytes] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action"):
                self.references.append(value or "")
        if tag == "img":
            source = dict(attrs)["src"] or ""
            self.pictures.append(base64.b64decode(source.removeprefix("data:image/png;base64,")))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
def test_an_analysis_is_written_and_replaced(tmp_path: Path) -> None:
    model = make_uneven(tiny_model("moeut"))
    analysis = analysis_of(model, passes_of(model))
    written = write_analysis(analysis, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{name}.{kind}" for name in ALL for kind in ("png", "parquet")} | {PAGE}
    assert [Path(picture["png"]).stem for picture in written] == ALL
    text = (tmp_path / PAGE).read_text()
    shown = Page(text)
    assert len(shown.pictures) == len(ALL)
    for name, pixels in zip(ALL, shown.pictures, strict=True):
        assert pixels == (tmp_path / f"{name}.png").read_bytes()
        assert imread(io.BytesIO(pixels))[..., :3].std() > 0.03, name
    for reference in shown.references:
        assert reference.startswith(("#", "data:image/png;base64,")), reference
    assert not {"script", "link", "iframe"} & shown.tags
    assert "http" not in shown.text
    assert "url(" not in text
    assert shown.text.count("step 7; 48 validation tokens") >= len(ALL)

    dense = analysed("dense")  # into the same folder: what no longer belongs there goes
    write_analysis(dense, tmp_path)
    left = ("update_magnitude", "relu_pass_rate", "row_cosine")
    assert {path.name for path in tmp_path.iterdir()} == {
        PAGE, *(f"{name}.{kind}" for name in left for kind in ("png", "parquet"))
    }  # fmt: skip
    assert (tmp_path / PAGE).read_text().count("Not drawn.") == len(ALL) - len(left)


def test_the_data_say_what_was_counted_and_of_what(tmp_path: Path) -> None:
    model = make_uneven(tiny_model("moeut"))
    analysis, folder = analysis_of(model, passes_of(model)), tmp_path
    metadata = {name: str(value) for name, value in analysis.facts.items()}
    for make in PICTURES:
        picture = make(analysis)
        table = picture.table()
        assert len({len(column) for column in table.values()}) == 1
        write_parquet(tmp_path / f"{picture.name}.parquet", table, metadata=metadata)
    usage = pq.read_table(folder / "expert_usage.parquet")
    assert usage.schema.metadata[b"step"] == b"7"
    assert usage.schema.metadata[b"tokens"] == b"48"
    counts = dict.fromkeys(range(1, analysis.model.num_layers + 1), 0)
    for row in usage.to_pylist():
        [each] = [e for e in analysis.of_kind("feed_forward") if e.bank.member == row["member"]]
        repeat = each.bank.depths.index(row["depth"])
        assert row["routes"] == each.usage.counts_RE[repeat, row["expert"]]
        counts[row["depth"]] += row["routes"]
    top_k = analysis.model.experts.router.top_k  # type: ignore[union-attr]
    assert set(counts.values()) == {48 * top_k}
    items = pq.read_table(folder / "unique_experts.parquet").to_pylist()
    assert {row["token_id"] for row in items} == set(analysis.item_counts_V.nonzero()[0].tolist())
    heads = pq.read_table(folder / "attention_heads.parquet").to_pylist()
    per_head: dict[tuple, float] = {}
    for row in heads:
        key = (row["kind"], row["depth"], row["head"])
        per_head[key] = per_head.get(key, 0) + row["share_of_head"]
    assert np.allclose(list(per_head.values()), 1)
    assert len(per_head) == 2 * analysis.model.num_layers * analysis.model.attention.num_heads
    preference = pq.read_table(folder / "layer_preference.parquet").to_pylist()
    assert {row["place"] for row in preference} == set(range(analysis.banks[0].bank.num_experts))
    similarity = pq.read_table(folder / "similarity.parquet").to_pylist()
    assert all(row["jaccard"] == 1 for row in similarity if row["depth_a"] == row["depth_b"])


def test_attention_counts_each_head_by_itself() -> None:
    model = make_uneven(tiny_model("moeut"))
    passes = passes_of(model, count=1)
    [each, *_] = analysis_of(model, passes).of_kind("value")
    counted = count_by_loops(passes, each.bank.layer)
    per_head = each.bank.num_experts // each.bank.num_heads
    shares = each.usage.head_share_RHA
    for repeat, tokens in enumerate(counted.choices):
        for head in range(each.bank.num_heads):
            own = [e % per_head for made in tokens for e, _ in made if e // per_head == head]
            expected = [own.count(expert) / len(own) for expert in range(per_head)]
            assert shares[repeat, head].tolist() == pytest.approx(expected)


def test_the_name_of_a_run_is_text() -> None:
    analysis = analysed("dense", run="<script>alert(1) & $x$ \"'")
    text = page(analysis, [])
    assert "script" not in Page(text).tags
    assert "Inside of <script>alert(1) & $x$ \"'" in Page(text).text


def test_figures_for_scripts_have_null_for_the_unknown() -> None:
    found = as_json(analysed("sigma_moe"))
    [bank, *_] = found["banks"]
    assert bank["universal_score"] is None
    assert bank["kept_share"] == [None]
    assert len(found["updates"]["ratio"]) == len({d for b in found["banks"] for d in b["depths"]})
    [mixture, *_] = as_json(analysed("mixture_of_tokens"))["banks"]
    assert mixture["chosen_by"] == "nobody"
    assert "routes" not in mixture


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("error")
def test_every_model_of_the_family_is_drawn(name: str, tmp_path: Path) -> None:
    """Without a warning of matplotlib or numpy, at full size."""
    analysis = analysed(name)
    for picture in write_analysis(analysis, tmp_path):
        if not picture["absent"]:
            pixels = imread(picture["png"])
            assert pixels.shape[1] == drawing.WIDTH * drawing.DPI
            assert pixels[..., :3].std() > 0.03
