"""The report of a preparation, for people: `report.md`, `report.html` and `report.png` in the folder.

Everything about the data is read off the manifest; what the manifest does not know comes as a
`PrepareReport`: what the documents were like, examples of what was dropped, and how long things
took. Times, hosts and numbers of workers stand here and nowhere else: shards and manifests are the
same without a report, and the report may be deleted.

Text of documents is shown with everything escaped that a terminal, a browser or Markdown could take
for more than text.

Cost: `report.md` and `report.html` a millisecond; the picture half a second and 60 MB for
matplotlib.
"""

import base64
import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from ..atomic import atomic_write
from ..manifest import DatasetManifest
from .statistics import ScanStatistics

REPORT_FILE = "report.md"
HTML_FILE = "report.html"
PICTURE_FILE = "report.png"

MAX_ROWS = 100  # of a table: what is beyond is counted
MAX_BARS = 12
_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class StageTime:
    """Says how long a stage took, and what went through it."""

    name: str
    wall_seconds: float  # from its first task to its last; stages overlap
    task_seconds: float = 0.0  # of all tasks together
    num_text_bytes: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class PrepareReport:
    """Holds what a preparation knows beside its manifest."""

    manifest: DatasetManifest
    statistics: Mapping[str, ScanStatistics] = field(default_factory=dict)  # by source
    stages: tuple[StageTime, ...] = ()
    wall_seconds: float = 0.0
    workers: str = "this process"
    tokenizer_engine: str = ""  # the library that encoded
    notes: tuple[str, ...] = ()  # sentences that a reader should know, such as an unusual mode

    @property
    def all_statistics(self) -> ScanStatistics:
        """Returns the statistics of all sources together, in the order of the sources."""
        merged = ScanStatistics()
        for source in self.manifest.sources:
            merged = merged.merge(self.statistics.get(source.name, ScanStatistics()))
        return merged


def write_report(directory: str | Path, report: PrepareReport, *, picture: bool = True) -> Path:
    """Writes the report into the prepared folder and returns the path of `report.md`.

    Args:
        directory: the prepared folder.
        report: what is told.
        picture: whether matplotlib is asked for `report.png`, which `report.html` then holds too.
    """
    folder = Path(directory)
    drawn = draw(report) if picture else b""
    if drawn:
        _write(folder / PICTURE_FILE, drawn)
    blocks = list(_blocks(report, title=folder.resolve().name, picture=bool(drawn)))
    _write(folder / REPORT_FILE, _markdown(blocks).encode())
    _write(folder / HTML_FILE, _html(blocks, drawn).encode())
    return folder / REPORT_FILE


def _write(path: Path, data: bytes) -> None:
    with atomic_write(path) as file:
        file.write(data)


# ---- what is told


@dataclass(frozen=True)
class _Block:
    """Is a heading, a paragraph, the picture or a table of plain text."""

    kind: Literal["title", "heading", "paragraph", "picture", "table"]
    text: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def _blocks(report: PrepareReport, *, title: str, picture: bool) -> Iterator[_Block]:
    manifest = report.manifest
    yield _Block("title", f"Prepared data: {title}")
    yield _Block("paragraph", _summary(report))
    for note in report.notes:
        yield _Block("paragraph", note)
    if picture:
        yield _Block("picture")
    yield _Block("heading", "Sources")
    yield _sources(report)
    yield _Block("heading", "Tokenizer")
    yield _tokenizer(report)
    yield _Block("heading", "Documents that were dropped")
    yield from _dropped(report)
    if manifest.completion is not None and manifest.completion.quarantined:
        yield _Block("heading", "Quarantined input")
        yield _quarantined(report)
    yield _Block("heading", "Eras")
    yield from _eras(report)
    yield _Block("heading", "How it was made")
    yield from _making(report)


def _summary(report: PrepareReport) -> str:
    manifest = report.manifest
    counts = [
        f"{manifest.num_tokens(split):,} tokens of {manifest.num_documents(split):,} documents "
        f"for {'training' if split == 'train' else split}"
        for split in _SPLITS
    ]
    state = "" if manifest.complete else " It is not complete yet."
    return f"{counts[0]}, {counts[1]}.{state}"


def _sources(report: PrepareReport) -> _Block:
    manifest, rows = report.manifest, []
    total = max(1, manifest.num_tokens("train"))
    for source in manifest.sources:
        shards = [shard for era in manifest.eras(source.name) for shard in era.shards]
        documents, tokens = (
            {
                split: sum(getattr(shard, name) for shard in shards if shard.split == split)
                for split in _SPLITS
            }
            for name in ("num_documents", "num_tokens")
        )
        rows.append(
            (
                source.name,
                source.licence or "not stated",
                f"{source.num_splits:,}",
                f"{documents['train']:,}",
                f"{tokens['train']:,}",
                f"{100 * tokens['train'] / total:.1f} %",
                f"{documents['validation']:,}",
                f"{tokens['validation']:,}",
                f"{_bytes_per_token(shards):.2f}",
            )
        )
    columns = (
        *("source", "licence", "input splits", "train documents", "train tokens"),
        *("of all", "validation documents", "validation tokens", "bytes per token"),
    )
    return _table(columns, rows)


