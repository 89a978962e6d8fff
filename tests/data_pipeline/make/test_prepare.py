"""Any number of workers, order of completion and interruption gives the same bytes; every mistake is
one clear error.
"""

import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from meddling import (
    Meddling,
    NothingToRun,
    StoppedError,
    check_nothing_is_half_there,
    files_of,
)
from small_corpus import count_of, dropped, sentences, write_jsonl
from token_stream import documents_of, tokens_of

from moebius.data_pipeline.errors import InputError, PrepareError
from moebius.data_pipeline.files import TEMPORARY
from moebius.data_pipeline.make import vocabulary
from moebius.data_pipeline.make.pools import SerialPool
from moebius.data_pipeline.make.prepare import look_ahead, prepare
from moebius.data_pipeline.make.units import PrepareProgress
from moebius.data_pipeline.manifest import UNFINISHED, is_prepared, read_manifest
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.sources import embedded
from moebius.data_pipeline.tokenizers.tokenizer import load_tokenizer


def _of(names: list[str], **options: Any) -> PrepareConfig:
    return PrepareConfig(input=tuple(names), **{"tokenizer": "bytes", **options})


def _texts(folder: Path, split: str) -> list[str]:
    """Returns all documents of a split, decoded, in order."""
    tokenizer = load_tokenizer(folder)
    rows = [row["tokens"] for row in documents_of(folder, split)]
    assert all(row[-1] == tokenizer.end_of_document_id for row in rows)
    return [tokenizer.decode(row) for row in rows]


def _expected(corpus) -> list[str]:
    texts = [
        json.loads(line)["text"].strip()
        for path in corpus
        for line in path.read_text().splitlines()
    ]
    return [text for text in dict.fromkeys(texts) if text]


# ---- what is prepared


def test_every_document_is_there_once_in_order_and_exact(prepared, corpus):
    train, validation = _texts(prepared, "train"), _texts(prepared, "validation")
    assert [text for text in _expected(corpus) if text not in set(validation)] == train
    assert [text for text in _expected(corpus) if text in set(validation)] == validation
    assert not set(train) & set(validation)
    assert 10 < len(validation) < 40


def test_the_manifest_counts(prepared, corpus):
    manifest = read_manifest(prepared)
    assert dropped(manifest) == {"duplicate": 1, "empty": 1}
    assert count_of(manifest, "num_documents") == 3 * 40 - 2
    num_bytes = sum(len(text.encode()) for text in _texts(prepared, "train"))
    assert count_of(manifest, "num_text_bytes", "train") == num_bytes
    assert manifest.num_tokens("train") == len(tokens_of(prepared))
    assert manifest.completion is not None
    assert manifest.completion.inputs == {str(path): path.stat().st_size for path in corpus}
    assert 257 < manifest.header.tokenizer.vocab_size <= 400


def test_text_is_normalised_before_it_is_compared(tmp_path):
    texts = ["cafe\u0301\r\nx ", "  café\nx", "other", "\ud800 half", "third"]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    config = _of([str(path)], validation_fraction=0.0, encoding_faults="drop")
    manifest = prepare(config, tmp_path / "d")
    assert _texts(tmp_path / "d", "train") == ["café\nx", "other", "third"]
    assert dropped(manifest) == {"duplicate": 1, "not Unicode (lone surrogates)": 1}


