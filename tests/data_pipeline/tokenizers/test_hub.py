"""Existing tokenizers, from files, folders and a local copy of the hub."""

import base64
import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from fake_hub import serve_hub
from tokenizers import models, pre_tokenizers, processors

from moebius.data_pipeline import retries
from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.tokenizers import fast
from moebius.data_pipeline.tokenizers.hub import open_tokenizer
from moebius.data_pipeline.tokenizers.huggingface import train_bpe
from moebius.data_pipeline.tokenizers.interface import CONFIG_FILE, END_OF_DOCUMENT, TOKENIZER_FILE
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.data_pipeline.tokenizers.tokenizer import load_tokenizer, save_tokenizer

TEXTS = ["the router chose the expert", "the expert chose the token"] * 5
OURS = train_bpe(TEXTS, vocab_size=280)


def _word_level(**options) -> str:
    """Returns a word-level tokenizer that truncates texts and adds its own tokens."""
    vocab = {"[UNK]": 0, "[SEP]": 1, "[EOT]": 2, "the": 3, "expert": 4, "plain": 5}
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["[UNK]", "[SEP]", "[EOT]"])
    library.add_tokens(["plain"])
    library.post_processor = processors.TemplateProcessing(
        "$A [SEP]", special_tokens=[("[SEP]", 1)]
    )
    library.enable_truncation(3)
    library.enable_padding(length=10)
    return library.to_str()


def _write(folder: Path, **files) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return folder


def test_a_file_and_a_folder_are_opened(tmp_path):
    config = {"eos_token": "[SEP]"}
    folder = _write(tmp_path / "t", tokenizer=_word_level(), tokenizer_config=config)
    for name in (folder, folder / TOKENIZER_FILE):
        tokenizer = open_tokenizer(str(name))
        assert tokenizer.end_of_document == "[SEP]"
        (ids,) = tokenizer.encode_batch(["the the expert expert the"])
        assert ids.tolist() == [3, 3, 4, 4, 3]  # neither truncated nor padded, and no [SEP]
        assert tokenizer.decode([*ids, tokenizer.end_of_document_id]) == "the the expert expert the"


def test_ours_and_raw_bytes_are_opened_as_others_are(tmp_path):
    for tokenizer in (OURS, BytesTokenizer()):
        folder = tmp_path / type(tokenizer).__name__
        folder.mkdir()
        save_tokenizer(folder, tokenizer)
        opened = open_tokenizer(str(folder))
        assert opened.sha256 == tokenizer.sha256
        assert opened.end_of_document == END_OF_DOCUMENT


@pytest.mark.parametrize("config", [None, {}, {"eos_token": None}, {"eos_token": "[SEP]"}])
def test_the_end_of_a_document_that_is_named_goes_first(tmp_path, config):
    files = {} if config is None else {"tokenizer_config": config}
    folder = _write(tmp_path / "t", tokenizer=_word_level(), **files)
    assert open_tokenizer(str(folder), end_of_document="[EOT]").end_of_document_id == 2
    _write(folder, tokenizer_config={"eos_token": {"content": "[EOT]", "lstrip": False}})
    assert open_tokenizer(str(folder)).end_of_document == "[EOT]"


