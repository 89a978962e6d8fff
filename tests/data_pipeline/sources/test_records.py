"""Every format reads prompts, answers and ids alike; invalid Unicode is an error with its place, or is
dropped and counted.
"""

import json

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from small_corpus import documents_by_split

from moebius.data_pipeline.errors import InputError

FIELDS = {"prompt_field": "q", "answer_field": "a", "id_field": "id"}
RECORDS = [
    {"q": "2+2= ", "a": "4", "id": "sum/1", "other": 1},
    {"q": "", "a": " fünf\n", "id": "sum/2", "other": 2},
    {"q": "Wie?\n", "a": "", "id": "sum/3", "other": 3},
]


def _write(path, records):
    """Writes records, or an Arrow table of them."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return
    table = records if isinstance(records, pa.Table) else pa.Table.from_pylist(records)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)


def _read(path, **options):
    return [one for split in documents_by_split(path, **options) for one in split]


@pytest.fixture(params=["jsonl", "parquet", "arrow"])
def path(request, tmp_path):
    """A file of each format with fields."""
    return tmp_path / f"a.{request.param}"


def test_a_record_is_a_prompt_and_its_answer(path):
    _write(path, RECORDS)
    found = _read(path, **FIELDS)
    assert [(one.prompt, one.text) for one in found] == [(one["q"], one["a"]) for one in RECORDS]
    assert [one.record_id for one in found] == ["sum/1", "sum/2", "sum/3"]
    assert [one.row for one in found] == [0, 1, 2]
    assert found[0].whole == "2+2= \n4", "words of the two do not run into each other"
    assert found[1].whole == " fünf\n"


def test_an_id_may_be_a_whole_number(path):
    _write(path, [{"text": "a", "id": 7}, {"text": "b", "id": -(2**60)}])
    ids = [one.record_id for one in _read(path, id_field="id")]
    assert ids == ["7", str(-(2**60))]


@pytest.mark.parametrize(
    ("record_id", "message"),
    [
        ("", "holds an empty text, not an id"),
        (None, "holds a NoneType, not an id"),
        ("x" * 1025, "is longer than 1024 bytes"),
    ],
)
def test_a_record_without_a_usable_id_is_an_error_with_its_place(path, record_id, message):
    _write(path, [{"text": "a", "id": "1"}, {"text": "b", "id": record_id}])
    place = "line 2" if path.suffix == ".jsonl" else "record 1"
    with pytest.raises(InputError, match=f"{place}: field 'id' {message}"):
        _read(path, id_field="id")


@pytest.mark.parametrize("given", [1.5, True])
def test_a_number_that_is_no_whole_one_is_no_id(tmp_path, given):
    _write(tmp_path / "a.jsonl", [{"text": "a", "id": given}])
    with pytest.raises(InputError, match=r"line 1: field 'id' holds a (float|bool), not"):
        _read(tmp_path / "a.jsonl", id_field="id")


@pytest.mark.parametrize(
    ("missing", "setting"), [("q", "prompt_field"), ("a", "answer_field"), ("id", "id_field")]
)
def test_a_missing_field_is_named_with_its_setting(path, missing, setting):
    _write(path, [{key: value for key, value in RECORDS[0].items() if key != missing}])
    said = f"no (field|column) '{missing}'.*write prepare.{setting}=FIELD"
    with pytest.raises(InputError, match=said):
        _read(path, **FIELDS)


@pytest.mark.parametrize("name", ["a.txt", "embedded"])
def test_what_has_no_fields_is_refused_where_fields_are_asked_for(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match=r"has no fields, but source 'text' sets id_field='id'"):
        _read(name, id_field="id")


# ---- what is no Unicode


def _broken(kind: str) -> pa.Array:
    """A column of three texts, the middle one not UTF-8."""
    broken = pa.array([b"fine", b"caf\xe9 au lait", b"good"], pa.binary())
    if kind == "string":
        return broken.view(pa.string())
    if kind == "view":
        return broken.cast(pa.binary_view()).view(pa.string_view())
    if kind == "dictionary":
        coded = broken.dictionary_encode()
        words = coded.dictionary.view(pa.string())
        return pa.DictionaryArray.from_arrays(coded.indices, words, safe=False)
    if kind == "runs":
        coded = pc.call_function("run_end_encode", [broken])
        children = [coded.run_ends, coded.values.view(pa.string())]
        of_runs = pa.run_end_encoded(pa.int32(), pa.string())
        return pa.Array.from_buffers(of_runs, len(coded), [None], children=children)
    return broken


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", ""),
        ("a.parquet", "string"),
        *(("a.arrow", kind) for kind in ("string", "binary", "view", "dictionary", "runs")),
    ],
)
def test_a_record_that_is_no_utf8(tmp_path, name, kind):
    path, place = tmp_path / name, "record 1: column 'text'"
    if kind:
        _write(path, pa.table({"text": _broken(kind)}))
    else:
        lines = b'{"text": "fine"}\n{"text": "caf\xe9 au lait"}\n{"text": "good"}\n'
        path.write_bytes(lines)
        place = "byte 30, line 2"
    with pytest.raises(InputError, match=f"{place}.*not UTF-8 .byte 0xe9.*encoding_faults=drop"):
        _read(path)
    found = _read(path, encoding_faults="drop")
    assert [(one.row, one.fault) for one in found] == [(0, ""), (1, "not UTF-8"), (2, "")]
    assert r"caf\xe9 au lait" in found[1].text, "the report shows the bytes"
    assert [one.text for one in found if not one.fault] == ["fine", "good"]


def test_half_a_surrogate_pair_in_any_field_that_is_kept(tmp_path):
    path, half = tmp_path / "a.jsonl", "not Unicode (lone surrogates)"
    whole = {"q": "\ud83d\ude00", "a": "b", "id": "1"}
    _write(path, [whole, {"q": "c", "a": "d\ud83d", "id": "2"}])
    with pytest.raises(InputError, match=r"line 2: not Unicode .half a surrogate pair, .ud83d, at"):
        _read(path, **FIELDS)
    first, second = _read(path, encoding_faults="drop", **FIELDS)
    assert (first.prompt, first.fault) == ("😀", "")
    assert (second.text, second.fault) == ("c\nd\\ud83d", half)
    _write(path, [{"text": "a", "source": "\udc00"}])
    assert _read(path, encoding_faults="drop")[0].fault == half


def test_of_plain_text_the_document_around_a_fault_is_dropped(tmp_path):
    paragraph = "word " * 2000 + "\n\n"
    content = (paragraph + "caf\xe9\n\n" + paragraph + paragraph).encode("latin-1")
    (tmp_path / "a.txt").write_bytes(content)
    found = _read(tmp_path / "a.txt", encoding_faults="drop")
    assert [one.fault for one in found] == ["", "not UTF-8", ""]
    assert found[1].text == "caf\\xe9\n"
    assert found[0].text == found[2].text == paragraph


# ---- text in other types than strings


def _column(kind: str, texts: list[str]) -> pa.Array:
    plain = pa.array(texts, pa.string())
    if kind == "dictionary":
        return plain.dictionary_encode()
    if kind == "dictionary of bytes":
        return plain.cast(pa.binary()).dictionary_encode()
    if kind == "runs":
        return pc.call_function("run_end_encode", [plain])
    if kind == "json":
        return pa.ExtensionArray.from_storage(pa.json_(), plain)
    if kind == "fixed":
        return pa.array([text.encode() for text in texts], pa.binary(4))
    return plain.cast({"view": pa.string_view(), "bytes view": pa.binary_view()}.get(kind, kind))


KINDS = ["large_string", "view", "binary", "large_binary", "bytes view", "fixed", "dictionary"]
KINDS += ["dictionary of bytes", "runs", "json"]


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_of_any_type_is_text_prompt_answer_and_id(tmp_path, kind, suffix):
    if (kind, suffix) == ("runs", "parquet"):
        return  # which Parquet has not
    texts = ["é b", "é b", "cddd"] * 50
    columns = {name: _column(kind, texts) for name in ("q", "a", "id", "text")}
    _write(tmp_path / f"a.{suffix}", pa.table(columns))
    assert [one.text for one in _read(tmp_path / f"a.{suffix}")] == texts
    found = _read(tmp_path / f"a.{suffix}", **FIELDS)
    assert [(one.prompt, one.text, one.record_id) for one in found] == [(t, t, t) for t in texts]


def test_other_columns_are_refused_with_the_key_to_type(tmp_path):
    columns: dict = {f"number_{n}": [1] for n in range(5000)}
    columns |= {"text": [[1]], "content": ["a"], "title": ["b"]}
    _write(tmp_path / "a.parquet", pa.table(columns))
    _write(tmp_path / "a.jsonl", [{f"field {n}": "x" * n for n in range(3000)}])
    for name, said in (
        ("a.parquet", r"holds list.*'text', .*and 4,993 more; write prepare.text_field=content"),
        ("a.jsonl", r"'prepare.text_field=field 2999'"),
    ):
        with pytest.raises(InputError, match=said) as caught:
            _read(tmp_path / name)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "error", [KeyError("codec"), OSError("thrift"), NotImplementedError("x"), OverflowError("y")]
)
@pytest.mark.parametrize("stage", ["plan", "read"])
def test_whatever_arrow_raises_is_about_the_file(tmp_path, monkeypatch, error, stage):
    _write(tmp_path / "a.parquet", RECORDS)
    target = "metadata" if stage == "plan" else "iter_batches"

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pq.ParquetFile, target, property(fails) if stage == "plan" else fails)
    with pytest.raises(InputError, match=f"a.parquet is not a readable Parquet.*{error.args[0]}"):
        _read(tmp_path / "a.parquet", text_field="q")


# ---- lines that are not JSON


def test_lines_that_are_not_json_are_dropped_if_asked(tmp_path):
    good = b'{"text": "one"}\n'
    (tmp_path / "a.jsonl").write_bytes(good + b'{"text": "tw\n[1]\n\n"x"\n' + good + b"\xff\n")
    with pytest.raises(InputError, match=r"line 2: not valid JSON.*prepare.encoding_faults=drop"):
        _read(tmp_path / "a.jsonl")
    found = _read(tmp_path / "a.jsonl", encoding_faults=9)
    faults = ["", "not JSON", "not JSON", "not JSON", "", "not UTF-8"]
    assert [(one.row, one.fault) for one in found] == list(enumerate(faults))
    assert found[1].text == '{"text": "tw\n'


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_byte_order_marks_of_joined_files_are_no_text(tmp_path, name):
    line = b'{"text": "x"}\n' if name == "a.jsonl" else b"x\n"
    (tmp_path / name).write_bytes((b"\xef\xbb\xbf" + line) * 3)
    assert "".join(one.text for one in _read(tmp_path / name)).replace("\n", "") == "xxx"