def test_faulty_documents_are_dropped_up_to_a_number(tmp_path):
    lines = [json.dumps({"text": f"text {number}"}) for number in range(6)]
    lines[1:1], lines[4:4] = ['{"text": "torn', "[]"], [r'{"text": "\ud800"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = _of([str(tmp_path / "a.jsonl")], encoding_faults=2)
    message = r"3 faulty documents .1 not Unicode .*, 2 not JSON., the last in .*a.jsonl.*_faults=2"
    with pytest.raises(InputError, match=message):
        prepare(config, tmp_path / "d")
    enough = config.model_copy(update={"encoding_faults": 3})
    manifest = prepare(enough, tmp_path / "d")
    assert dropped(manifest) == {"not JSON": 2, "not Unicode (lone surrogates)": 1}
    assert enough.spec_hash == config.spec_hash, "a higher limit continues"


def test_validation_input_wins_over_train(tmp_path):
    """The fraction is for input without validation_input."""
    train = write_jsonl(tmp_path / "t.jsonl", ["a", "b", "c"])
    validation = write_jsonl(tmp_path / "v.jsonl", ["b", "d"])
    config = _of([str(train)], validation_input=(str(validation),), validation_fraction=0.99)
    prepare(config, tmp_path / "d")
    assert _texts(tmp_path / "d", "train") == ["a", "c"]
    assert _texts(tmp_path / "d", "validation") == ["b", "d"]


def test_a_document_keeps_its_side_when_others_come_and_go(tmp_path):
    texts = sentences(5, 200)
    sides = []
    for name, some in (("all", texts), ("half", texts[::2])):
        path = write_jsonl(tmp_path / f"{name}.jsonl", some)
        prepare(_of([str(path)], validation_fraction=0.3), tmp_path / name)
        sides.append(set(_texts(tmp_path / name, "validation")))
    assert sides[1] == sides[0] & set(texts[::2])
    assert 35 < len(sides[0]) < 85


def test_the_tokenizer_sees_train_text_only(tmp_path):
    train = write_jsonl(tmp_path / "t.jsonl", sentences(1, 20))
    words = [f"unmistakable {n} unmistakable" for n in range(200)]
    validation = write_jsonl(tmp_path / "v.jsonl", words)
    config = PrepareConfig(input=(str(train),), validation_input=(str(validation),), vocab_size=600)
    prepare(config, tmp_path / "d")
    tokenizer = (tmp_path / "d" / "tokenizer.json").read_text()
    assert "mistak" not in tokenizer
    assert "xpert" in tokenizer


def test_a_split_file_gives_the_same_documents(config, prepared, corpus, tmp_path):
    prepare(config.model_copy(update={"split_bytes": 4000}), tmp_path / "d")
    assert len(read_manifest(tmp_path / "d").of("train")) > 3
    train, validation = (_texts(tmp_path / "d", split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(_expected(corpus))
    # the first part has two documents, so it must hold one out
    moved = set(validation) - set(_texts(prepared, "validation"))
    assert len(moved) == 1
    assert train == [text for text in _texts(prepared, "train") if text not in moved]


# ---- pools and progress


class Last(SerialPool):
    """Pickles functions and items as for another machine, and ends the last task first."""

    capacity = 5

    def submit(self, function, item, /):
        message = pickle.dumps((function, item))
        assert len(message) < 6000
        return super().submit(*pickle.loads(message))

    def wait(self):
        self._waiting.reverse()
        number, result = super().wait()
        self._waiting.reverse()
        return number, pickle.loads(pickle.dumps(result))


def _each_twice(function, item):
    """Acts like a cluster that believes a worker dead and repeats its task."""
    function(item)


@pytest.mark.parametrize(
    "pool",
    [Last(), Meddling(_each_twice)],
    ids=["last first", "each twice"],
)
def test_any_pool_gives_the_same_bytes(config, prepared, tmp_path, pool):
    assert prepare(config, tmp_path / "d", pool=pool) == read_manifest(prepared)
    assert files_of(tmp_path / "d", "**/*") == files_of(prepared, "**/*")


def test_progress_is_told(config, tmp_path):
    events: list[PrepareProgress] = []
    manifest = prepare(config, tmp_path / "d", on_progress=events.append)
    stages = dict.fromkeys(event.stage for event in events)
    assert list(stages) == ["reading", "training the tokenizer", "tokenising"]
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert {event.total for event in events} == {3}
    assert events[0].eta_s is None
    last, (source,) = events[-1], events[-1].sources
    assert (last.done, last.eta_s) == (3, 0)
    assert last.tokens == manifest.num_tokens("train") + manifest.num_tokens("validation")
    assert (last.tokens_per_s or 0) > 0
    assert (source.name, source.segments) == ("text", 1)
    num_bytes = sum(Path(path).stat().st_size for path in config.input)
    assert source.num_bytes == source.total_bytes == num_bytes


# ---- interruptions


class StoppingAfter(SerialPool):
    """Stops the coordinator after `num_tasks` tasks."""

    def __init__(self, num_tasks: int):
        super().__init__()
        self._left = num_tasks

    def wait(self):
        if self._left == 0:
            raise StoppedError
        self._left -= 1
        return super().wait()


class TrainingLast(SerialPool):
    """Runs all other tasks before the tokenizer is trained, then stops the coordinator."""

    capacity = 8

    def wait(self):
        for _ in self._waiting:
            if self._waiting[0][1].__name__ != "train_task":
                return super().wait()
            self._waiting.rotate(-1)
        raise StoppedError


def test_the_tokenizer_does_not_depend_on_what_an_earlier_run_has_scanned(tmp_path):
    """A document is held out despite its hash, in a unit that was scanned before the stop."""
    texts = [[], [], ["first " * 50], ["second " * 50, "third " * 50]]
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", some) for n, some in enumerate(texts)]
    config = PrepareConfig(input=tuple(map(str, paths)), vocab_size=300, validation_fraction=1e-9)
    manifest = prepare(config, tmp_path / "undisturbed")
    assert count_of(manifest, "num_documents", "validation") == 1
    with pytest.raises(StoppedError):
        prepare(config, tmp_path / "stopped", pool=TrainingLast())
    prepare(config, tmp_path / "stopped")
    assert files_of(tmp_path / "stopped", "**/*") == files_of(tmp_path / "undisturbed", "**/*")


def test_what_killed_processes_left_in_a_complete_folder_is_removed_if_it_can_be_written(
    config, prepared, tmp_path, monkeypatch
):
    folder = shutil.copytree(prepared, tmp_path / "d")
    (folder / UNFINISHED).mkdir()
    left = ["text.train-00000.tok.arrow", "text.train-00000.idx.arrow", "manifest-000001.json"]
    for name in left:
        (folder / f"{name}{TEMPORARY}17-abcd").write_text("torn")
    plan = folder / f"pack-text-000000-s16.json{TEMPORARY}17-abcd"
    plan.write_text("a loader is writing this")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        prepare(config, folder)
    assert (folder / UNFINISHED).exists()
    prepare(config, folder)
    plan.unlink()
    assert files_of(folder, "**/*") == files_of(prepared, "**/*")
    assert not (folder / UNFINISHED).exists()


@pytest.mark.parametrize(
    ("call", "at"),
    [
        *(("replace", range(0, 40, 5)), ("fsync", range(2, 200, 11)), ("link", range(20))),
        *(
            pytest.param(call, range(200), marks=pytest.mark.nightly)
            for call in ("replace", "fsync")
        ),
    ],
)
def test_failing_at_a_write(config, prepared, tmp_path, monkeypatch, call, at):
    """The disk is full at an ever later write, until all writes succeed."""
    reference, real, survived = files_of(prepared, "**/*"), getattr(os, call), 0
    for survived in at:
        folder, left = tmp_path / str(survived), [survived]

        def failing(*arguments, left=left):
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            left[0] -= 1
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                prepare(config, folder)
                break
            except PrepareError as error:
                assert "free some space" in str(error)  # noqa: PT017
        check_nothing_is_half_there(folder, reference)
        assert not list(folder.rglob(f"*{TEMPORARY}*"))
    assert at[1] < survived < at[-1], "there was never room for all"
    for number in range(at[1], survived, 5 * at.step):
        prepare(config, tmp_path / str(number))
        assert files_of(tmp_path / str(number), "**/*") == reference


@pytest.mark.parametrize("num_writes", [5, 17])
def test_killed_at_a_write(config, prepared, tmp_path, num_writes):
    """kill -9 leaves temporary files, which the next run removes."""
    program = f"""
import os
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.make.prepare import prepare
left, replace = [{num_writes}], os.replace
def dying(source, target):
    left[0] -= 1
    if not left[0]:
        os._exit(9)
    replace(source, target)
os.replace = dying
prepare(PrepareConfig.model_validate_json({config.model_dump_json()!r}), {str(tmp_path / "d")!r})
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == 9
    assert any(TEMPORARY in name for name in files_of(tmp_path / "d", "**/*"))
    assert not is_prepared(tmp_path / "d")
    prepare(config, tmp_path / "d")
    assert files_of(tmp_path / "d", "**/*") == files_of(prepared, "**/*")


def test_finished_shards_are_used_again_and_damaged_ones_are_made_again(config, prepared, tmp_path):
    with pytest.raises(StoppedError):  # two of three splits are tokenised by then
        prepare(config, tmp_path / "d", pool=StoppingAfter(9))
    good, bad = (tmp_path / "d" / f"text.train-0000{number}.tok.arrow" for number in (0, 1))
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    before = good.stat().st_ino, bad.stat().st_ino
    prepare(config, tmp_path / "d")
    assert good.stat().st_ino == before[0]
    assert bad.stat().st_ino != before[1]
    assert files_of(tmp_path / "d", "**/*") == files_of(prepared, "**/*")


# ---- names that lead to the same files


@pytest.fixture
def texts(tmp_path, monkeypatch) -> Path:
    """A folder of two files and a link to it, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in "ab":
        write_jsonl(tmp_path / f"texts/{name}.jsonl", sentences(ord(name), 9))
    (tmp_path / "link").symlink_to("texts")
    return tmp_path / "texts"


ALL = ["texts/*.jsonl"]


def test_input_is_the_same_by_any_name_that_leads_there(texts):
    made, here = prepare(_of(ALL), "d"), texts.parent
    for words in (
        [f"{here}/texts/*.jsonl"],
        ["texts/a.jsonl", f"{here}/texts/../texts/b.jsonl"],
        ["link/*.jsonl"],
    ):
        assert prepare(_of(words), "d", pool=NothingToRun()) == made
        assert look_ahead(_of(words), "d") == made
    with pytest.raises(PrepareError, match=r"text.input: there \['texts/\*.jsonl'\], asked for"):
        prepare(_of(["texts/b.jsonl", "texts/a.jsonl"]), "d")


def test_so_are_a_tokenizer_evaluation_sets_and_the_files_of_a_source(texts):
    here = texts.parent
    prepare(_of(ALL, tokenizer="bpe", vocab_size=300), here / "tok")
    (here / "set.jsonl").write_text(json.dumps({"text": "a b c d e f g h i j k l m n"}) + "\n")

    def named(root: str) -> PrepareConfig:
        source = {"name": "web", "input": [f"{root}texts/a.jsonl"]}
        sets = {"evaluation_sets": [f"{root}set.jsonl"]}
        values = {"tokenizer": f"{root}tok/tokenizer.json", "decontaminate": sets}
        return PrepareConfig.model_validate({"sources": [source], **values})

    made = prepare(named("./"), here / "d")
    assert prepare(named(f"{here}/"), here / "d", pool=NothingToRun()) == made


def test_a_preparation_goes_on_under_another_name_and_keeps_its_own(texts):
    here = texts.parent
    prepare(_of(ALL), here / "undisturbed")
    with pytest.raises(StoppedError):
        prepare(_of(ALL), here / "d", pool=StoppingAfter(3))
    prepare(_of([f"{texts}/*.jsonl"]), here / "d")
    assert files_of(here / "d") == files_of(here / "undisturbed")


# ---- what is refused


def test_a_folder_of_another_spec(config, prepared):
    other = config.model_copy(update={"vocab_size": 500, "text_field": "body"})
    said = "text.text_field: there 'text', asked for 'body'; vocab_size: there 400, asked for 500"
    with pytest.raises(PrepareError, match=said):
        prepare(other, prepared)


def test_a_folder_with_something_else_in_it(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PrepareError, match="a file is in the way; choose another folder"):
        prepare(config, tmp_path / "file" / "d")
    (tmp_path / "file").unlink()
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(PrepareError, match="is not empty and holds no prepared data"):
        prepare(config, tmp_path)
    assert files_of(tmp_path, "**/*") == {"thesis.tex": b"years of work"}


def _edit(path: Path) -> None:
    """Changes a text without its size."""
    path.write_text(path.read_text().replace("e", "o", 1))


def _move(texts: Path) -> None:
    texts.rename("there")
    Path("texts").symlink_to("there")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda texts: write_jsonl(texts / "c.jsonl", ["c"]), r"new: \S+/texts/c.jsonl\)"),
        (lambda texts: shutil.rmtree(texts), r"removed: \S+/texts/a.jsonl, \S+/texts/b.jsonl\)"),
        (
            lambda texts: (texts / "b.jsonl").rename(texts / "c.jsonl"),
            r"new: \S+c.jsonl; removed: ",
        ),
        (lambda texts: write_jsonl(texts / "a.jsonl", ["a"]), r"changed: \S+/texts/a.jsonl\)"),
        (lambda texts: _edit(texts / "a.jsonl"), r"changed: \S+/texts/a.jsonl\)"),
        (lambda texts: _edit(texts.parent / "set.jsonl"), r"changed: \S+/set.jsonl\)"),
        (lambda texts: _edit(texts.parent / "tok/tokenizer.json"), r"changed: \S+/tokenizer.json"),
        (lambda texts: (texts / "a.jsonl").touch(), ""),
        (_move, ""),
    ],
)
def test_a_finished_folder_is_compared_with_its_files(texts, change, said):
    prepare(_of(ALL, vocab_size=300, tokenizer="bpe"), "tok")
    (texts.parent / "set.jsonl").write_text(json.dumps({"text": "a b c d e f g h i j k l m n"}))
    config = _of(ALL, tokenizer="./tok", decontaminate={"evaluation_sets": ["set.jsonl"]})
    made = prepare(config, "d")
    change(texts)
    for _ in range(2):
        if said:
            with pytest.raises(
                PrepareError, match=f"made of other files .{said}.*name a new folder"
            ):
                prepare(config, "d")
        else:
            assert prepare(config, "d", pool=NothingToRun()) == made
    assert prepare(config, "d", pool=NothingToRun(), if_changed="ignore") == made


