"""`moebius eval --stride`: overlapping windows, against a pass per token."""

import math

import numpy as np
import pytest
import torch
from made_folder import MadeFolder, documents

from moebius.cli.main import main
from moebius.data_pipeline.read.rows import SplitReader
from moebius.distributed.process.process import start_process
from moebius.evaluation.perplexity import _stretches, measure, measure_sliding
from moebius.evaluation.restore import restore
from moebius.train.config.run_config import Config

S = 64  # of the run


def stream_of(run_dir, rows: int) -> np.ndarray:
    folder = Config.load(run_dir / "config.json").data.directory
    reader = SplitReader(folder, "validation", seq_len=S)
    found = reader.read(np.arange(rows)).tokens
    assert (found[1:, 0] == found[:-1, -1]).all()
    return np.concatenate([found[:, :-1].ravel(), found[-1, -1:]])


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("stride", [1, 24, S])
def test_every_token_is_scored_once_with_the_context_that_its_window_gives(bytes_run, stride):
    stream, total = stream_of(bytes_run, 3), 0.0
    with start_process("cpu") as process, torch.no_grad():
        model = restore(bytes_run, process, step=None).model
        for place in range(1, len(stream)):
            window = 0 if place <= S else -(-(place - S) // stride)  # that scores this token
            end = min(S + window * stride, len(stream) - 1)
            context = torch.from_numpy(stream[max(0, end - S) : place]).long()
            logits_V = model(context[None]).logits_BSV[0, -1].double()
            total += logits_V.log_softmax(0)[int(stream[place])].item()
    found = measure_sliding(bytes_run, stride=stride, max_rows=3)
    assert found.tokens == 3 * S
    assert found.log_probability == pytest.approx(total, rel=1e-5)
    text = bytes(stream[1:][stream[1:] < 256].tolist())
    assert found.text_bytes == len(text)
    assert found.bits_per_byte == pytest.approx(-total / math.log(2) / len(text), rel=1e-5)


def test_windows_that_do_not_overlap_are_those_of_training(bytes_run):
    alone = measure_sliding(bytes_run, stride=S)
    assert alone.loss == pytest.approx(measure(bytes_run).result.loss, rel=1e-5)
    assert alone.tokens == measure(bytes_run).result.tokens


def test_windows_do_not_reach_over_sources(tmp_path):
    folder = MadeFolder(tmp_path, ("a", "b"))
    folder.seal("a", documents(0, 3), documents(1, 30)).seal("b", documents(2, 3), documents(3, 40))
    reader = SplitReader(folder.complete().folder, "validation", seq_len=16)
    first, second = reader.streams
    assert (first.start, second.stop) == (0, reader.num_rows)
    rows = reader.read(np.arange(reader.num_rows)).tokens
    assert first.stop == second.start
    for stream in (first, second):
        assert (
            rows[stream.start + 1 : stream.stop, 0] == rows[stream.start : stream.stop - 1, -1]
        ).all()
    assert list(_stretches([first, second], second.stop - 1)) == [
        (0, first.stop),
        (first.stop, second.stop - 1),
    ]


@pytest.mark.parametrize("stride", ["0", "65"])
def test_a_stride_that_does_not_fit_is_refused(bytes_run, stride, capfd):
    with pytest.raises(SystemExit) as end:
        main(["eval", str(bytes_run), "--stride", stride])
    assert end.value.code == 2
    assert "must be between 1 and data.seq_len=64" in capfd.readouterr().err


def test_the_command_tells_it(bytes_run, moebius):
    answer = moebius("eval", bytes_run, "--stride", "64")
    assert answer.code == 0
    assert "bits per byte, over " in answer.text
    assert "windows of 64 that move by 64" in answer.text
