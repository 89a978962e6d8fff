"""Bad input, damaged files and absent runs are one clear error on every surface.

Each case goes through the command line: exit code 2 (1 if a run had started), a message that names
the value or the file, no traceback, and nothing left behind.
"""

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip, reseal

from moebius.cli.main import main
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig

TINY = (
    "model.vocab_size=257",
    "prepare.tokenizer=bytes",
    "prepare.vocab_size=257",
    "data.seq_len=16",
    "prepare.validation_fraction=0.2",
    "model.d_model=16",
    "model.num_layers=2",
    "model.attention.num_heads=2",
    "model.attention.d_head=8",
    "model.feed_forward.num_experts=4",
    "model.feed_forward.router.top_k=2",
    "model.attention.num_experts=2",
    "model.feed_forward.d_expert=8",
    "train.steps=2",
    "train.global_batch=2",
    "train.micro_batch=1",
    "train.eval_rows=4",
    "mesh.ep=1",
    "mesh.dp_replicate=none",
    "job.num_nodes=1",
    "job.ranks_per_node=1",
    "job.max_restarts=0",
    "job.rehearse_failure_at_step=none",
    "job.start_timeout_s=60",
)
Command = Callable[..., Any]  # the fixture `moebius` of conftest.py


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a small text file in its own folder, which becomes the current one."""
    monkeypatch.chdir(tmp_path)
    return write_text(tmp_path)


def write_text(folder: Path) -> Path:
    words = "one two three many " * 8
    lines = [json.dumps({"text": f"document {n} says: {words}"}) for n in range(40)]
    file = folder / "text.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def train_words(text: Path, *changes: str) -> list[str]:
    return ["train", "smoke", *TINY, f"prepare.input=['{text}']", *changes]


def assert_refused(moebius: Command, words: list[str], message: str, *, code: int = 2) -> None:
    """Checks that a command line is refused with a short message that matches a pattern."""
    answer = moebius(*words)
    assert answer.code == code, (words, answer.text)
    assert re.search(message, answer.text), (words, answer.text)
    assert len(answer.text) < 5_000


# Configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [("[" * 9000, "nested too deep"), ("9" * 5000, "a number has more than 4,300")],
)
def test_a_value_without_end(value: str, message: str, moebius: Command) -> None:
    words = ["train", "smoke", f"model.d_model={value}"]
    assert_refused(moebius, words, rf"override model\.d_model=…: .*{message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f'recipe = "{"n" * 300}"', r"mine\.toml: there is no recipe 'nnn"),
        (f'recipe = "{"n/" * 3000}"', r"mine\.toml: there is no file or run folder 'n/n"),
        (f"[train]\n{'n' * 12_000} = 1", r"train\.n{200}: unknown key"),
        ("\n".join(f"k{n} = 1" for n in range(300)), r"k9: unknown key and 290 more$"),
        ("[model.attention]\n" + "\n".join(f"k{n} = 1" for n in range(900)), r"keys: k0, k1"),
        (
            'recipe = "smoke" # caf\xe9',
            r"is not UTF-8\. .*: iconv -f CP1252 -t UTF-8 mine\.toml > NEW",
        ),
        ('\ufeffrecipe = "smoke"', r"is not UTF-8\. .*: iconv -f UTF-16 -t UTF-8 mine\.toml > NEW"),
        ("deep = " + "[" * 9000, r"mine\.toml: is nested too deeply"),
        ("deep = " + "{a = " * 9000, r"mine\.toml: is nested too deeply"),
        ("n = " + "9" * 5000, r"is not valid TOML: a number has more than 4,300 digits$"),
    ],
    ids=lambda text: text[:20],
)
def test_toml_that_is_no_configuration(
    content: str, message: str, text: Path, moebius: Command
) -> None:
    encoding = {"\xe9": "latin-1", "\ufeff": "utf-16-le"}
    used = next((encoding[one] for one in content if one in encoding), "utf-8")
    (text.parent / "mine.toml").write_text(content + "\n", encoding=used)
    assert_refused(moebius, ["train", "mine.toml"], message)


# Paths and inputs ---------------------------------------------------------------------------------


def test_a_configuration_without_end_is_no_run(tmp_path: Path, moebius: Command) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000, encoding="utf-8")
    for words in (["data", "peek", str(tmp_path)], ["data", "verify", str(tmp_path)]):
        assert_refused(moebius, words, "holds no prepared data and is no run folder", code=2)


@pytest.mark.slow
def test_one_document_cannot_be_validated_on(tmp_path: Path, moebius: Command) -> None:
    """It is refused before a rank starts, and with a second file the same words train."""
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    for file in (one, other):
        file.write_text(f"{file.name} says " + "one two three many " * 90, encoding="utf-8")
    words, run = train_words(one, "train.steps=1"), tmp_path / "run"
    first = [*words, f"data.directory={tmp_path / 'shards'}", "--run-dir", str(run)]
    assert_refused(moebius, first, r"split 'validation' of .*prepare\.validation_input=FILE")
    assert not run.exists()
    second = [*words, f"prepare.validation_input=['{other}']", f"data.directory={tmp_path / 'two'}"]
    answer = moebius(*second, "--run-dir", str(run))
    assert answer.code == 0, answer.text


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("n" * 300, "File name too long"),
        ("n/" * 3000 + "n", "File name too long"),
        ("circle/run", "Too many levels of symbolic links"),
    ],
    ids=["a long name", "a long path", "a circle of links"],
)
def test_a_path_that_cannot_be_one(path: str, message: str, text: Path, moebius: Command) -> None:
    (text.parent / "circle").symlink_to("back")
    (text.parent / "back").symlink_to("circle")
    of_runs = [
        ["stop", path],
        train_words(text, "--run-dir", path),
        train_words(text, f"data.directory={Path(path).absolute()}"),
        ["submit", "smoke", *TINY, "--run-dir", path],
    ]
    for words in of_runs:
        assert_refused(moebius, words, f"error: .*{message}")
        shutil.rmtree("runs", ignore_errors=True)
    of_others = [
        ["status", path],
        ["logs", path],
        ["eval", path],
        ["ckpt", "ls", path],
        ["simulate", path],
        ["prepare", "--input", str(text), "--output", path],
        ["prepare", "--input", f"{path}.txt", "--output", "shards"],
        ["models", f"{path}.toml"],
    ]
    for words in of_others:
        assert_refused(moebius, words, "error: ")


def make_empty(text: Path) -> None:
    text.write_text('{"text": ""}\n\n{"text": "  "}\n', encoding="utf-8")


def make_not_utf8(text: Path) -> None:
    text.write_bytes(text.read_bytes() + b'{"text": "caf\xe9"}\n')


def make_a_folder(text: Path) -> None:
    text.unlink()
    text.mkdir()


def make_not_json(text: Path) -> None:
    text.write_text(text.read_text(encoding="utf-8") + "{oops\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (make_empty, r"text\.jsonl.*(no|empty).*document|(no|empty).*document.*text\.jsonl"),
        (Path.unlink, r"text\.jsonl"),
        (make_a_folder, r"text\.jsonl"),
        (make_not_utf8, r"text\.jsonl.*UTF-8"),
        (make_not_json, r"text\.jsonl.*(line 41|:41)"),
    ],
)
@pytest.mark.parametrize("command", ["prepare", "train"])
def test_input_that_cannot_be_read(
    spoil: Callable[[Path], object], message: str, command: str, text: Path, moebius: Command
) -> None:
    spoil(text)
    words = train_words(text)
    if command == "prepare":
        words = ["prepare", "--input", str(text), "--output", "shards", "--tokenizer", "bytes"]
    assert_refused(moebius, words, message)
    assert not list(text.parent.rglob("manifest-*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped byte", "truncated"])
def test_a_damaged_shard_ends_the_run_with_its_name(
    damage: str, text: Path, moebius: Command
) -> None:
    data = PrepareConfig(input=(str(text),), tokenizer="bytes", validation_fraction=0.2)
    prepare(data, "shards")
    shard = next(Path("shards").glob("text.train-*.tok.arrow"))
    flip(shard)
    if damage == "truncated":
        os.truncate(shard, shard.stat().st_size // 2 - 7)
    answer = moebius(*train_words(text, f"data.directory={Path('shards').absolute()}"))
    assert answer.code in (1, 2)
    assert shard.name in answer.text, answer.text


def test_a_run_folder_without_write_permission(
    text: Path, moebius: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = text.parent / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.geteuid() == 0:  # root may write anywhere: refuse in the kernel's place

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    message = r"cannot be written \(Permission denied\); choose another with --run-dir"
    assert_refused(moebius, train_words(text, "--run-dir", str(locked)), message)


# A finished run -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a text and a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder), pytest.raises(SystemExit) as ended:
        main(train_words(write_text(folder), "--run-dir", "done"))
    assert ended.value.code == 0
    return folder


@pytest.fixture
def trained(trained_once: Path, text: Path) -> Path:
    """Returns a copy of the finished run, for the test to spoil."""
    shutil.copytree(trained_once, text.parent, dirs_exist_ok=True)
    return text.parent / "done"


def lose_an_expert(run_dir: Path) -> None:
    """Removes an expert tensor's blocks from the index, as if no rank had written them.

    Every checksum is valid, so only the audit can notice.
    """
    checkpoint = next((run_dir / "checkpoints").glob("step_*"))
    index_file = checkpoint / "index.json"
    index = json.loads(index_file.read_text())
    names = [name for name in index["tensors"] if name.startswith("model.")]
    lost = next(name for name in names if name.endswith("w_up"))
    index["tensors"][lost]["chunks"].clear()
    index_file.write_text(json.dumps(index))
    reseal(checkpoint)


@pytest.mark.slow
def test_a_checkpoint_that_lacks_an_expert(trained: Path, moebius: Command) -> None:
    lose_an_expert(trained)
    assert_refused(moebius, ["ckpt", "verify", "done"], "expert")
    assert_refused(moebius, ["eval", "done"], "expert")


@pytest.mark.slow
def test_a_run_does_not_go_on_from_a_checkpoint_that_lacks_an_expert(
    trained_once: Path, trained: Path, moebius: Command
) -> None:
    lose_an_expert(trained)
    again = train_words(trained_once / "text.jsonl", "train.steps=4", "--run-dir", "done")
    assert_refused(moebius, again, "expert", code=1)


def test_a_damaged_checkpoint_is_named(trained: Path, moebius: Command) -> None:
    file = max((trained / "checkpoints").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(file)
    assert_refused(moebius, ["eval", "done"], file.name)


def test_texts_are_scored_and_empty_ones_are_refused(trained: Path, moebius: Command) -> None:
    assert_refused(moebius, ["eval", "done", "--prompt", ""], "the prompt is empty")
    assert moebius("eval", "done", "--score", "").code == 2
    answer = moebius("eval", "done", "--score", "the band closes upon itself", "--draws", "3")
    assert answer.code == 0
    figures = r"log-probability (-[\d.]+) nats, (-[\d.]+) per token, over (\d+) tokens"
    found = re.search(figures, answer.text)
    assert found, answer.text
    total, per_token, tokens = map(float, found.groups())
    assert total / tokens == pytest.approx(per_token, abs=1e-3)
    assert torch.is_grad_enabled()