def test_a_prepared_folder_keeps_the_end_of_a_document(tmp_path):
    folder = _write(tmp_path / "t", tokenizer=_word_level())
    by_end = {end: open_tokenizer(str(folder), end_of_document=end) for end in ("[SEP]", "[EOT]")}
    assert by_end["[SEP]"].sha256 != by_end["[EOT]"].sha256
    for tokenizer in by_end.values():
        save_tokenizer(tmp_path, tokenizer)
        loaded = load_tokenizer(tmp_path, sha256=tokenizer.sha256)
        assert loaded.end_of_document == tokenizer.end_of_document


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (
            "",
            r"no token '<\|end_of_document\|>'.*special tokens are '\[UNK\]', '\[SEP\]', '\[EOT\]'",
        ),
        ("[CLS]", r"no token '\[CLS\]' to end a document with; .* name one of them"),
        ("plain", r"'plain' is not a special token, so text that spells it would end a document"),
        ("the", r"'the' is not a special token"),
    ],
)
def test_what_cannot_end_a_document_is_refused(tmp_path, end, message):
    folder = _write(tmp_path / "t", tokenizer=_word_level())
    with pytest.raises(InputError, match=message):
        open_tokenizer(str(folder), end_of_document=end)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "neither a .json or .model file nor a folder .* hf://owner/name"),
        ("nowhere/tokenizer.json", "neither a .json or .model file"),
        ("empty", "neither a .json or .model file nor a folder with tokenizer.json"),
        ("other.txt", "neither a .json or .model file"),
        ("broken.json", "'broken.json': "),
        ("list.json", "tokenizer.json: is a list, not a JSON object"),
        ("config.json", "the `tokenizers` library cannot load it"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(_write(tmp_path, broken="{", list=[], config={"model_type": "bert"}))
    Path("empty").mkdir()
    Path("other.txt").write_text("")
    with pytest.raises(InputError, match=message):
        open_tokenizer(name)


@pytest.mark.parametrize(
    ("name", "content", "converter"),
    [
        ("tokenizer.model", b"IQ== 0\nIg== 1\nIw== 2\n", "TikTokenConverter"),  # Llama 3
        ("qwen.tiktoken", b"IQ== 0\r\nIg== 1\r\n", "TikTokenConverter"),
        (
            "tekken.json",
            b'{"config": {}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}',
            "MistralConverter",
        ),
    ],
)
def test_a_vocabulary_of_tiktoken_is_known_by_its_content(tmp_path, name, content, converter):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        InputError, match=rf"of tiktoken or tekken.*tokenizer.json.* {converter} as"
    ):
        open_tokenizer(str(tmp_path / name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["our.tiktoken", "tekken.json"])
def test_the_error_for_a_vocabulary_of_tiktoken_converts_it(tmp_path, name):
    pytest.importorskip("transformers", reason="it has the converters")
    _, merges = fast._bytes_of(json.loads(OURS.files[TOKENIZER_FILE])["model"])
    tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    names = [base64.b64encode(token).decode() for token in tokens]
    pattern = f"{fast._LLAMA3}{fast._BLANKS}"
    special = [{"rank": 0, "token_str": "<|endoftext|>", "is_control": True}]
    ranked = [{"rank": rank, "token_bytes": each} for rank, each in enumerate(names)]
    tekken = {"config": {"pattern": pattern}, "vocab": ranked, "special_tokens": special}
    lines = "".join(f"{each} {rank}\n" for rank, each in enumerate(names))
    (tmp_path / name).write_text(json.dumps(tekken) if name == "tekken.json" else lines)
    with pytest.raises(InputError) as error:
        open_tokenizer(str(tmp_path / name))
    (command,) = re.findall('python -c "(.*)"', str(error.value))
    command = command.replace("PAT_STR", repr(pattern))
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True, capture_output=True)
    made = open_tokenizer(str(tmp_path / TOKENIZER_FILE), end_of_document="<|endoftext|>")
    text = "Hello, 1234 worlds!\n\n日本"
    rank_of = tiktoken.Encoding(
        "made",
        pat_str=pattern,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={},
    )
    shift = int(name == "tekken.json")  # special tokens come first
    assert made.encode_batch([text])[0].tolist() == [n + shift for n in rank_of.encode(text)]
    assert made.decode(made.encode_batch([text])[0]) == text


@pytest.mark.parametrize("has_class", [False, True])
def test_the_error_for_a_vocabulary_and_its_merges_converts_them(tmp_path, has_class):
    pytest.importorskip("transformers")
    model = json.loads(OURS.files[TOKENIZER_FILE])["model"]
    vocab = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    if has_class:
        (tmp_path / CONFIG_FILE).write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    for name in (tmp_path, tmp_path / "vocab.json", tmp_path / "merges.txt"):
        with pytest.raises(InputError, match="a vocabulary in two files") as error:
            open_tokenizer(str(name))
    (command,) = re.findall('python -c "(.*)"', str(error.value))
    with contextlib.chdir(tmp_path):
        exec(command, {})
    made = open_tokenizer(str(tmp_path / "tokenizer"))
    assert made.end_of_document == "<|endoftext|>"
    text = "Hello,  worlds!\n\n日本"  # without digits, which ours takes one by one
    assert made.encode_batch([text])[0].tolist() == OURS.encode_batch([text])[0].tolist()


def test_a_file_is_known_by_its_content(tmp_path):
    (tmp_path / "words").write_bytes(b"\xef\xbb\xbf" + OURS.files[TOKENIZER_FILE])
    assert open_tokenizer(str(tmp_path / "words")).sha256 == OURS.sha256


# ---- the hub


@pytest.fixture
def hub(monkeypatch):
    """Serves tokenizers to the hub's library; returns the list of requests."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="the extra `hub`")
    repositories = {
        "our/words": {
            TOKENIZER_FILE: _word_level().encode(),
            CONFIG_FILE: b'{"eos_token": "[SEP]"}',
        },
        "our/plain": {TOKENIZER_FILE: OURS.files[TOKENIZER_FILE]},
        "our/weights": {"model.safetensors": b""},
    }
    with serve_hub(repositories) as (endpoint, requests):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.hf_file_system.HfFileSystem.cachable", False)
        yield requests


def test_a_repository_of_the_hub(hub):
    assert open_tokenizer("hf://our/words").end_of_document == "[SEP]"
    assert open_tokenizer("hf://our/words", end_of_document="[EOT]").end_of_document == "[EOT]"
    assert open_tokenizer("hf://our/plain@v1.2").sha256 == OURS.sha256
    assert "GET /our/plain/resolve/v1.2/tokenizer.json" in hub


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", ["hf://our/nothing", "hf://our/weights", "hf://a/b/c/d"])
def test_what_the_hub_does_not_have_is_said(name):
    with pytest.raises(InputError, match=r"neither a .json or .model file .* access .HF_TOKEN."):
        open_tokenizer(name)


def test_an_unreachable_hub_is_said(hub, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # otherwise it retries for 20 s
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.0))
    with pytest.raises(InputError, match=r"tokenizer.json cannot be read \(.*tried 3 times"):
        open_tokenizer("hf://our/words")
