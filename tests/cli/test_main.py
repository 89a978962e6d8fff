"""Tests the command as a whole: its imports, its examples, its errors."""

import argparse
import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moebius import cli
from moebius.cli import main as command_line
from moebius.cli.arguments import resolve_config, words_and_overrides
from moebius.cli.main import build_parser, main, parse
from moebius.cli.models import evaluate
from moebius.cluster.job import Journal, State
from moebius.evaluation import text
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import ConfigError
from moebius.train.recipes.smoke import RECIPES

Command = Callable[..., Any]  # the fixture `moebius` of conftest.py

# What takes time or memory to import, and answers no question about a run folder.
HEAVY = {
    *("torch", "numpy", "pyarrow", "ray", "pydantic", "matplotlib", "tokenizers", "fsspec"),
    *("tensorboard", "triton", "multiprocessing", "asyncio"),
}
# One process for all commands, the lightest first: what one has imported, the next ones have too.
ASK = """
import contextlib, io, json, sys
import moebius
seen = {"import moebius": sorted(sys.modules)}
from moebius.cli.main import main
for command in json.loads(sys.argv[1]):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            main(command)
    except SystemExit as end:
        assert not end.code, (command, said.getvalue())
    assert said.getvalue(), command
    seen[command[0]] = sorted(sys.modules)
print(json.dumps(seen))
"""


def write_finished_run(folder: Path) -> Path:
    """Writes a finished job's run folder, with one line in the log of its only rank."""
    log = folder / "logs" / "g001" / "node0" / "rank0.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n", encoding="utf-8")
    journal = Journal(folder)
    journal.append(State.SUBMITTED, generation=0, reason="1 node(s) × 1 rank(s)")
    journal.append(State.SUCCEEDED, generation=1, reason="finished at step 1")
    return folder


def test_what_needs_a_run_folder_alone_imports_nothing_heavy(tmp_path: Path) -> None:
    run = str(write_finished_run(tmp_path / "run"))
    commands = [["--help"], ["logs", run], ["status", run], ["stop", run]]
    commands += [["watch", run]]
    asked = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
    )
    seen: dict[str, list[str]] = json.loads(asked.stdout)
    assert list(seen) == ["import moebius", *(command[0] for command in commands)]
    for command, modules in seen.items():
        heavy = HEAVY & {name.partition(".")[0] for name in modules}
        assert not heavy, f"{command} imports {sorted(heavy)}"
    assert "rich" not in seen["--help"]
    assert "argparse" not in seen["import moebius"]


def test_a_question_about_keys_imports_little_beside_torch() -> None:
    """The sections stand beside layers, routers and kernels, so they need torch itself (1 s)."""
    code = """
import sys
from moebius.cli.main import main
for words in ("config optim", "train smoke train.stepz=3"):
    try:
        main(words.split())
    except SystemExit as end:
        print("ended with", end.code)
print(*sys.modules)
"""
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.findall(r"ended with (\d)", asked.stdout) == ["0", "2"]
    assert "did you mean train.steps?" in asked.stderr
    slow = {
        "torch.distributed.tensor",
        "torch._dynamo",
        "sympy",
        "matplotlib",
        "ray",
        "tensorboard",
    }
    assert not slow & set(asked.stdout.splitlines()[-1].split())


