"""Adds the reference to the documentation's site: the configuration, the commands and Python.

A hook of MkDocs (`hooks` in mkdocs.yml). The pages are made from the code, so that they cannot differ
from it. The hook also turns links to files of the repository, which work where a repository is read,
into plain names.
"""

import argparse
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from moebius.cli.main import build_parser
from moebius.cli.models.catalogue import catalogue, short
from moebius.train.config.keys import Key
from moebius.train.config.reference import keys, section_documents
from moebius.train.config.suggestions import words_known_elsewhere
from moebius.train.recipes.smoke import RECIPES

ROOT = Path(__file__).resolve().parents[1]
LINK_OUT = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?:\.\./)+(?P<path>[^)#]+)(?P<place>#[^)]*)?\)"
)
EXAMPLE = re.compile(r"^\[`(examples/\w+\.py)`\]\(\.\./\1\)$", re.MULTILINE)
# The page that shows what a file of the repository says.
PAGES = {
    "train/config/run_config.py": "config.md",
    "cli/main.py": "commands.md",
    "api.py": "python.md",
    "model/routers/router.py": "interfaces.md",
}

# What the pages of Python's names are read from. mkdocstrings reads every file below the package's folder,
# which in a checkout holds environments and builds as well: 60 times as much.
SOURCES = ROOT / "build" / "docs" / "moebius"
PARTS = (
    *(
        "__init__.py",
        "api.py",
        "plugins.py",
        "cli",
        "cluster",
        "data_pipeline",
        "distributed",
    ),
    *("evaluation", "export", "kernels", "model", "planning", "train"),
)

PYTHON = """# Python

`import moebius` gives these names, each imported when it is first used. `import moebius` alone does not
import torch.

::: moebius.api

## Recorded runs

::: moebius.cluster.report.run_records
"""

INTERFACES = """# Interfaces

These are the classes that an extension implements. [Extend](extend.md) shows each at work.

## Routers

::: moebius.model.routers.router

## Dispatchers

::: moebius.distributed.dispatch.base

## Kernel backends

::: moebius.kernels.calls

## Hooks of the training loop

::: moebius.train.hooks
"""


def on_startup(command: str, dirty: bool) -> None:
    """Links the package's own files into a folder that holds nothing else.

    Later is too late: mkdocstrings passes over a path that is not there when its handler is made.
    """
    shutil.rmtree(SOURCES, ignore_errors=True)
    SOURCES.mkdir(parents=True)
    for part in PARTS:
        (SOURCES / part).symlink_to(ROOT / part)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, and the pictures of the benchmarks."""
    pages = {
        "config.md": _config_page(),
        "commands.md": _commands_page(),
        "python.md": PYTHON,
        "interfaces.md": INTERFACES,
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces links to files of the repository by their pages, their code, their names, or pictures."""
    for mark, table in TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, table())
    up = "../" * page.file.src_uri.count("/")

    def replaced(found: re.Match[str]) -> str:
        path, text = PurePosixPath(found["path"]), found["text"]
        if shown := PAGES.get(str(path)):
            return f"[{text}]({up}{shown}{found['place'] or ''})"
        if path.suffix == ".png":
            return f"![{text}]({up}results/{path.name})"
        return text if text.startswith("`") else f"{text} (`{path}`)"

    def whole(found: re.Match[str]) -> str:
        return f"```py\n{(ROOT / found[1]).read_text(encoding='utf-8')}```"

    return LINK_OUT.sub(replaced, EXAMPLE.sub(whole, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shows the paths of sources as they are in the repository."""
    return html.replace("build/docs/moebius/", "")


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Refuses a page that no menu leads to.

    Raises:
        ValueError: `nav` lists some pages of docs/ nowhere.
    """
    named = {page.file.src_uri for page in nav.pages}
    if lost := sorted({file.src_uri for file in files.documentation_pages()} - named):
        raise ValueError(f"mkdocs.yml: its nav leads to none of {', '.join(lost)}")
    return nav


def _config_page() -> str:
    """Returns the page of all keys, one heading for each, so that a search finds it."""
    parts = [
        "# Configuration",
        "Every key of every section. Change one with `section.key=value` after a recipe, or in a TOML "
        "file. In a terminal, `moebius config train.steps` shows one key, and `moebius config smoke > "
        "mine.toml` writes a recipe as a commented file.",
    ]
    documents = section_documents()
    section = ""
    for key in keys():
        if (top := key.path.partition(".")[0]) != section:
            section = top
            parts += [f"## `{section}`", documents[section]]
        parts += [f"### `{key.path}`", key.meaning, _facts(key)]
    return "\n\n".join(parts) + "\n"


def recipe_table() -> str:
    """Returns every recipe with its sizes, as `moebius models` lists them."""
    rows = [
        "| recipe | parameters | active | training FLOPs/token | architecture |",
        "|---|--:|--:|--:|---|",
    ]
    for entry in catalogue((), RECIPES):
        total, active = (
            short(getattr(entry.parameters, name), "B") for name in ("total", "active")
        )
        cells = (f"`{entry.name}`", total, active, short(entry.flops.training), entry.description)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _facts(key: Key) -> str:
    facts = [f"Type: {key.type}", f"default: `{key.default_text}`"]
    if key.unit:
        facts.append(f"unit: {key.unit}")
    if key.kinds:
        facts.append(f"only with `{key.section}.kind` {', '.join(key.kinds)}")
    return " · ".join([*facts, f"example: `{key.example}`"])


def _commands_page() -> str:
    """Returns the help of every command, as the terminal shows it."""
    parts = ["# Commands", "Every command and option, as `moebius COMMAND --help` prints them."]
    for name, parser in _commands(build_parser()):
        parts += [f"## `{name}`", f"```text\n{parser.format_help().rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields every command that can be called, by its full name."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog, parser
    for group in groups:
        for command in group.choices.values():
            yield from _commands(command)


def word_table() -> str:
    """Returns the words of other frameworks with the keys or answers that they lead to."""
    rows = [
        f"| {', '.join(words)} | {meant if ' ' in meant else f'`{meant}`'} |"
        for meant, words in words_known_elsewhere().items()
    ]
    return "\n".join(["| you know | here |", "|---|---|", *rows])


TABLES = {
    "<!-- the table of recipes -->": recipe_table,
    "<!-- the table of words -->": word_table,
}
