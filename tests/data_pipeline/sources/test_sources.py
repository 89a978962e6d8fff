"""Every kind of input gives its documents, however it is split; bad input is one clear error."""

import bz2
import gzip
import json
import lzma
import os

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fake_hub import serve_hub
from small_corpus import documents_by_split, planned

from moebius.data_pipeline import retries
from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.sources.formats import plan_splits

TEXTS = ["first\nwith two lines", "zwei – π", "", "x" * 500, "last 😀"]


def _lines(texts) -> bytes:
    return "".join(
        json.dumps({"text": text, "n": n}, ensure_ascii=False) + "\n"
        for n, text in enumerate(texts)
    ).encode()


def _write(path, texts):
    if path.suffix == ".jsonl":
        path.write_bytes(_lines(texts))
        return
    table = pa.table({"text": texts, "source": ["a"] * len(texts), "other": [1] * len(texts)})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
        return
    new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def _read(*inputs, **options):
    """Returns (texts, sources, number of splits) of all input in `inputs`."""
    splits = documents_by_split(*inputs, **options)
    found = [document for split in splits for document in split]
    return [one.text for one in found], [one.source for one in found], len(splits)


@pytest.mark.parametrize("split_bytes", [1, 7, 50, 333, 10**6])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_splitting_a_file_changes_nothing(tmp_path, name, split_bytes):
    _write(tmp_path / name, TEXTS * 3)
    texts, sources, num_splits = _read(tmp_path / name, split_bytes=split_bytes)
    assert texts == TEXTS * 3
    assert {*sources} == {name if name == "a.jsonl" else "a"}
    assert (num_splits > 1) == (split_bytes < 500)


def test_lines_that_begin_where_splits_do(tmp_path):
    line = json.dumps({"text": "0"}) + "\n"
    (tmp_path / "a.jsonl").write_text("".join(line.replace("0", digit) for digit in "12345"))
    texts, _, num_splits = _read(tmp_path / "a.jsonl", split_bytes=len(line))
    assert texts == list("12345")
    assert num_splits == 5


def test_an_arrow_stream_is_one_split(tmp_path):
    _write(tmp_path / "a.stream", TEXTS * 3)
    (tmp_path / "a.stream").rename(tmp_path / "a.arrow")
    assert _read(tmp_path / "a.arrow", split_bytes=1) == (TEXTS * 3, ["a"] * 15, 1)


