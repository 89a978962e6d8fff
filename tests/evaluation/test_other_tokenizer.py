"""A folder of another tokenizer has ids of the same range and other words: nothing reads it as the
run's own.
"""

import json
import shutil
from pathlib import Path

import pytest
from bytes_run import prepare_bytes

from moebius import api
from moebius.data_pipeline.errors import ShardError
from moebius.train.config.run_config import Config
from moebius.train.loop import train

MESSAGE = "was prepared with another tokenizer"


@pytest.fixture
def run_dir(bytes_run: Path, tmp_path: Path) -> Path:
    """A finished run of raw bytes, whose data is now that of a BPE with as many ids."""
    shards = prepare_bytes(tmp_path, tokenizer="bpe")
    run = Path(shutil.copytree(bytes_run, tmp_path / "run"))
    values = json.loads((run / "config.json").read_text())
    values["data"] |= {"directory": str(shards), "override_position": True}
    values["train"]["steps"] = 4
    values["prepare"] = values["prepare"] | {"tokenizer": "bpe", "vocab_size": 257}
    (run / "config.json").write_text(json.dumps(values))
    return run


def test_training_does_not_go_on_even_if_other_data_is_wanted(run_dir: Path) -> None:
    with pytest.raises(ShardError, match=MESSAGE):
        train(Config.load(run_dir / "config.json"), run_dir)


@pytest.mark.parametrize("words", [[], ["--stride", "8"], ["--prompt", "the"]])
def test_no_command_reads_it(words: list[str], run_dir: Path, moebius) -> None:
    answer = moebius("eval", run_dir, *words)
    assert answer.code == 2
    assert MESSAGE in answer.text


def test_no_export_takes_its_tokenizer(bytes_run: Path, moebius, tmp_path: Path) -> None:
    """A checkpoint names its own folder, so here that one is prepared again."""
    own = Path(Config.load(bytes_run / "config.json").data.directory)
    kept = Path(shutil.move(own, tmp_path / "kept"))
    try:
        prepare_bytes(own.parent, tokenizer="bpe")
        answer = moebius("ckpt", "export", bytes_run, "--out", tmp_path / "out")
    finally:
        shutil.rmtree(own)
        kept.rename(own)
    assert answer.code == 2
    assert MESSAGE in answer.text
    assert not (tmp_path / "out").exists()


def test_python_reads_no_model_with_it(run_dir: Path) -> None:
    with pytest.raises(ShardError, match=MESSAGE):
        api.load(run_dir)
    with pytest.raises(ShardError, match=MESSAGE):
        api.evaluate(run_dir)
