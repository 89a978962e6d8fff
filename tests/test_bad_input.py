"""Every mistake on the list is answered with one clear error, through the command itself: exit code
2, nothing left behind.
"""

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moebius.cli.main import main
from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.make.prepare import prepare
from moebius.distributed.checkpoint.format import (
    CheckpointManifest,
    FileSum,
    blake2b,
    digest_of_sums,
)

TINY = (
    "model.vocab_size=257",
    "data.tokenizer=bytes",
    "data.vocab_size=257",
    "data.seq_len=16",
    "data.validation_fraction=0.2",
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


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small text file in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return write_text(tmp_path)


def write_text(folder: Path) -> Path:
    file = folder / "text.jsonl"
    lines = [
        json.dumps({"text": f"document {n} says: " + "one two three many " * 8}) for n in range(40)
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code, and everything printed with line breaks folded."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    return int(ended.value.code or 0), re.sub(r"\s+", " ", out + err)


def train_arguments(text: Path, *changes: str) -> list[str]:
    return ["train", "smoke", *TINY, f"data.input=['{text}']", *changes]


CONFIG_MISTAKES = {
    "more ranks than experts": (
        ["mesh.ep=5", "job.ranks_per_node=5", "train.global_batch=5"],
        r"mesh\.ep 5 is more than the experts: feed_forward has 4, attention has 4",
    ),
    "the world does not fit the mesh": (
        ["mesh.ep=2", "mesh.dp_replicate=2", "job.ranks_per_node=3"],
        r"= 4 ranks, but the world has 3",
    ),
    "depth not divisible by G": (
        ["model.num_layers=5"],
        r"num_layers=5 is not divisible by layers_per_group=2",
    ),
    "odd rotary width": (
        ["model.attention.positions.width=5"],
        r"positions.width=5 with d_head=8: channels rotate in pairs",
    ),
    "unknown key": (
        ["model.num_layer=5"],
        r"model\.num_layer: unknown key; did you mean model\.num_layers\?",
    ),
}


@pytest.mark.parametrize("mistake", CONFIG_MISTAKES)
def test_a_configuration_that_cannot_run(
    mistake: str, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, message = CONFIG_MISTAKES[mistake]
    code, said = run(capfd, *train_arguments(text, *changes))
    assert code == 2
    assert re.search(message, said), said
    assert not (text.parent / "runs").exists()


def test_a_typo_in_a_toml_file(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (text.parent / "mine.toml").write_text(
        'recipe = "smoke"\n[optim]\nlearning_rat = 0.1\n', encoding="utf-8"
    )
    code, said = run(capfd, "train", "mine.toml")
    assert code == 2
    assert "optim.learning_rat: unknown key; did you mean optim.learning_rate?" in said


TOML_MISTAKES = {
    'recipe = ["smoke"]': r"recipe = \['smoke'\] is unknown",
    "recipe = {}": r"recipe = \{\} is unknown",
    "recipe = 7": r"recipe = 7 is unknown",
    "deep = " + "[" * 9000: r"mine\.toml: is nested too deeply",
    "deep = " + "{a = " * 9000: r"mine\.toml: is nested too deeply",
}


def test_toml_that_is_no_configuration(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for content, message in TOML_MISTAKES.items():
        (text.parent / "mine.toml").write_text(content + "\n", encoding="utf-8")
        code, said = run(capfd, "train", "mine.toml")
        assert code == 2, content[:20]
        assert re.search(message, said), said


def test_values_that_no_configuration_can_have(
    text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for change, message in {
        "model.d_model=" + "[" * 9000: r"override model\.d_model=…: the value is nested too deep",
        "train.threads=9223372036854775807": r"train\.threads: Input should be less than or equal",
    }.items():
        code, said = run(capfd, *train_arguments(text, change))
        assert code == 2
        assert re.search(message, said), said
    assert not (text.parent / "runs").exists()


def test_a_path_that_cannot_be_one(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Too long, or a circle of links: wherever a command takes a path."""
    (text.parent / "circle").symlink_to("back")
    (text.parent / "back").symlink_to("circle")
    for path, message in {
        "n" * 300: "File name too long",
        "n/" * 3000 + "n": "File name too long",
        "circle/run": "Too many levels of symbolic links",
    }.items():
        of_a_job = [
            ["status", path],
            ["status", path, str(text.parent)],
            ["stop", path],
            train_arguments(text, "--run-dir", path),
            train_arguments(text, f"data.directory={Path(path).absolute()}"),
            ["submit", "smoke", *TINY, "--run-dir", path],
        ]
        of_others = [
            ["logs", path],
            ["eval", path],
            ["ckpt", "ls", path],
            ["simulate", path],
            ["prepare", "--input", str(text), "--output", path],
            ["prepare", "--input", f"{path}.txt", "--output", "shards"],
            ["models", f"{path}.toml"],
        ]
        for arguments in of_a_job + of_others:
            code, said = run(capfd, *arguments)
            assert code == 2, arguments
            assert "error: " in said, arguments
            assert message in said or arguments in of_others, (arguments, said)
            shutil.rmtree("runs", ignore_errors=True)


def test_an_archive_that_is_not_there_or_is_none(
    text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for archive, message in {"none.zip": "No such file", text.name: "not a zip file"}.items():
        url = f"zip://*.txt::{archive}"
        code, said = run(capfd, "prepare", "--input", url, "--output", "shards")
        assert code == 2
        assert re.search(re.escape(f"input '{url}' cannot be opened") + f".*{message}", said), said


def test_a_negative_number_of_workers(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for workers in ("-1", "0"):
        code, said = run(capfd, "prepare", "--output", "shards", "--workers", workers)
        assert code == 2
        assert f"--workers {workers}: at least 1" in said


def empty(text: Path) -> None:
    text.write_text('{"text": ""}\n\n{"text": "  "}\n', encoding="utf-8")


def not_utf8(text: Path) -> None:
    text.write_bytes(text.read_bytes() + b'{"text": "caf\xe9"}\n')


def a_folder(text: Path) -> None:
    text.unlink()
    text.mkdir()


def not_json(text: Path) -> None:
    text.write_text(text.read_text(encoding="utf-8") + "{oops\n", encoding="utf-8")


INPUT_MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty corpus": (
        empty,
        r"text\.jsonl.*(no|empty).*(document|text)|(no|empty).*(document|text).*text\.jsonl",
    ),
    "missing file": (Path.unlink, r"text\.jsonl"),
    "unreadable": (a_folder, r"text\.jsonl"),
    "not UTF-8": (not_utf8, r"text\.jsonl.*UTF-8"),
    "not JSON": (not_json, r"text\.jsonl.*(line 41|:41)"),
}


@pytest.mark.parametrize("mistake", INPUT_MISTAKES)
@pytest.mark.parametrize("command", ["prepare", "train"])
def test_input_that_cannot_be_read(
    mistake: str, command: str, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, message = INPUT_MISTAKES[mistake]
    spoil(text)
    arguments = {
        "prepare": ["prepare", "--input", str(text), "--output", "shards", "--tokenizer", "bytes"],
        "train": train_arguments(text),
    }[command]
    code, said = run(capfd, *arguments)
    assert code == 2
    assert re.search(message, said), said
    assert not list(text.parent.rglob("manifest-*.json"))


@pytest.mark.parametrize("damage", ["flipped byte", "truncated"])
@pytest.mark.slow
def test_a_damaged_shard_ends_the_run_with_its_name(
    damage: str, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = DataConfig(input=(str(text),), tokenizer="bytes", validation_fraction=0.2)
    prepare(data, "shards")
    shard = next(Path("shards").glob("text.train-*.tok.arrow"))
    content = bytearray(shard.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 0x20
    shard.write_bytes(content[: middle - 7] if damage == "truncated" else content)
    code, said = run(capfd, *train_arguments(text, f"data.directory={Path('shards').absolute()}"))
    assert code in (1, 2)
    assert shard.name in said, said


def test_a_run_folder_without_write_permission(
    text: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = text.parent / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.geteuid() == 0:  # root may write anywhere: say no in the kernel's place
        import tempfile

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    code, said = run(capfd, *train_arguments(text, "--run-dir", str(locked)))
    assert code == 2
    assert (
        "the run folder cannot be written (Permission denied); choose another with --run-dir"
        in said
    )


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder), pytest.raises(SystemExit) as ended:
        main(train_arguments(write_text(folder), "--run-dir", "done"))
    assert ended.value.code == 0
    return folder


@pytest.fixture
def trained(trained_once: Path, text: Path) -> Path:
    """A copy of the finished run, for the test to spoil."""
    shutil.copytree(trained_once, text.parent, dirs_exist_ok=True)
    return text.parent / "done"


def test_a_checkpoint_that_lacks_an_expert(
    trained_once: Path, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The index loses the block of an expert tensor: loading must say which."""
    checkpoint = next((trained / "checkpoints").glob("step_*"))
    remove_a_chunk(checkpoint)
    for command in (["ckpt", "verify", "done"], ["eval", "done"]):
        code, said = run(capfd, *command)
        assert code == 2
        assert re.search(r"expert", said), said


@pytest.mark.slow
def test_a_run_does_not_go_on_from_a_checkpoint_that_lacks_an_expert(
    trained_once: Path, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    remove_a_chunk(next((trained / "checkpoints").glob("step_*")))
    again = train_arguments(trained_once / "text.jsonl", "train.steps=4", "--run-dir", "done")
    code, said = run(capfd, *again)
    assert code == 1
    assert re.search(r"expert", said), said


def remove_a_chunk(checkpoint: Path) -> None:
    """As if the rank that held it had never written, with every checksum made good: the audit alone
    can notice.
    """
    index_file = checkpoint / "index.json"
    index = json.loads(index_file.read_text())
    name = next(
        name for name in index["tensors"] if name.startswith("model.") and name.endswith("w_up")
    )
    index["tensors"][name]["chunks"].clear()
    index_file.write_text(json.dumps(index))
    files = [file for file in checkpoint.iterdir() if file.name != "manifest.json"]
    sums = {
        file.name: FileSum(num_bytes=file.stat().st_size, blake2b=blake2b(file.read_bytes()))
        for file in files
    }
    manifest = CheckpointManifest(format=1, files=sums, digest=digest_of_sums(sums))
    (checkpoint / "manifest.json").write_text(manifest.model_dump_json())


def test_a_damaged_checkpoint_is_named(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = max((trained / "checkpoints").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, said = run(capfd, "eval", "done")
    assert code == 2
    assert file.name in said, said


def test_what_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in [
        (["status"], "no runs under"),
        (["status", "nowhere"], "nowhere"),
        (["stop", "nowhere"], "nowhere"),
        (["logs", "nowhere"], "nowhere"),
        (["eval", "nowhere"], "is not a run folder"),
        (["ckpt", "ls", "nowhere"], "has no checkpoint"),
        (["train", "smokee"], "did you mean smoke?"),
        (["models", "smokee"], "did you mean smoke?"),
        (["models", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (
            ["layout", "--world-size", "6", "--ep", "4"],
            "mesh.ep 4 does not divide the world's 6 ranks",
        ),
        (
            ["layout", "--world-size", "2147483648"],
            r"a world has 1 to 131,072 ranks, got .* 2,147,",
        ),
        (["submit", "smoke", "--detach"], "--address|address of a real one"),
    ]:
        code, said = run(capfd, *arguments)
        assert code == 2, arguments
        assert re.search(message, said), said
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)


def test_a_prompt_that_is_empty(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = run(capfd, "eval", str(trained), "--prompt", "")
    assert code == 2
    assert "prompt of at least one token" in said


def test_a_text_is_scored_and_an_empty_one_is_not(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = run(
        capfd, "eval", str(trained), "--score", "the band closes upon itself", "--draws", "3"
    )
    assert code == 0
    found = re.search(
        r"log-probability (-[\d.]+) nats, (-[\d.]+) per token, over (\d+) tokens", said
    )
    assert found, said
    total, per_token, tokens = map(float, found.groups())
    assert total / tokens == pytest.approx(per_token, abs=1e-3)
    assert run(capfd, "eval", str(trained), "--score", "")[0] == 2
    assert torch.is_grad_enabled()