def parsers_of(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yields every command with its parser, including actions of commands."""
    for action in parser._actions:
        if _is_subparsers(action):
            for name, below in dict(action.choices or {}).items():
                yield (*path, name), below
                yield from parsers_of(below, (*path, name))


def test_the_help_of_every_command_shows_examples_that_parse() -> None:
    commands = dict(parsers_of(build_parser()))
    assert {("train",), ("ckpt", "verify")} <= commands.keys()
    for path, parser in commands.items():
        examples = re.findall(r"^  moebius (.+)$", parser.format_help(), flags=re.MULTILINE)
        assert examples, path
        for example in examples:
            words = shlex.split(example.partition(" > ")[0])
            assert tuple(words[: len(path)]) == path, example
            options = parse(words)  # exits where the line is not valid
            _, overrides = words_and_overrides(getattr(options, "overrides", []))
            if overrides:
                named = getattr(options, "name", "")  # `moebius data` takes paths, too
                name = named if named in RECIPES else "smoke"
                config = resolve(name, overrides, RECIPES)
                if path in (("train",), ("submit",)):
                    config.check_world(config.world_size)


def test_a_repeated_option_adds_its_values_or_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["prepare", "--output", "out", "--input", "a", "--tokens", "c", "--input", "b"]
    options = parse([*words, "--tokens", "d"])
    assert (options.input, options.tokens) == (["a", "b"], ["c", "d"])
    for words in (["plan", "smoke", "--nodes", "2"], ["ckpt", "verify", "run", "--step", "2"]):
        with pytest.raises(SystemExit):
            parse([*words, *words[-2:]])
        assert f"argument {words[-2]}" in capsys.readouterr().err


def test_the_command_line_stays_small() -> None:
    """Too many commands hide the one that is needed."""
    parsers = [build_parser(), *dict(parsers_of(build_parser())).values()]
    is_group = [any(map(_is_subparsers, parser._actions)) for parser in parsers]
    options = [
        action
        for parser in parsers
        for action in parser._actions
        if action.option_strings and action.dest not in ("help", "version")
    ]
    assert is_group.count(False) <= 28
    assert len(options) <= 113


def _is_subparsers(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def test_commands_of_other_packages(moebius: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed one gets the rest of the line; a missing one names its package."""
    heard: list[list[str]] = []
    entry = SimpleNamespace(load=lambda: lambda words: heard.append(words) or 7)
    installed = {"mine": [entry]}
    monkeypatch.setattr(metadata, "entry_points", lambda *, group, name: installed.get(name, []))
    assert moebius("mine", "a", "--b=1").code == 7
    assert heard == [["a", "--b=1"]]
    for name, package in command_line.ELSEWHERE.items():
        answer = moebius(name)
        assert answer.code == 2
        assert f"pip install ./satellites/{package.removeprefix('moebius-')}" in answer.err
    assert moebius("minee").code == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), SystemExit(130)),
        (OSError(errno.EIO, "Input/output error"), OSError(errno.EIO, "Input/output error")),
    ],
)
def test_what_is_no_mistake_of_the_user(
    error: BaseException, expected: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(command_line, "parse", lambda *_: argparse.Namespace(run=run))
    with pytest.raises(type(expected)) as ended:
        main(["status"])
    assert ended.value.args == expected.args


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(unbuffered: str, tmp_path: Path) -> None:
    """Printed by rich, by Python and by argparse."""
    code = """
import sys
from moebius.cli.main import main
for words in (["status", sys.argv[1]], ["logs", sys.argv[1]], ["train", "--help"], ["--version"]):
    try:
        sys.stdout = open("/dev/full", "w", buffering=-1)
        sys.stdout.reconfigure(write_through=bool(sys.argv[2]))
        main(words)
    except SystemExit as end:
        assert end.code == 1, end.code
"""
    run = write_finished_run(tmp_path / "run")
    ended = subprocess.run(
        [sys.executable, "-c", code, run, unbuffered], capture_output=True, text=True
    )
    said = "error: the output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (0, 4 * said)


@pytest.mark.parametrize("num_lines", [1, 100_000], ids=["one line", "more than a buffer"])
def test_a_reader_that_has_gone_is_no_error(num_lines: int, tmp_path: Path) -> None:
    """`moebius logs | head`: a closed pipe gives no message and exit code 0."""
    run = write_finished_run(tmp_path / "run")
    (run / "logs/g001/node0/rank0.log").write_text("step\n" * num_lines, encoding="utf-8")
    act = "from moebius.cli.main import main; main()"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    command = "logs" if num_lines > 1 else "status"  # printed by Python, and by rich
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run(
            [sys.executable, "-c", act, command, str(run)],
            stdout=pipe,
            stderr=subprocess.PIPE,
            env=buffered,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


_LONG = "folder-" * 12 + "run"


@pytest.mark.parametrize(
    "words",
    [
        ["config", "router"],
        ["config", "train.sinks"],
        ["config", "smoke", "--diff"],
        ["models", "smoke", "moeut"],
        ["status", "."],
        ["status", _LONG],
        ["plan", "smoke", "--nodes", "1"],
    ],
    ids=" ".join,
)
def test_no_line_wraps_in_a_pipe_and_no_word_breaks_in_a_terminal(
    words: list[str],
    moebius: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_finished_run(Path(_LONG))
    monkeypatch.setenv("COLUMNS", "40")
    piped = moebius(*words).out
    request.getfixturevalue("terminal")
    shown = moebius(*words).out
    assert {word for word in piped.split() if len(word) > 7} <= {*shown.split()}
    assert len(piped.splitlines()) <= len(shown.splitlines())
    assert " " * 200 not in piped, "lines are padded to a width that a pipe does not have"
    assert all(len(line.rstrip()) <= 80 or _LONG in shown for line in shown.splitlines())


def test_every_command_prints_to_the_one_console() -> None:
    files = Path(cli.__file__).parent.rglob("*.py")
    assert {
        file.name for file in files if re.search(r"(?<!\()\bConsole\(", file.read_text())
    } == set()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_any_encoding_of_the_output_will_do(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the encoding lacks is printed as "?", by this process and by its children."""
    run = write_finished_run(tmp_path / "8.4 → 5.3")
    monkeypatch.setenv("COLUMNS", "400")
    for words, said, code in (
        (["status", run], "8.4 ? 5.3", 0),
        (["config", "train"], "train.steps", 0),
        (["train", "smôke → 2"], "there is no recipe", 2),
        (["models", "smoke"], "FLOPs/token", 0),
    ):
        heard = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", heard[0])
        monkeypatch.setattr(sys, "stderr", heard[1])
        monkeypatch.setenv("PYTHONIOENCODING", encoding)
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        assert ended.value.code == code, words
        for stream in heard:
            stream.flush()
        printed = b"".join(stream.buffer.getvalue() for stream in heard)  # type: ignore[attr-defined]
        assert said in printed.decode(encoding), words
        child = [sys.executable, "-c", "print('\\u2192 done')"]
        assert subprocess.check_output(child, text=True) == "? done\n"


def test_what_a_model_writes_comes_piece_by_piece_and_ends_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(restored: object, prompt: str, **options: object) -> Iterator[str]:
        yield prompt
        assert capsys.readouterr().out == "One"  # nobody waits for the rest
        yield " and two"

    monkeypatch.setattr(text, "write_text", write)
    monkeypatch.setattr(evaluate, "_restored", lambda options: options.path)
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(tmp_path), "--prompt", "One"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == " and two\n"


def test_a_runs_configuration_is_a_configuration(tmp_path: Path) -> None:
    config = resolve("smoke", ["train.steps=7"], RECIPES)
    config.save(tmp_path / "config.json")
    path = str(tmp_path / "config.json")
    assert resolve_config(path, []) == config
    assert resolve_config(path, ["train.steps=9"]).train.steps == 9
    for written, told in (
        ("{", "is damaged .*: restore it"),
        ("[" * 99999, "is damaged .*: restore it"),
        ('{"a": 1}', "a: unk"),
    ):
        Path(path).write_text(written)
        with pytest.raises(ConfigError, match=told):
            resolve_config(path, [])
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve_config(str(tmp_path / "none.json"), [])