def _bytes_per_token(shards: Sequence[Any]) -> float:
    """Returns the UTF-8 bytes that a token stands for; ends of documents count as tokens."""
    num_tokens = sum(shard.num_tokens for shard in shards)
    return sum(shard.num_text_bytes for shard in shards) / num_tokens if num_tokens else 0.0


def _tokenizer(report: PrepareReport) -> _Block:
    tokenizer = report.manifest.header.tokenizer
    rows = [
        ("kind", tokenizer.kind),
        ("vocabulary", f"{tokenizer.vocab_size:,}"),
        ("bytes per token", f"{_bytes_per_token(report.manifest.shards):.3f}"),
        ("file", tokenizer.file),
        ("sha256", tokenizer.sha256),
    ]
    if report.tokenizer_engine:
        rows.insert(2, ("encoded by", report.tokenizer_engine))
    return _table(("what", "value"), rows)


def _dropped(report: PrepareReport) -> Iterator[_Block]:
    statistics = report.all_statistics
    dropped = report.manifest.dropped or statistics.dropped
    if not dropped:
        yield _Block("paragraph", "None.")
        return
    by_source = report.manifest.completion.dropped if report.manifest.completion else {}
    rows = []
    for reason, count in sorted(dropped.items(), key=lambda item: (-item[1], item[0])):
        of_all = 100 * count / max(count, statistics.num_documents)
        share = f"{of_all:.2f} %" if statistics.num_documents else ""
        sources = [
            f"{name} {of_source[reason]:,}"
            for name, of_source in by_source.items()
            if of_source.get(reason)
        ]
        rows.append((reason, f"{count:,}", share, ", ".join(sources)))
    yield _table(("reason", "documents", "of those read", "by source"), rows)
    examples = [
        (reason, visible(text))
        for reason in dropped
        for text in statistics.examples.get(reason, ())
    ]
    if examples:
        yield _Block("paragraph", "How some of them begin:")
        yield _table(("reason", "text"), examples)


def _quarantined(report: PrepareReport) -> _Block:
    assert report.manifest.completion is not None
    rows = [
        (split.source, split.input, visible(split.error))
        for split in report.manifest.completion.quarantined
    ]
    return _table(("source", "input split", "error"), rows)


def _eras(report: PrepareReport) -> Iterator[_Block]:
    manifest = report.manifest
    yield _Block(
        "paragraph",
        "An era is sealed and shuffled as one; it is closed once it has "
        f"{manifest.header.era_tokens:,} train tokens.",
    )
    rows = [
        (
            era.source,
            str(era.number),
            f"{len(era.shards):,}",
            f"{era.num_tokens('train'):,}",
            f"{era.num_tokens('validation'):,}",
        )
        for source in manifest.sources
        for era in manifest.eras(source.name)
    ]
    yield _table(("source", "era", "shards", "train tokens", "validation tokens"), rows)


def _making(report: PrepareReport) -> Iterator[_Block]:
    shuffled = report.manifest.spec.get("shuffle_documents")
    order = (
        "Documents were spread over all shards of their source (two-pass bucket shuffle)."
        if shuffled
        else "Documents lie in the order of their files: rows are shuffled inside an era only."
    )
    yield _Block("paragraph", f"{order} Workers: {report.workers}.")
    if not report.stages:
        return
    rows = [
        (
            stage.name,
            _duration(stage.wall_seconds),
            _duration(stage.task_seconds) if stage.task_seconds else "",
            _rate(stage.num_text_bytes / 1e6, stage.wall_seconds, "MB/s"),
            _rate(stage.num_tokens / 1e6, stage.wall_seconds, "M tokens/s"),
        )
        for stage in report.stages
    ]
    if report.wall_seconds:
        rows.append(("all", _duration(report.wall_seconds), "", "", ""))
    yield _table(("stage", "wall time", "time of its tasks", "text", "tokens"), rows)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _rate(amount: float, seconds: float, unit: str) -> str:
    return f"{amount / seconds:.2f} {unit}" if amount and seconds else ""


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> _Block:
    shown = tuple(rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        shown = (*shown, (f"and {len(rows) - MAX_ROWS:,} more", *("",) * (len(columns) - 1)))
    return _Block("table", columns=columns, rows=shown)


# ---- how it is written


def visible(text: str) -> str:
    """Returns the text on one line, with an escape for all that is not printed as itself.

    Control characters, line breaks and marks that turn the direction of writing become `\\n`,
    `\\x1b`, `\\u202e`.
    """
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", errors="backslashreplace").decode("ascii")
        for character in text
    )


def _markdown(blocks: Sequence[_Block]) -> str:
    return "\n\n".join(_markdown_block(block) for block in blocks) + "\n"


