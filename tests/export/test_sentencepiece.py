"""SentencePiece models are exported as a tokenizer.json with the same ids, or refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from bytes_run import prepare_bytes, train_bytes
from small_corpus import sentencepiece_model, sentences
from small_model import TINY

from moebius.cli.main import main
from moebius.data_pipeline.tokenizers.sentencepiece import SentencePieceTokenizer
from moebius.export.hf.sentencepiece_json import SAMPLE, convert
from moebius.export.hf.tokenizer import tokenizer_files
from moebius.train.config.run_config import ConfigError

pytest.importorskip("sentencepiece", reason="the extra `sentencepiece`")

TRAINING = [*sentences(0, 60), "aaa aaaa 12 345 6789 naïve Ελληνικά", "— “quoted” ½ … \t tab"]


def model_of(**options: Any) -> bytes:
    return sentencepiece_model(TRAINING, **{"vocab_size": 400, **options})


MODELS: dict[str, dict[str, Any]] = {
    "as in the paper": {"split_digits": True},
    "bytes": {"byte_fallback": True, "split_digits": True},
    "unigram": {"model_type": "unigram", "vocab_size": 150},
    "unigram of bytes": {"model_type": "unigram", "vocab_size": 400, "byte_fallback": True},
    "not normalised": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
    },
    "no blank in front": {"add_dummy_prefix": False},
    "an end of its own": {"control_symbols": ["<doc>"]},
}


def random_texts(seed: int) -> list[str]:
    """Texts of words, blanks of all kinds, and letters unknown to the model."""
    rng = random.Random(seed)
    parts = [
        *" ".join(TRAINING).split()[:60],
        " ",
        "  ",
        "\n",
        "\t",
        "\u3000",
        "</s>",
        "日本",
        "😀",
    ]
    parts += ["a", "aa", "12", "3", "ﬁ", "é", "e\u0301", "▁", "<unk>"]
    return ["".join(rng.choices([*parts, " "], k=rng.randint(1, 30))) for _ in range(200)]


@pytest.mark.parametrize("name", MODELS)
def test_the_ids_are_the_same(name: str) -> None:
    end = "<doc>" if "control_symbols" in MODELS[name] else ""
    tokenizer = SentencePieceTokenizer(model_of(**MODELS[name]), end_of_document=end)
    library = convert(tokenizer, ["of the data"])
    library.encode_special_tokens = True
    texts = [*SAMPLE, *random_texts(1)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert library.encode(text).ids == ids.tolist(), repr(text)
        if "byte_fallback" in MODELS[name]:  # otherwise unknown letters are decoded differently
            assert library.decode(ids.tolist()) == tokenizer.decode(ids)
    end_of_document = library.id_to_token(tokenizer.end_of_document_id)
    assert end_of_document is not None
    assert end_of_document.strip() == tokenizer.end_of_document
    assert library.get_vocab_size() == tokenizer.vocab_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"user_defined_symbols": ["<mine>"]}, "it would give a text other ids, near 'a<mine>b'"),
        ({"treat_whitespace_as_suffix": True}, "it would give a text other ids, near"),
        ({"model_type": "char"}, "neither a BPE nor a Unigram model"),
    ],
)
def test_what_cannot_be_the_same_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)SentencePiece.*{message}.*--no-tokenizer"):
        convert(SentencePieceTokenizer(model_of(**options)))


def test_texts_of_the_data_are_part_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SentencePieceTokenizer(model_of())
    plain = tokenizer.encode_batch

    def other(texts: list[str]) -> list[Any]:
        return [
            ids[::-1] if text == "own text" else ids
            for text, ids in zip(texts, plain(texts), strict=True)
        ]

    monkeypatch.setattr(tokenizer, "encode_batch", other)
    assert tokenizer_files(tokenizer, 20)
    with pytest.raises(ConfigError, match="it would give a text other ids"):
        tokenizer_files(tokenizer, 20, ["own text"])


@pytest.mark.slow
def test_a_run_is_exported_and_loaded(tmp_path: Path) -> None:
    """Through the command line, and back through AutoTokenizer."""
    transformers = pytest.importorskip("transformers", reason="the extra `hf`")
    (tmp_path / "own.model").write_bytes(model_of(byte_fallback=True))
    model = SentencePieceTokenizer((tmp_path / "own.model").read_bytes())
    name = str(tmp_path / "own.model")
    shards = prepare_bytes(tmp_path, tokenizer=name, vocab_size=model.vocab_size)
    run = train_bytes(
        shards,
        tmp_path / "run",
        TINY.changed({"vocab_size": model.vocab_size}),
        seq_len=16,
        tokenizer=name,
    )
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", "export", str(run), "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    for text, ids in zip(SAMPLE, model.encode_batch(SAMPLE), strict=True):
        assert loaded(text)["input_ids"] == ids.tolist()
        assert loaded.decode(ids.tolist(), skip_special_tokens=True) == model.decode(ids)
    assert loaded.eos_token_id == loaded.pad_token_id == model.end_of_document_id
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["pad_token_id"] == model.end_of_document_id
