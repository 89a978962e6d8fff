"""The documents' paths, links, quoted lines, names and commands exist.

Each check is a function from a document's text to its faults, and must find the one that `FAULTS`
plants: a check that cannot fail proves nothing.
"""

import ast
import functools
import io
import re
import shlex
import subprocess
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(.*\))?")
# Names of others' programs that no source of ours speaks of.
FOREIGN = {
    *("CPLUS_INCLUDE_PATH", "GROUPED_GEMM_CUTLASS", "RAY_USE_TLS", "local_lock"),
    "target_modules",
}
Check = Callable[[str], list[str]]
SHELL = re.compile(
    r"(moebius|make|source|export|pip|python|cd|git|ray|sbatch|kubectl|tar|sed|torchrun|curl|docker|ssh)"
    r" |[A-Z_]+=\S* |#|$"
)
READERS: dict[str, Callable[[str], object]] = {"python": ast.parse, "toml": tomllib.loads}


@functools.cache
def tracked() -> frozenset[str]:
    """Returns every tracked file and its folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    files = [path for path in listed.split("\0") if path and (ROOT / path).is_file()]
    folders = {folder.as_posix() for path in files for folder in PurePosixPath(path).parents}
    return frozenset(files) | folders


@functools.cache
def documents() -> tuple[str, ...]:
    """Returns the checked documents; CHANGELOG describes the past."""
    found = [path for path in tracked() if path.endswith(".md") and path != "CHANGELOG.md"]
    return tuple(sorted(found))


@functools.cache
def source_lines() -> frozenset[str]:
    """Returns every source line, without indentation and trailing comment."""
    texts = (_text(path) for path in tracked() if path.endswith((".py", ".toml", ".ipynb")))
    return frozenset(_code(line) for text in texts for line in text.splitlines())


@functools.cache
def source_words() -> frozenset[str]:
    """Returns every word of the sources and their file names."""
    sources = [
        path
        for path in tracked()
        if path.endswith((".py", ".toml", ".txt", ".cpp", ".cff", ".yml", "Makefile", ".ci/run"))
        and path != "tests/test_docs.py"
    ]
    words = {word for path in sources for word in re.findall(r"\w+", _text(path))}
    return frozenset(words | {PurePosixPath(path).stem for path in tracked()})


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _code(line: str) -> str:
    """Returns a line without indentation and trailing comment."""
    return re.sub(r"\s{2,}#.*", "", line.strip())


def prose(text: str) -> str:
    """Returns a document without its fenced blocks."""
    return FENCE.sub("", text)


def blocks(text: str, *languages: str) -> Iterator[str]:
    """Returns the fenced blocks of these languages."""
    return (found[2] for found in FENCE.finditer(text) if found[1] in languages)


# The checks -----------------------------------------------------------------------------------------------------------


def paths_exist(text: str) -> list[str]:
    """Checks paths in prose and pictures that begin with a folder or look like a file of ours."""
    spans = [span for span in SPAN.findall(prose(text)) if re.fullmatch(r"[\w./*-]+", span)]
    drawn = re.findall(r"[a-z_]+/[\w./]*\w", "\n".join(blocks(text, "text")))
    wrong = []
    for path in [*spans, *drawn]:
        if "/" in path and path.split("/")[0] in tracked():
            if not _is_there(path):
                wrong.append(f"{path}: there is no such file or folder")
        elif path.endswith((".py", ".cpp")) and "/" not in path and not _is_a_file_name(path):
            wrong.append(f"{path}: no file has this name")
    return wrong


def paths_in_sources_exist(text: str) -> list[str]:
    """Checks paths of ours in a source's comments and docstrings: `room/`, `room/file.py`."""
    words = "\n".join(
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT or token.string.startswith('"""')
    )
    paths = re.findall(r"(?<![\w./<{-])(\w+/(?:\w+/)*(?:\w+\.(?:py|cpp|md))?)(?![\w*<{.])", words)
    return [
        f"{path}: there is no such file or folder"
        for path in paths
        if path.split("/")[0] in tracked() and path.rstrip("/") not in tracked()
    ]