def _markdown_block(block: _Block) -> str:
    if block.kind == "title":
        return f"# {_in_markdown(block.text)}"
    if block.kind == "heading":
        return f"## {_in_markdown(block.text)}"
    if block.kind == "picture":
        return f"![tokens, lengths, dropped documents and speed]({PICTURE_FILE})"
    if block.kind == "table":
        lines = [block.columns, ("---",) * len(block.columns)]
        lines += [tuple(map(_in_markdown, row)) for row in block.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return _in_markdown(block.text)


_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")  # what begins something inside a line


def _in_markdown(text: str) -> str:
    """Escapes what Markdown, or HTML inside it, would take for more than text."""
    return html.escape(_MARKDOWN.sub(r"\\\1", visible(text)), quote=False)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22313f; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0;
         border-bottom: 1px solid #e4e8ec; }
th { font-weight: 600; } img { max-width: 100%; }
"""


def _html(blocks: Sequence[_Block], picture: bytes) -> str:
    title = next(block.text for block in blocks if block.kind == "title")
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(visible(title))}</title><style>{_STYLE}</style></head>\n<body>\n"
    )
    body = "\n".join(_html_block(block, picture) for block in blocks)
    return f"{head}{body}\n</body></html>\n"


def _html_block(block: _Block, picture: bytes) -> str:
    text = html.escape(visible(block.text))
    if block.kind == "picture":
        data = base64.b64encode(picture).decode("ascii")
        return f'<img alt="the figures below as a picture" src="data:image/png;base64,{data}">'
    if block.kind == "table":
        lines = [_html_row("th", block.columns), *(_html_row("td", row) for row in block.rows)]
        return "<table>\n" + "\n".join(lines) + "\n</table>"
    tag = {"title": "h1", "heading": "h2", "paragraph": "p"}[block.kind]
    return f"<{tag}>{text}</{tag}>"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return (
        "<tr>" + "".join(f"<{tag}>{html.escape(visible(cell))}</{tag}>" for cell in cells) + "</tr>"
    )


# ---- the picture

_INK, _RED, _BLUE, _VIOLET, _GREEN = "#22313f", "#d1495b", "#2e6f95", "#8d6a9f", "#4c956c"


def import_drawing() -> None:
    """Imports what `draw` needs: half a second."""
    import_module("matplotlib.backends.backend_agg")
    import_module("matplotlib.figure")


def draw(report: PrepareReport) -> bytes:
    """Draws tokens per source, lengths, dropped documents and speed; returns a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(12, 7.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    tokens, lengths, dropped, speed = figure.subplots(2, 2).flat
    manifest, statistics = report.manifest, report.all_statistics
    train = {
        source.name: sum(era.num_tokens("train") for era in manifest.eras(source.name))
        for source in manifest.sources
    }
    _draw_bars(tokens, train, "train tokens per source", _BLUE)
    _draw_lengths(lengths, statistics)
    _draw_bars(dropped, manifest.dropped or statistics.dropped, "documents dropped", _RED)
    rates = {
        stage.name: stage.num_text_bytes / 1e6 / stage.wall_seconds
        for stage in report.stages
        if stage.num_text_bytes and stage.wall_seconds
    }
    _draw_bars(speed, rates, "MB of text per second, by stage", _GREEN)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


def _draw_bars(panel: Any, values: Mapping[str, float], title: str, color: str) -> None:
    largest = sorted(values.items(), key=lambda item: -item[1])[:MAX_BARS]
    bars = panel.barh(range(len(largest)), [value for _, value in largest], color=color)
    panel.set_yticks(range(len(largest)), [_label(name) for name, _ in largest], fontsize=9)
    panel.set_ylim(max(5, len(largest)) - 0.4, -0.6)  # few bars are no thicker than many
    numbers = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for _, value in largest]
    panel.bar_label(bars, labels=numbers, fontsize=9, padding=4)
    panel.margins(x=0.15)
    panel.set_xticks([])
    panel.spines["bottom"].set_visible(False)
    _finish(panel, title if largest else f"{title}: none")


def _label(name: str) -> str:
    """Returns a name that matplotlib shows as it is: "$" would begin mathematics."""
    text = visible(name).replace("$", r"\$")
    return text if len(text) <= 40 else f"{text[:39]}…"


def _draw_lengths(panel: Any, statistics: ScanStatistics) -> None:
    places = [place for place, count in enumerate(statistics.lengths) if count]
    if places:
        shown = range(min(places), max(places) + 1)
        panel.bar(shown, [statistics.lengths[place] for place in shown], 0.9, color=_VIOLET)
        step = max(1, len(shown) // 8)
        ticks = list(shown)[::step]
        panel.set_xticks(ticks, [_size(2**place // 2) for place in ticks], fontsize=9)
        panel.set_xlabel("UTF-8 bytes, from", fontsize=9)
    _finish(panel, "documents read, by length" + ("" if places else ": none"))


def _size(num_bytes: int) -> str:
    for unit in ("", "k", "M", "G"):
        if num_bytes < 1024:
            return f"{num_bytes}{unit}"
        num_bytes //= 1024
    return f"{num_bytes}T"


def _finish(panel: Any, title: str) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(title, loc="left", fontsize=11, color=_INK)
