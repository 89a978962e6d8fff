"""The report tells what the manifest and the statistics say, and shows text as text."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from matplotlib.image import imread

from moebius.data_pipeline.make.prepare_report import (
    MAX_ROWS,
    PrepareReport,
    StageTime,
    visible,
    write_report,
)
from moebius.data_pipeline.make.statistics import DocumentCounter
from moebius.data_pipeline.manifest import Completion, QuarantinedSplit, SealedEra, read_manifest

HOSTILE = "<script>alert(1)</script> | *x* [a](b) `c` $d$ \x1b[31m\u202e\n# head <b>&amp;"


@pytest.fixture
def report(prepared) -> PrepareReport:
    counter = DocumentCounter()
    for num_bytes in (0, 10, 1000, 1100):
        counter.read(num_bytes)
    counter.drop("duplicate", "said before")
    counter.drop("empty", "")
    return PrepareReport(
        manifest=read_manifest(prepared),
        statistics={"text": counter.statistics()},
        stages=(
            StageTime("scan", 0.5, 0.9, num_text_bytes=10**6),
            StageTime("tokenise", 4.0, num_text_bytes=10**6, num_tokens=3 * 10**5),
        ),
        wall_seconds=5400.0,
        workers="2 processes",
        tokenizer_engine="tiktoken",
        notes=("Only a sample.",),
    )


class Elements(HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


def rendered(folder: Path) -> tuple[Elements, Elements]:
    markdown = MarkdownIt("commonmark").enable("table").render((folder / "report.md").read_text())
    return Elements(markdown), Elements((folder / "report.html").read_text())


def test_the_report_tells_what_was_prepared(report, tmp_path):
    path = write_report(tmp_path, report)
    manifest = report.manifest
    for page in rendered(path.parent):
        for told in (
            f"{manifest.num_tokens('train'):,} tokens of {manifest.num_documents('train')} doc",
            "Only a sample.",
            manifest.tokenizer_sha256,
            "tiktoken",
            "said before",
            "Documents lie in the order of their files",
            "2 processes",
            "2.00 MB/s",
            "0.07 M tokens/s",
            "1 h 30 min",
        ):
            assert told in page.text, told
        assert page.tags.count("table") == 6
        assert page.tags.count("img") == 1


def test_bytes_per_token_are_those_of_the_shards(report, tmp_path):
    write_report(tmp_path, report, picture=False)
    shards = report.manifest.shards
    expected = sum(s.num_text_bytes for s in shards) / sum(s.num_tokens for s in shards)
    assert f"| bytes per token | {expected:.3f} |" in (tmp_path / "report.md").read_text()


def test_the_picture_is_drawn(report, tmp_path):
    write_report(tmp_path, report)
    pixels = imread(tmp_path / "report.png")
    assert pixels.shape[:2] == (825, 1320)
    assert pixels[..., :3].std() > 0.05


def test_without_a_picture_none_is_shown(report, tmp_path):
    write_report(tmp_path, report, picture=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]
    assert all("img" not in page.tags for page in rendered(tmp_path))


def test_text_of_documents_is_shown_and_does_nothing(report, tmp_path):
    counter = DocumentCounter()
    counter.drop(f"language: {HOSTILE}", HOSTILE)
    hostile = replace(report, statistics={"text": counter.statistics()})
    completion = report.manifest.completion
    assert isinstance(completion, Completion)
    quarantined = QuarantinedSplit(source="text", input=HOSTILE, error=HOSTILE)
    changed = completion.model_copy(
        update={
            "dropped": {"text": {f"language: {HOSTILE}": 1}},
            "quarantined": (quarantined,),
        }
    )
    manifest = replace(report.manifest, completion=changed)
    write_report(tmp_path, replace(hostile, manifest=manifest, notes=(HOSTILE,)))
    for page in rendered(tmp_path):
        assert not {"script", "b", "em", "a", "code", "h3"}.intersection(page.tags)
        assert page.text.count(visible(HOSTILE)) == 6
    for name in ("report.md", "report.html"):
        assert not {"\x1b", "\u202e"}.intersection((tmp_path / name).read_text())


def test_visible_text_is_on_one_line():
    assert visible("a\tb\r\n\x00é\u2028\ud800日") == "a\\tb\\r\\n\\x00é\\u2028\\ud800日"


def test_a_folder_that_still_grows_has_a_report(report, tmp_path):
    growing = replace(report, manifest=replace(report.manifest, completion=None))
    write_report(tmp_path, replace(growing, statistics={}, stages=()))
    told = (tmp_path / "report.md").read_text()
    assert "It is not complete yet." in told
    assert "None." in told


def test_long_tables_end_with_what_is_left_out(report, tmp_path):
    first = report.manifest.sealed[0].unpacked()
    eras = tuple(
        SealedEra(first.model_copy(update={"number": number})) for number in range(MAX_ROWS + 7)
    )
    write_report(
        tmp_path, replace(report, manifest=replace(report.manifest, sealed=eras)), picture=False
    )
    assert "and 7 more" in (tmp_path / "report.md").read_text()


def test_the_report_changes_nothing_of_the_data(report, prepared, tmp_path):
    for path in prepared.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = read_manifest(tmp_path)
    write_report(tmp_path, report)
    assert read_manifest(tmp_path) == before