def _fill(folder, *names) -> None:
    """Writes files whose text is their name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}))


def test_a_folder_is_the_files_in_it_that_can_be_read(tmp_path):
    _fill(tmp_path, "b.jsonl", "a.jsonl", "deep/er/c.jsonl", ".hidden/d.jsonl", "README.md")
    assert _read(tmp_path)[0] == ["a.jsonl", "b.jsonl", "deep/er/c.jsonl"]
    _fill(tmp_path, "other/a.csv")
    with pytest.raises(InputError, match=r"folder without readable files: 1 \.csv \(readable"):
        _read(tmp_path / "other")


def test_a_data_set_of_the_hub(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants", reason="the extra `hub`")
    _write(tmp_path / "a.parquet", TEXTS)
    files = {"data/a.parquet": (tmp_path / "a.parquet").read_bytes(), "README.md": b""}
    with serve_hub({"datasets/our/texts": files}) as (endpoint, _):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.hf_file_system.HfFileSystem.cachable", False)
        for name in ("hf://datasets/our/texts", "hf://datasets/our/texts/data/*.parquet"):
            assert _read(name)[0] == TEXTS
        _break_first_reads(monkeypatch, 3)
        assert _read("hf://datasets/our/texts")[0] == TEXTS
        _break_first_reads(monkeypatch, 99)
        with pytest.raises(InputError, match=r"a.parquet cannot be read \(ReadError: .*tried 4 ti"):
            _read("hf://datasets/our/texts")


def _break_first_reads(monkeypatch, count):
    """Makes the hub's connection fail `times` times with the library's own errors."""
    from huggingface_hub import hf_file_system
    from huggingface_hub.utils import get_session

    errors = pytest.importorskip(type(get_session()).__module__.partition(".")[0])
    fetch, calls = hf_file_system.HfFileSystemFile._fetch_range, []

    def breaks(file, start, end):
        calls.append(start)
        if len(calls) <= count:
            raise errors.ReadError("connection reset")
        return fetch(file, start, end)

    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(hf_file_system.HfFileSystemFile, "_fetch_range", breaks)


def test_jsonl_allows_blank_lines_a_bom_and_a_missing_last_newline(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\n\n  \r\n{"text": "b"}')
    assert _read(tmp_path / "a.jsonl")[0] == ["a", "b"]


def test_a_text_file_is_cut_at_blank_lines_and_loses_nothing(tmp_path):
    content = "".join(f"Absatz {n}, länger.\nLine two of it.\n\n" for n in range(1000))
    (tmp_path / "a.txt").write_text(content)
    texts, sources, _ = _read(tmp_path / "a.txt")
    assert "".join(texts) == content
    assert all(text.startswith("Absatz") and text.endswith("\n\n") for text in texts)
    assert 4 <= len(texts) <= 6
    assert set(sources) == {"a.txt"}
    for split_bytes in (100, 5000):
        texts, _, num_splits = _read(tmp_path / "a.txt", split_bytes=split_bytes)
        assert "".join(texts) == content
        assert num_splits > 3


@pytest.mark.parametrize(
    "text", ["ä" * 100_000, "line\n" * 30_000], ids=["one line", "no blank line"]
)
def test_a_text_file_without_paragraphs_is_cut_anyway(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    texts, _, _ = _read(tmp_path / "a.txt")
    assert "".join(texts) == text
    assert max(map(len, texts)) <= 32_010


def test_globs_are_sorted_and_files_named_twice_are_read_once(tmp_path):
    _fill(tmp_path, "b.jsonl", "a.jsonl", "[1].json")
    assert _read(tmp_path / "*.jsonl", tmp_path / "a.jsonl")[0] == ["a.jsonl", "b.jsonl"]
    assert _read(tmp_path / "[1].json")[0] == ["[1].json"], "a name first"


# ---- bad input


def _parquet(**columns) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def _twice(name: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, names=[name, name]), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\xff"}\n',
            r"a.jsonl, byte 24, line 2: not UTF-8 \(byte 0xff.*iconv",
        ),
        (
            "a.jsonl",
            b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
            r"a.jsonl, byte 0, line 1: not valid JSON \(a number has more than 4,300 digits\);",
        ),
        ("a.txt", b"one\ntwo \xe4\xf6\n", r"a.txt, byte 8, line 2: not UTF-8 \(byte 0xe4"),
        (
            "a.txt",
            "utf-16".encode("utf-16"),
            r"a.txt: not UTF-8 but UTF-16\..*-f UTF-16 -t UTF-8",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"txt": "b"}\n',
            r"byte 14, line 2: no field 'text'; its fields are 'txt'.*text_field",
        ),
        ("a.jsonl", b"{}", r"line 1: no field 'text'; its fields are none"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', r"byte 14, line 2: not valid JSON"),
        ("a.jsonl", b"[1]", r"line 1: a JSON list; each line must be one JSON object"),
        ("a.jsonl.zst", b"no zstd", r"a.jsonl.zst is not valid zstd"),
        (
            "a.jsonl.zst",
            zstandard.compress(_lines(TEXTS * 100))[:-9],
            r"ends in the middle of a zstd frame: it is truncated",
        ),
        ("a.jsonl.gz", b"no gzip", r"a.jsonl.gz is not valid gzip"),
        (
            "a.jsonl.gz",
            gzip.compress(_lines(TEXTS * 100), mtime=0)[:-9],
            r"ends in the middle of a gzip member: it is truncated",
        ),
        ("a.arrow", b"no arrow at all", r"a.arrow is not a readable Arrow file"),
        ("a.arrow", b"ARROW1\0\0 no", r"a.arrow is not a readable Arrow file"),
        ("a.parquet", b"PAR1 no", r"a.parquet is not a readable Parquet file"),
        ("a.parquet", _parquet(body=["a"]), "no column 'text'; its columns are 'body'"),
        ("a.parquet", _parquet(text=[1]), "holds int64"),
        (
            "a.parquet",
            _twice("text"),
            "a.parquet: 2 columns are called 'text': give them different",
        ),
        ("a.txt", b"fine\n" * 100 + b"b\xffd\n", r"a.txt, byte 501: not UTF-8"),
        (
            "a.jsonl.zst",
            zstandard.compress(b'{"text": "a"}\n{"b": 1}\n'),
            r"byte 14 \(unpacked\), line 2: no field",
        ),
        (
            "a.csv",
            b"a,b",
            r"a.csv' has an unknown suffix: readable are .txt, .* .arrow, .*; prepare.format=jsonl",
        ),
    ],
)
def test_bad_content_is_named_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        _read(tmp_path / name, split_bytes=100)


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n"
_KINDS = ["txt", "jsonl", "jsonl.gz", "txt.zst", "txt.bz2", "txt.xz", "parquet", "arrow"]


@pytest.mark.parametrize("kind", _KINDS)
def test_a_git_lfs_pointer_is_no_text(tmp_path, kind):
    (tmp_path / f"a.{kind}").write_bytes(_POINTER)
    with pytest.raises(InputError, match=rf"a.{kind} is a Git LFS pointer.*`git lfs pull`"):
        _read(tmp_path / f"a.{kind}")


@pytest.mark.parametrize(
    ("compress", "name", "suffix"),
    [
        (gzip.compress, "gzip", ".gz"),
        (zstandard.compress, "zstd", ".zst"),
        (bz2.compress, "bzip2", ".bz2"),
        (lzma.compress, "xz", ".xz"),
    ],
)
def test_compressed_data_under_another_name_says_its_kind(tmp_path, compress, name, suffix):
    packed = compress(_lines(TEXTS))
    for kind in ("txt", "jsonl", "json", "parquet", "arrow"):
        (tmp_path / f"a.{kind}").write_bytes(packed)
        with pytest.raises(InputError, match=rf"holds {name} data: name it \S+a.{kind}{suffix} "):
            _read(tmp_path / f"a.{kind}", split_bytes=50, encoding_faults="drop")
    other = ".gz" if suffix == ".xz" else ".xz"
    (tmp_path / f"b.jsonl{other}").write_bytes(packed)
    with pytest.raises(InputError, match=rf"b.jsonl{other} holds {name}.*name it \S+l{suffix} "):
        _read(tmp_path / f"b.jsonl{other}")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(packed))
    with pytest.raises(InputError, match=rf"b.jsonl.gz holds {name} data inside: unpack it"):
        _read(tmp_path / "b.jsonl.gz")


def test_a_later_split_of_a_misnamed_file_says_its_kind_too(tmp_path):
    (tmp_path / "a.txt").write_bytes(gzip.compress(os.urandom(3000)))
    with pytest.raises(InputError, match="holds gzip data"):
        planned(tmp_path / "a.txt", split_bytes=1000)[1]()


def test_a_few_nulls_are_text(tmp_path):
    text = "one\0two, three\0\0\0 and four words\n" * 30
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert _read(tmp_path / "a.txt")[0] == [text]


def test_lines_that_end_with_carriage_returns_alone_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\rtwo\r")
    with pytest.raises(InputError, match=r"carriage return alone.*: tr '\\r' '\\n' < OLD > NEW"):
        _read(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_bytes(b"one\r\ntwo\r")
    assert _read(tmp_path / "b.txt")[0] == ["one\r\ntwo\r"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_missing_value_is_an_empty_document(tmp_path, name):
    _write(tmp_path / name, ["a", None, "b"])
    assert _read(tmp_path / name)[0] == ["a", "", "b"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("record", "field", "other"),
    [
        ({"text": ["a"]}, "text", ""),
        ({"id": "1", "messages": ["a"]}, "messages", ""),
        ({"id": "1", "meta": {"text": "a"}}, "meta.text", ""),
        ({"messages": [{"role": "user", "content": "a"}]}, "text", ""),
        ({"id": "1", "messages": ["a"]}, "text", "id"),
        ({"text": ["a"], "content": "a"}, "text", "content"),
    ],
)
def test_text_inside_lists_and_objects_needs_a_function(tmp_path, kind, record, field, other):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps(record))
    else:
        pq.write_table(pa.Table.from_pylist([record]), path)
    with pytest.raises(InputError, match=r"prepare\.input=python:MODULE:FUNCTION") as caught:
        _read(path, text_field=field)
    assert (f"write prepare.text_field={other}, or" in str(caught.value)) == bool(other)
    assert ("write" in str(caught.value)) == bool(other)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_the_padding_of_fixed_size_text_is_no_text(tmp_path, name):
    padded = pa.array([b"ab\0\0", None, b"abcd"], pa.binary(4))
    _write(tmp_path / name, padded if name == "a.parquet" else padded.dictionary_encode())
    assert _read(tmp_path / name)[0] == ["ab", "", "abcd"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no.jsonl",
            r"no.jsonl' does not exist: check the name",
        ),
        ("*.jsonl", r"\*.jsonl' matches no file"),
        ("", r"is a folder without readable files: none"),
        ("warp://x.jsonl", r"'warp://x.jsonl' cannot be opened"),
    ],
)
def test_nothing_there(tmp_path, name, message):
    with pytest.raises(InputError, match=message):
        _read(name if ":" in name else tmp_path / name)


def test_a_protocol_without_its_package_names_the_package(monkeypatch):
    def missing(url, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(InputError, match=r"needs another package \(Install s3fs to access S3\)"):
        _read("s3://bucket/a.jsonl")


def test_a_file_of_unknown_size(monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.pipe("/test_reading/endless.jsonl", b'{"text": "a"}')
    info = type(memory).info
    monkeypatch.setattr(
        type(memory), "info", lambda fs, path, **options: info(fs, path, **options) | {"size": None}
    )
    with pytest.raises(InputError, match="does not report the file's size: download"):
        _read("memory://test_reading/endless.jsonl")


def test_a_file_that_changed_since_it_was_planned(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}')
    (read,) = planned(path)
    path.write_text('{"text": "abc"}')
    with pytest.raises(InputError, match=r"had 13 bytes when preparation began and has 15 now"):
        read()
    path.write_text('{"text": "a"}')

    def denied(*arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)  # chmod would not stop root
        said = r"a.jsonl cannot be read \(Permission denied\): check the name, and that"
        with pytest.raises(InputError, match=said):
            read()
    path.unlink()
    with pytest.raises(InputError, match=r"a.jsonl cannot be read"):
        read()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"a.{end}", b'{"text": "x"}') for end in ("JSONL", "ndjson", "json")),
        *((f"a.Jsonl.{end}", zstandard.compress(b'{"text": "x"}')) for end in ("zstd", "ZST")),
        ("a.json.gz", gzip.compress(b'{"text": "x"}', mtime=0)),
        ("a.jsonl.bz2", bz2.compress(b'{"text": "x"}')),
        ("a.txt.xz", lzma.compress(b"x")),
        *((f"a.{end}", b"x") for end in ("md", "TEXT", "markdown", "rst")),
        ("a.md.gz", gzip.compress(b"x", mtime=0)),
        ("a.PARQUET", _parquet(text=["x"])),
        ("a.pq", _parquet(text=["x"])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip writes the time
)
def test_usual_suffixes_are_read_in_any_case(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert _read(tmp_path)[0] == ["x"]


def test_what_a_folder_or_glob_holds_and_is_not_read_is_counted(tmp_path):
    names = ["a.jsonl", "b.csv", "c.tsv.gz", "d.csv", "e", ".f", "sub/g.jsonl", "state.json"]
    _fill(tmp_path, *names, *(f"x.{number}" for number in range(20)))
    said = []
    plan_splits(PrepareConfig(input=(str(tmp_path),)), said.append)
    assert "26 of 28 left out: 2 .csv, 1 hidden" in said[0]
    assert "and 15 more" in said[0]
    plan_splits(PrepareConfig(input=(f"{tmp_path}/[as]*",)), said.append)
    assert "1 of 3 left out: 1 folders" in said[1]
    (tmp_path / "sub2").mkdir()
    with pytest.raises(InputError, match=r"matches 2 folders and no file: write .*/sub\*/\*\*"):
        _read(tmp_path / "sub*")


def test_a_format_is_forced(tmp_path):
    (tmp_path / "part-0").write_bytes(_lines(["x"]))
    (tmp_path / "part-1.gz").write_bytes(gzip.compress(_lines(["y"])))
    with pytest.raises(InputError, match=r"1 others.* prepare.format=jsonl reads others as that"):
        _read(tmp_path)
    assert _read(tmp_path, format="jsonl")[0] == ["x", "y"]
    assert PrepareConfig().spec_hash != PrepareConfig(format="txt").spec_hash
    assert "format" not in str(PrepareConfig().spec), "folders made before it remain valid"


def test_links_are_followed_to_files_and_counted_if_to_folders(tmp_path):
    _fill(tmp_path, "in/a.jsonl", "beside/a.jsonl")
    (tmp_path / "in" / "b.jsonl").symlink_to(tmp_path / "beside" / "a.jsonl")
    (tmp_path / "in" / "more.jsonl").symlink_to(tmp_path / "beside")
    assert _read(tmp_path / "in")[0] == ["in/a.jsonl", "beside/a.jsonl"]
    said = []
    plan_splits(PrepareConfig(input=(str(tmp_path / "in"),)), said.append)
    assert "1 of 3 left out: 1 links to folders" in said[0]
    (tmp_path / "in" / "c.jsonl").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"in/c.jsonl is a link to a file that does not exist"):
        _read(tmp_path / "in")


def test_a_file_may_have_a_name_that_is_no_unicode(tmp_path):
    name = os.fsdecode(b"caf\xe9.jsonl")
    (tmp_path / name).write_bytes(_lines(["x"]))
    assert _read(tmp_path) == (["x"], [r"caf\udce9.jsonl"], 1)
