"""The embedded corpus: the English prose that comes with every Python, without a download.

It consists of the language reference (`pydoc_data.topics`) and of the docstrings and longer comments
of the standard library, whose files are parsed with `ast` and never imported. Code examples,
grammars, tables, fragments and repeated paragraphs are dropped, and wrapped lines are joined. The
result depends only on the Python version: parts that distributions omit, such as test suites, are not
read.

Cost: about 3 s of one core, once per process, nearly all of it `ast.parse`. CPython 3.11 yields 2.0
MB in 942 documents, a quarter of it from comments.
"""

import ast
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ..errors import InputError
from .documents import Document, InputSplit, SplitRange
from .records import RecordRules

EMBEDDED = "embedded"

_PART_BYTES = 500_000


def embedded_size(url: str) -> int:
    """Returns the number of parts of the embedded corpus."""
    return NUM_PARTS


def embedded_ranges(url: str, size: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields one range per part."""
    for part in range(size):
        yield SplitRange(part, part + 1, _PART_BYTES)


def read_embedded(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of one part."""
    for row, text in embedded_part(split.start):
        yield Document(text, EMBEDDED, row)


NUM_PARTS = 4
"""Input splits of the corpus: part i holds every fourth document from the i-th on."""

_DOCUMENT_CHARS = 3000  # a module's text is cut at the end of the paragraph that reaches this
_REPEAT_CHARS = 60  # a paragraph at least this long appears once in the corpus
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "__pycache__"}
_UNDERLINE = re.compile(r"^\s*([*=\-~^\"#+])\1{2,}\s*$", re.MULTILINE)
_BULLET = re.compile(r"^\s*([*\-•]|\d+[.)])\s+")
_NOT_PROSE = re.compile(
    r">>>|::=|^\s*\.\.\.|\$ |^\s*\||[{}]|;$|-\*-|Copyright|Author:", re.MULTILINE
)
_ROLE = re.compile(r":\w+:`~?([^`<]+?)(?:\s*<[^>]+>)?`")
_WORD_CHARS = re.compile(r"[A-Za-z ,.'’]")


@cache
def embedded_documents() -> tuple[str, ...]:
    """Returns all documents, in a fixed order.

    Raises:
        InputError: this Python lacks its library sources.
    """
    documents = tuple(_documents([*([topic] for topic in _topics()), *_modules()]))
    if not documents:
        raise InputError(
            f"input 'embedded': this Python ({sys.version.split()[0]}, "
            f"{sysconfig.get_path('stdlib')}) has neither pydoc_data nor readable library sources: "
            "install the full standard library, or set prepare.input=FILE"
        )
    return documents


def embedded_part(part: int) -> Iterator[tuple[int, str]]:
    """Yields (row, text) of the documents of one of NUM_PARTS parts."""
    yield from list(enumerate(embedded_documents()))[part::NUM_PARTS]


def prose(text: str) -> list[str]:
    """Returns the paragraphs of `text` that are English sentences, each on one line."""
    paragraphs = re.split(r"\n\s*\n", _UNDERLINE.sub("", text))
    items = (item for paragraph in paragraphs for item in _items(paragraph))
    return [joined for item in items if _is_prose(item, joined := _joined(item))]


def _joined(item: str) -> str:
    """Joins an item's lines into one, without reStructuredText markup."""
    plain = _ROLE.sub(r"\1", item).replace("``", "")
    return " ".join(plain.split()).replace("::", ":")


def _items(paragraph: str) -> Iterator[str]:
    """Splits a list without blank lines into one paragraph per bullet."""
    item: list[str] = []
    for line in paragraph.splitlines():
        if _BULLET.match(line) and item:
            yield "\n".join(item)
            item = []
        item.append(_BULLET.sub("", line))
    yield "\n".join(item)


def _is_prose(raw: str, joined: str) -> bool:
    words = joined.split()
    if len(words) < 4 or _NOT_PROSE.search(raw) or joined[-1] not in ".:!?)\"'”":
        return False
    if re.search(r"\S {3,}\S", raw):  # columns of a table or an aligned listing
        return False
    return len(_WORD_CHARS.findall(joined)) >= 0.85 * len(joined)


def _topics() -> Iterator[list[str]]:
    """Yields the language reference: one text per topic."""
    if find_spec("pydoc_data") is None:  # some distributions package it separately
        return
    from pydoc_data import topics

    for _, text in sorted(topics.topics.items()):
        title = text.strip().splitlines()[0].replace('"', "")
        yield [title, *prose(text)]


def _modules() -> Iterator[Iterator[list[str]]]:
    """Yields the titled texts of each module of the standard library, in source order."""
    root = sysconfig.get_path("stdlib")
    for parts in sorted(_source_files(root)):
        *packages, file = parts
        names = (*packages, file.removesuffix(".py"))
        if names[0] in sys.stdlib_module_names and not _LEFT_OUT.intersection(names):
            yield _module_texts(Path(root, *parts), ".".join(names).removesuffix(".__init__"))


def _source_files(root: str) -> Iterator[tuple[str, ...]]:
    """Yields the path components of every .py file below `root`, except in `_LEFT_OUT`."""
    for folder, folders, files in os.walk(root):
        # in place, so that `os.walk` does not enter site-packages, which may be ten times larger
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        inside = Path(folder).relative_to(root).parts
        yield from ((*inside, name) for name in files if name.endswith(".py"))


def _module_texts(path: Path, name: str) -> Iterator[list[str]]:
    source = path.read_bytes().decode("utf-8", errors="ignore")
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates that only look like modules
        return
    for title, docstring in _docstrings(tree, name):
        yield [title, *prose(docstring)]
    for comment in _comments(source):
        yield ["", *prose(comment)]


def _docstrings(node: _Documented, name: str) -> Iterator[tuple[str, str]]:
    if docstring := ast.get_docstring(node):
        yield name, docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")


def _comments(source: str) -> Iterator[str]:
    """Yields runs of three or more comment lines; an empty comment line separates paragraphs."""
    run: list[str] = []
    for line in [*source.splitlines(), ""]:
        if line.lstrip().startswith("#"):
            run.append(line.strip().lstrip("#"))
            continue
        if len(run) >= 3:
            yield "\n".join(run)
        run = []


def _documents(works: Iterable[Iterable[list[str]]]) -> Iterator[str]:
    """Joins the texts of a work and cuts them at paragraph ends, without repeats and short texts."""
    seen: set[str] = set()
    for work in works:
        paragraphs = [paragraph for title, *text in work for paragraph in _fresh(title, text, seen)]
        for document in _cut(paragraphs):
            if len(document) >= 2 * _REPEAT_CHARS:
                yield document


def _fresh(title: str, text: list[str], seen: set[str]) -> list[str]:
    fresh = [
        paragraph for paragraph in text if len(paragraph) < _REPEAT_CHARS or paragraph not in seen
    ]
    seen.update(fresh)
    return [title, *fresh] if fresh and title else fresh


def _cut(paragraphs: list[str]) -> Iterator[str]:
    document: list[str] = []
    for paragraph in paragraphs:
        document.append(paragraph)
        if sum(map(len, document)) >= _DOCUMENT_CHARS:
            yield "\n\n".join(document)
            document = []
    yield "\n\n".join(document)