def test_a_remote_file_is_compared_by_what_its_file_system_says(tmp_path):
    fs, config = fsspec.filesystem("memory"), _of(["memory://a.txt"])
    fs.pipe("/a.txt", b"some words")
    prepare(config, folder := tmp_path / "d")
    assert prepare(config, folder, pool=NothingToRun()).complete
    fs.pipe("/a.txt", b"some woods")
    with pytest.raises(PrepareError, match=r"changed: memory:///a.txt"):
        prepare(config, folder)


def test_files_without_a_record_are_compared_by_name_and_size(texts):
    """As of a folder that an older version made, and of one that was begun before a file was touched."""
    config, said = _of(ALL), []
    with pytest.raises(StoppedError):
        prepare(config, "d", pool=StoppingAfter(3))
    _edit(texts / "a.jsonl")
    prepare(config, "d", on_progress=lambda one: said.append(one.news))
    assert [news for news in said if re.search("begun before .*a.jsonl was last written to", news)]
    with pytest.raises(PrepareError, match=r"changed: .*a.jsonl"):
        prepare(config, "d")
    Path("d/files.json").unlink()
    said.clear()
    prepare(config, "d", on_progress=lambda one: said.append(one.news))
    assert "only their names and sizes were compared" in said[0]
    write_jsonl(texts / "a.jsonl", ["longer"])
    with pytest.raises(PrepareError, match=r"changed: .*a.jsonl"):
        prepare(config, "d")