def _is_there(path: str) -> bool:
    path = path.rstrip("/")
    return path in tracked() or f"{path}.py" in tracked() or any(ROOT.glob(path))


def _is_a_file_name(name: str) -> bool:
    return any(PurePosixPath(path).name == name for path in tracked())


def links_lead_somewhere(text: str, folder: str = "docs") -> list[str]:
    """Checks relative links, as a reader of the repository follows them."""
    wrong = []
    for target in LINK.findall(prose(text)):
        path = target.partition("#")[0]
        if re.match(r"[a-z]+:", target) or not path:
            continue
        if not (ROOT / folder / path).exists():
            wrong.append(f"{target}: the link leads nowhere")
    if "--8<--" in text:
        wrong.append("--8<--: a code host shows this line instead of the file; link to it")
    return wrong


def quotations_are_true(text: str) -> list[str]:
    """Checks that every line of a Python or TOML block is in a source."""
    quoted = (line for block in blocks(text, "python", "toml") for line in block.splitlines())
    lines = (_code(line) for line in quoted)
    return [
        f"{line}: no source has this line" for line in lines if line and line not in source_lines()
    ]


def names_exist(text: str) -> list[str]:
    """Checks that names in code spans with a capital, an underscore or a dot are in the sources."""
    wrong = []
    for span in SPAN.findall(prose(text)):
        name = span.partition("=")[0].partition("(")[0]
        if not NAME.fullmatch(name) or not re.search(r"[A-Z_.]", name) or name in FOREIGN:
            continue
        if missing := [part for part in name.split(".") if not _is_known(part)]:
            wrong.append(f"{span}: no source knows {', '.join(missing)}")
    return wrong


def _is_known(word: str) -> bool:
    """Returns whether a word, or an affix (`num_`, `_bytes`), is in the sources."""
    if word.startswith("_") or word.endswith("_"):
        return any(word in known for known in source_words())
    return word in source_words()


def commands_can_be_given(text: str) -> list[str]:
    """Checks every `moebius …` of a shell, with its overrides, and that `make …` names a target."""
    wrong = []
    for block in blocks(text, "sh"):
        for line in block.replace("\\\n", "").splitlines():
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if words[:1] == ["make"]:
                wrong += [f"{line}: no such target" for word in words[1:] if not _is_target(word)]
            elif words[:1] == ["moebius"] and (problem := _refusal(words[1:])):
                wrong.append(f"{line}: {problem}")
    return wrong


def _is_target(word: str) -> bool:
    is_target = re.search(rf"^{re.escape(word)}:", _text("Makefile"), re.MULTILINE)
    return "=" in word or word == "…" or is_target is not None


def _refusal(words: list[str]) -> str | None:
    from moebius.cli.main import ELSEWHERE, parse
    from moebius.train.config.resolve import resolve
    from moebius.train.recipes.smoke import RECIPES

    if words[0] in ELSEWHERE:
        return None  # a command of a satellite, which may not be installed
    try:
        options = parse(words)
        if getattr(options, "name", None) in RECIPES:
            # which an earlier command of the page prepares
            rest = [word for word in options.overrides if word != "data.directory=shards"]
            resolve(options.name, rest, RECIPES)
    except SystemExit as ended:
        return f"the command line refuses it (exit code {ended.code})" if ended.code else None
    except ValueError as error:
        return str(error)
    return None


def blocks_can_be_copied(text: str) -> list[str]:
    """Checks that a shell's block holds commands alone, and that Python and TOML can be read."""
    wrong = []
    for block in blocks(text, "sh"):
        lines = block.replace("\\\n", "").splitlines()
        wrong += [f"{line}: is no command" for line in lines if not SHELL.match(line)]
    for language, read in READERS.items():
        for block in blocks(text, language):
            try:
                read(block)
            except (ValueError, SyntaxError) as error:
                wrong.append(f"{block.splitlines()[0]}: {error}")
    return wrong


