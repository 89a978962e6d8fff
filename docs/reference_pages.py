"""Gives the documentation's site an API reference: one page per module, made from the docstrings.

A hook of MkDocs (`hooks` in mkdocs.yml). It adds a page for every module of the package, arranges
them by room in the navigation, and turns links to files of the repository, which are right where a
repository is read, into links to those pages or into plain names.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Floors of the house, from the command down (tests/test_house.py holds them).
ROOMS = (
    "cli",
    "cluster",
    "simulation",
    "export",
    "evaluation",
    "train",
    "planning",
    "distributed",
    "model",
    "kernels",
    "data_pipeline",
)
LINK_OUT = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?:\.\./)+(?P<path>[^)#]+)(?:#[^)]*)?\)")


def modules() -> Iterator[PurePosixPath]:
    """Yields the path of every module of the package that holds more than a docstring, by room."""
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            if len(ast.parse(file.read_text(encoding="utf-8")).body) > 1:
                yield PurePosixPath(file.relative_to(ROOT).as_posix())


def dotted(module: PurePosixPath) -> str:
    """Returns a module's name as Python imports it: `model/moe.py` is `moebius.model.moe`."""
    parts = module.with_suffix("").parts
    return ".".join(["moebius", *(part for part in parts if part != "__init__")])


def page_of(module: PurePosixPath) -> str:
    """Returns the path of a module's page below docs/."""
    return f"reference/{module.with_suffix('.md')}"


def text_of(module: PurePosixPath) -> str:
    """Returns the Markdown of a module's page: a title, and the instruction to mkdocstrings."""
    return f"# `{module}`\n\n::: {dotted(module)}\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Appends the reference to the navigation, one section for every folder."""
    sections: dict[str, list[Any]] = {}
    for module in modules():
        sections.setdefault(f"{module.parent}/", []).append({module.name: page_of(module)})
    if config.nav is not None:
        config.nav.append({"API reference": [{name: pages} for name, pages in sections.items()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the reference."""
    for module in modules():
        files.append(File.generated(config, page_of(module), content=text_of(module)))
    pictures = (ROOT / "benchmarks" / "results").glob("*.png")
    for picture in sorted(pictures):
        source = f"results/{picture.name}"
        files.append(File.generated(config, source, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the repository to the reference, or leaves their text alone."""
    up = "../" * page.file.src_uri.count("/")

    def led(found: re.Match[str]) -> str:
        path, text = PurePosixPath(found["path"]), found["text"]
        if path.suffix == ".png":
            return f"![{text}]({up}results/{path.name})"
        if files.get_file_from_path(page_of(path)) is not None:
            return f"[{text}]({up}{page_of(path)})"
        return text if text.startswith("`") else f"{text} (`{path}`)"

    return LINK_OUT.sub(led, markdown)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Refuses a page that no menu leads to.

    Raises:
        ValueError: pages of docs/ that stand in no line of `nav`.
    """
    named = {page.file.src_uri for page in nav.pages}
    if lost := sorted({file.src_uri for file in files.documentation_pages()} - named):
        raise ValueError(f"mkdocs.yml: its nav leads to none of {', '.join(lost)}")
    return nav
