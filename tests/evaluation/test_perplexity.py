"""`moebius eval --stride`: overlapping windows, against a pass per token; `--text`: any files."""

import json
import math
import os
import re

import numpy as np
import pytest
import torch
import zstandard
from made_folder import MadeFolder, documents
from published_case import folder_of
from small_corpus import sentences
from world import RankFailed, run_ranks

from moebius.data_pipeline.read.rows import SplitReader
from moebius.distributed.process.process import start_process
from moebius.evaluation.perplexity import _stretches, measure, measure_sliding
from moebius.evaluation.restore import restore
from moebius.train.config.run_config import Config
from moebius.train.families.import_run import import_source

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
    assert found is not None, "one process"
    assert found.tokens == 3 * S
    assert found.log_probability == pytest.approx(total, rel=1e-5)
    text = bytes(stream[1:][stream[1:] < 256].tolist())
    assert found.text_bytes == len(text)
    assert found.bits_per_byte == pytest.approx(-total / math.log(2) / len(text), rel=1e-5)


def test_windows_that_do_not_overlap_are_those_of_training(bytes_run):
    alone = measure_sliding(bytes_run, stride=S)
    assert alone is not None, "one process"
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


def test_the_command_tells_it(bytes_run, moebius):
    text = moebius("eval", bytes_run, "--stride", "64").text
    assert re.search("bits per byte, over .*windows of 64 that move by 64", text)
    for stride in (0, 65):
        with pytest.raises(ValueError, match=r"must be between 1 and data.seq_len=64"):
            measure_sliding(bytes_run, stride=stride)


def write_records(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def test_a_document_is_scored_as_by_a_plain_pass_over_each_window(bytes_run, tmp_path):
    texts = ["Short.", "word, " * 25 + "last."]
    found = measure_sliding(bytes_run, files=[str(write_records(tmp_path / "two.jsonl", texts))])
    assert found is not None
    with start_process("cpu") as process, torch.no_grad():
        model = restore(bytes_run, process).model
        for one, text in zip(found.documents, texts, strict=True):
            total, line = 0.0, [256, *text.encode()]
            for first in range(0, len(text), S):
                end = min(first + S, len(text))
                row = torch.tensor(line[max(0, end - S) : end + 1])
                log_p_SV = model(row[None, :-1]).logits_BSV[0].double().log_softmax(-1)
                total += log_p_SV.gather(1, row[1:, None])[first - end :].sum().item()
            assert one.log_probability == pytest.approx(total, rel=1e-5)
            assert (one.tokens, one.text_bytes) == (len(text), len(text))


def measured_on_rank(run_dir, *files):
    file = files[int(os.environ.get("RANK", "0")) % len(files)]
    found = measure_sliding(run_dir, files=[file])
    return None if found is None else (found.log_probability, len(found.documents))


def test_ranks_share_the_rows_of_a_text(bytes_run, tmp_path):
    texts = ["".join(sentences(2, 30)), *sentences(3, 9)]
    files = [str(write_records(tmp_path / f"{n}.jsonl", texts[n:])) for n in range(2)]
    first, second = run_ranks(measured_on_rank, 2, bytes_run, files[0])
    assert second is None
    assert first == pytest.approx(measured_on_rank(bytes_run, files[0]), rel=1e-6)
    with pytest.raises(RankFailed, match=r"files of --text: 1 of [\d,]+ bytes on rank 0; 1 of "):
        run_ranks(measured_on_rank, 2, bytes_run, *files)


def test_files_of_any_format_are_measured_and_nothing_is_written(bytes_run, tmp_path, moebius):
    def stamps():
        paths = [*tmp_path.rglob("*"), *bytes_run.rglob("*")]
        return {path: path.stat().st_mtime_ns for path in paths}

    a, b, ids = (tmp_path / name for name in ("a.txt", "b.jsonl.zst", "c.bin"))
    texts = ["One document.", "  \n", "Another, ” longer one. " * 9]
    a.write_text(texts[0])
    records = write_records(tmp_path / "records", texts[1:], "said").read_bytes()
    b.write_bytes(zstandard.compress(records))
    np.array([*b"One document.", 256], np.uint16).tofile(ids)
    before, files = stamps(), [a, b, f"tokens:{ids}", "prepare.text_field=said"]
    answer = moebius("eval", f"{bytes_run}@2", "--text", a, "--text", *files[1:], "--per-document")
    found = measure_sliding(bytes_run, files=[*map(str, files)])
    assert found is not None
    assert answer.out.splitlines() == [*map(str, found.documents), str(found)]
    one, other, same = found.documents
    assert (one.split, other.split) == (f"{a}:1", f"{b}:2")
    assert (other.text_bytes, same.loss) == (
        len(texts[2].strip().encode()),
        pytest.approx(one.loss),
    )
    nats = sum(each.loss * each.tokens for each in found.documents)
    assert found.loss == pytest.approx(nats / (one.tokens + other.tokens + same.tokens))
    assert stamps() == before
    a.write_text(" \n\n")
    answer = moebius("eval", bytes_run, "--text", a)
    assert (answer.code, "there is no text in it" in answer.err) == (2, True)


@pytest.mark.needs_shared
def test_an_imported_folder_needs_no_prepared_data(tmp_path, moebius):
    run_dir = tmp_path / "run"
    import_source(folder_of("hf_qwen3_moe_a"), run_dir, None, ("data.seq_len=16",))
    file = write_records(tmp_path / "text.jsonl", ["Some text of a user.", "More of it. " * 20])
    answer = moebius("eval", run_dir, "--text", file)
    assert (answer.code, "in 2 documents, windows of 16" in answer.out) == (0, True), answer.text
    (run_dir / "source" / "tokenizer.json").unlink()
    for words in (("eval", run_dir, "--text", file), ("chat", run_dir)):
        answer = moebius(*words)
        assert (answer.code, "the imported folder had no tokenizer" in answer.err) == (2, True)