def recipes_fit(text: str) -> list[str]:
    """Checks that every recipe of a Python block trains on its job's ranks."""
    import moebius

    wrong = []
    for block in (found for found in blocks(text, "python") if "moebius.recipe(" in found):
        calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
        for call in (each for each in calls if ast.unparse(each.func) == "moebius.recipe"):
            words = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
            try:
                config = moebius.recipe(*map(ast.literal_eval, call.args), **words)
                config.check_world(config.world_size)
            except ValueError as error:
                wrong.append(f"{ast.unparse(call)}: {error}")
    return wrong


CHECKS: list[Check] = [
    paths_exist,
    links_lead_somewhere,
    quotations_are_true,
    names_exist,
    commands_can_be_given,
    blocks_can_be_copied,
    recipes_fit,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_documents_keep(check: Check) -> None:
    wrong = []
    for path in documents():
        folder = PurePosixPath(path).parent.as_posix()
        of_file = {"folder": folder} if check is links_lead_somewhere else {}
        wrong += [f"{path}: {problem}" for problem in check(_text(path), **of_file)]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.slow
def test_sources_name_files_that_exist() -> None:
    wrong = [
        f"{path}: {problem}"
        for path in sorted(tracked())
        if path.endswith(".py") and path != "tests/test_docs.py"
        for problem in paths_in_sources_exist(_text(path))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


FAULTS: list[tuple[Check, str, str]] = [
    (paths_in_sources_exist, "x = 1  # see train/lop.py", "train/lop.py: there is no such"),
    (paths_in_sources_exist, '"""Watches (cluster/watching/)."""', "cluster/watching/: there is"),
    (paths_exist, "see `train/lop.py`", "train/lop.py: there is no such file"),
    (paths_exist, "```text\n model/transfomer.py\n```\n", "model/transfomer.py: there is no such"),
    (paths_exist, "see `lop.py`", "lop.py: no file has this name"),
    (links_lead_somewhere, "[a](nowhere.md#there)", "nowhere.md#there: the link leads nowhere"),
    (quotations_are_true, "```python\n    x = nothing_like_it()\n```\n", "no source has this line"),
    (names_exist, "`Routes.never_heard_of`", "no source knows never_heard_of"),
    (names_exist, "`NeverHeardOf(1)`", "no source knows NeverHeardOf"),
    (commands_can_be_given, "```sh\nmoebius trian smoke\n```\n", "the command line refuses"),
    (commands_can_be_given, "```sh\nmoebius train smoke train.stepz=1\n```\n", "did you mean"),
    (commands_can_be_given, "```sh\nmake nothing\n```\n", "no such target"),
    (blocks_can_be_copied, "```sh\nmoebius models\nrecipe  parameters\n```\n", "is no command"),
    (blocks_can_be_copied, "```python\nprint(1\n```\n", "never closed"),
    (blocks_can_be_copied, "```toml\n[train\nsteps = 1\n```\n", "[train"),
    (
        recipes_fit,
        '```python\nmoebius.recipe("smoke", job__num_nodes=1)\n```\n',
        "the mesh does not fit the world",
    ),
]


@pytest.mark.parametrize(("check", "text", "message"), FAULTS)
def test_a_fault_is_found(check: Check, text: str, message: str) -> None:
    assert any(message in problem for problem in check(text)), check(text)


def test_every_check_is_seen_to_fail() -> None:
    assert {check for check, _, _ in FAULTS} == {*CHECKS, paths_in_sources_exist}


def test_words_of_other_frameworks_lead_to_keys_that_exist() -> None:
    from moebius.train.config.keys import known_keys
    from moebius.train.config.run_config import Config
    from moebius.train.config.suggestions import words_known_elsewhere

    known = {key for key, _ in known_keys(Config)}
    assert {meant for meant in words_known_elsewhere() if " " not in meant} <= known
    assert "<!-- the table of words -->" in _text("docs/words.md")
