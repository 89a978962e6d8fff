"""Types every mistake of mistakes.txt and compares the whole answer.

A paragraph there is a session: `$ cat NAME` shows a file, which is written; then come one command, or
one line of Python, and its answer. Lines of an answer beyond 100 columns go on, indented by four
spaces. `{any}` stands for what varies, and {here} for the folder. A mistake changes nothing on the disk.

`python tests/test_mistakes.py` writes the answers of today into the file.
"""

import contextlib
import difflib
import functools
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hf_case import make_run, model_of

import moebius
from moebius.cli.main import main

FILE = Path(__file__).with_name("mistakes.txt")
PARAGRAPH = re.compile(r"(?<=\n\n)(?:\$|>>>) (?:.+\n)+")
OWN = """
def no_config(given): ...
def number(): return 3
def two(named, config): ...
"""


TRAINED = re.compile(r"\bruns/(dense|moeut|sigma_moe|deepseek|x_moe)\b")


def sessions(text: str) -> list[str]:
    return PARAGRAPH.findall(text)


def parts(session: str) -> tuple[dict[str, str], str, str]:
    """Returns the files of a session, what is typed, and the answer."""
    *shown, last = re.split(r"^(?=\$|>>>)", session, flags=re.MULTILINE)[1:]
    files = dict(each.removeprefix("$ cat ").split("\n", 1) for each in shown)
    typed, _, answer = last.partition("\n")
    return files, typed, answer


@functools.cache
def trained(recipe: str) -> dict[str, bytes]:
    """Returns the files of a run of a small model with a checkpoint, by path."""
    with tempfile.TemporaryDirectory() as name:
        run = make_run(Path(name) / "runs" / recipe, model_of(recipe))
        files = (path for path in run.rglob("*") if path.is_file())
        return {path.relative_to(name).as_posix(): path.read_bytes() for path in files}


@contextlib.contextmanager
def a_folder(files: dict[str, str], typed: str) -> Iterator[Path]:
    """Makes the folder that the head of mistakes.txt describes, and enters it."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        here = Path(name)
        for folder in ("empty", "runs/folder", "runs/mine/checkpoints"):
            (here / folder).mkdir(parents=True)
        known = {"text.txt": "some text\n", "runs/mine/config.json": "{}\n", "own.py": OWN}
        for path, content in (known | files).items():
            (here / path).write_text(content)
        for recipe in TRAINED.findall(typed):
            for path, data in trained(recipe).items():
                (here / path).parent.mkdir(parents=True, exist_ok=True)
                (here / path).write_bytes(data)
        sys.modules.pop("own", None)
        no_cache = mock.patch.object(sys, "dont_write_bytecode", True)
        with no_cache, mock.patch.dict(os.environ, {"XDG_STATE_HOME": name}):
            yield here


def said(typed: str) -> str:
    """Returns what a command printed, without argparse's usage, or the error that a call raised."""
    if typed.startswith(">>> "):
        with pytest.raises((ValueError, TypeError, AttributeError)) as raised:
            eval(typed[4:], {"moebius": moebius})
        return f"{type(raised.value).__name__}: {raised.value}\n"
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        pytest.raises(SystemExit) as ended,
    ):
        main(shlex.split(typed.removeprefix("$ moebius ")))
    assert ended.value.code == 2, printed.getvalue()
    return re.sub(r"\Ausage: .*?(?=^moebius)", "", printed.getvalue(), flags=re.S | re.M)


def answered(session: str) -> str:
    """Returns a session with the answer of today, as it stands in the file."""
    files, typed, _ = parts(session)
    with a_folder(files, typed) as here:
        before = set(here.rglob("*"))
        answer = said(typed).replace(str(here), "{here}")
        assert not (left := set(here.rglob("*")) - before), f"{typed} leaves {left} behind"
    wrap = textwrap.TextWrapper(
        100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    lines = [part for line in answer.splitlines() for part in wrap.wrap(line)]
    return session[: session.index(typed)] + "\n".join([typed, *lines]) + "\n"


def fits(session: str, now: str) -> bool:
    one_line = (" ".join(each.split()) for each in (session, now))
    pattern, text = next(one_line), next(one_line)
    return re.fullmatch(re.escape(pattern).replace(r"\{any\}", ".+?"), text) is not None


@pytest.mark.parametrize(
    "session", sessions(FILE.read_text()), ids=lambda session: parts(session)[1][2:80]
)
def test_a_mistake_is_told_with_the_way_out(session: str) -> None:
    now = answered(session)
    if not fits(session, now):
        lines = difflib.unified_diff(
            session.splitlines(), now.splitlines(), "mistakes.txt", "today", lineterm="", n=99
        )
        pytest.fail("\n".join(lines), pytrace=False)


if __name__ == "__main__":
    text = FILE.read_text()
    for session in sessions(text):
        if not fits(session, now := answered(session)):
            text = text.replace(session, now, 1)
    FILE.write_text(text)