@pytest.mark.parametrize("change", ["another text of the same size", "fewer lines"])
def test_input_that_changes_between_reading_and_tokenising(tmp_path, change):
    path = write_jsonl(tmp_path / "a.jsonl", sentences(0, 20))
    lines = path.read_text().splitlines(keepends=True)
    if change == "fewer lines":  # one record fewer in as many bytes
        lines[-1] = " " * (len(lines[-1].encode()) - 1) + "\n"
    else:
        lines[3] = lines[3].replace("(0-3)", "(9-3)")

    def meddle(function, item):
        if function.__name__ == "tokenise_unit":
            path.write_text("".join(lines))

    said = r"a.jsonl\[0:\d+\] has changed while it was being prepared"
    with pytest.raises(InputError, match=said):
        prepare(_of([str(path)]), tmp_path / "d", pool=Meddling(meddle))
    assert not list((tmp_path / "d").glob("*.arrow*"))


EMPTY = r"a.jsonl is empty: \d documents were read .*give files with text"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, EMPTY),
        ('\n{"text": " "}\n', {}, EMPTY),
        (
            '{"text": "a"}',
            {"validation_input": "a.jsonl"},
            r"all .* went to validation \(1 there; 1 du",
        ),
        (None, {}, "does not exist"),
    ],
)
def test_what_leaves_nothing_to_train_on(tmp_path, monkeypatch, content, options, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("a.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        prepare(_of(["a.jsonl"], **options), "d")
    assert content is not None or not Path("d").exists(), "nothing is written before"


def test_the_embedded_corpus_alone_is_read_by_this_process(tmp_path, monkeypatch):
    """Whatever the pool; with any other input, the pool runs the tasks."""

    class Refusing(SerialPool):
        def submit(self, function, item, /):
            raise RuntimeError("asked")

    words = "this is a sentence of the corpus. " * 20
    monkeypatch.setattr(embedded, "embedded_part", lambda part: iter([(part, f"{part} {words}")]))
    config = PrepareConfig(tokenizer="bytes", validation_fraction=0)
    manifest = prepare(config, tmp_path / "own", pool=Refusing())
    assert sum(shard.num_documents for shard in manifest.shards) == 4
    (tmp_path / "text.txt").write_text(words)
    both = config.model_copy(update={"input": ("embedded", str(tmp_path / "text.txt"))})
    with pytest.raises(RuntimeError, match="asked"):
        prepare(both, tmp_path / "both", pool=Refusing())


def test_the_tokenizer_is_trained_on_a_sample(config, tmp_path, monkeypatch):
    sizes = []

    def spying(function, item):
        if function.__name__ == "train_task":
            samples = item.directory.rglob("*.sample.jsonl")
            lines = [line for path in samples for line in path.read_text().splitlines()]
            sizes.append(sum(len(json.loads(line).encode()) for line in lines))

    monkeypatch.setattr(vocabulary, "SAMPLE_BYTES", 5000)
    prepare(config, tmp_path / "d", pool=Meddling(spying))
    assert 5000 <= sizes[0] < 5000 + 3 * 1500  # at most one more document per file
