"""Converts a SentencePiece model to a tokenizer.json of the `tokenizers` library, with the same
ids.

    text ─► the model's own table of characters ─► its treatment of blanks ─► BPE or Unigram

The two libraries agree if these steps do. They differ where tokenizer.json cannot express something
(user-defined symbols, blanks after words) or decides otherwise (two ways to merge the same piece).
The export therefore compares both libraries' ids on a sample of texts and refuses if one differs.

A Unigram model would find pieces such as </s> wherever a text spells them. A symbol that no text
may produce is therefore written with a leading blank; its id stays. (Single-byte pieces are found:
<0x41> in a text would become the byte.)
"""

import importlib
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from ...data_pipeline.tokenizers.interface import MODEL_FILE
from ...data_pipeline.tokenizers.sentencepiece import SentencePieceTokenizer
from ...train.config.run_config import ConfigError

_BLANK = "▁"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of pieces
_UNIGRAM, _BPE = 1, 2  # kinds of models

SAMPLE = (
    "The band closes upon itself.",
    "  two blanks before,  between,\tand after  ",
    "a line\nand\r\n\n another",
    "1234 5.67 x86 2^24 №9 ½ ﬁ Å ｆｕｌｌ",
    "naïve café – “quoted” … Ελληνικά, кириллица, 漢字かな, العربية, ไทย, 한국어",
    "😀 👩‍👩‍👧 \u200b\u00ad e\u0301",
    "</s> <s> <unk> <pad> ▁ a▁b <|end|>",
    "aaaaaaaaa aaaa aaaaaaa bababababab ------------ ........ ",
    "Pneumonoultramicroscopicsilicovolcanoconiosis",
    "",
    " ",
    "\n",
    "a",
)
"""Texts to compare ids on, in addition to the run's own data."""


def convert(tokenizer: SentencePieceTokenizer, texts: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Returns the tokenizer in the other library, verified on a sample of texts.

    Args:
        tokenizer: of the run.
        texts: of the run's data, compared in addition to the sample.

    Raises:
        ConfigError: a text gets other ids; the message shows it.
    """
    proto = _parsed(tokenizer.files[MODEL_FILE])
    library = tokenizers.Tokenizer(_model(proto))
    library.normalizer = _normalizer(proto.normalizer_spec)
    library.decoder = _decoder(proto.normalizer_spec)
    end = library.id_to_token(tokenizer.end_of_document_id)
    assert end is not None, "the ids are the model's"
    library.add_special_tokens([end])
    symbols = [f"a{piece.piece}b" for piece in proto.pieces if piece.type == _USER_DEFINED]
    _prove(tokenizer, library, [*SAMPLE, *symbols, *texts])
    return library


def _parsed(model: bytes) -> Any:
    """Returns the model's protobuf message, parsed with sentencepiece's own description."""
    proto: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(model)
    return proto


def _model(proto: Any) -> Any:
    pieces, unknown = proto.pieces, proto.trainer_spec.unk_id
    has_bytes = bool(proto.trainer_spec.byte_fallback)
    if proto.trainer_spec.model_type == _UNIGRAM:
        scored = [
            (f" {piece.piece}" if piece.type in (_UNKNOWN, _CONTROL) else piece.piece, piece.score)
            for piece in pieces
        ]
        return models.Unigram(scored, unk_id=unknown, byte_fallback=has_bytes)
    if proto.trainer_spec.model_type != _BPE:
        raise ConfigError(_refusal("it is neither a BPE nor a Unigram model"))
    return models.BPE(
        vocab={piece.piece: number for number, piece in enumerate(pieces)},
        merges=_merges(pieces),
        unk_token=pieces[unknown].piece,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )


def _merges(pieces: Sequence[Any]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that form a piece, best score first."""
    normal = {piece.piece: piece.score for piece in pieces if piece.type == _NORMAL}
    place = {piece.piece: number for number, piece in enumerate(pieces)}
    found = []
    for piece, score in normal.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                found.append((-score, place[piece], place[left], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _normalizer(spec: Any) -> Any:
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_BLANK))
    steps.append(normalizers.Replace(" ", _BLANK))
    return normalizers.Sequence(steps)


def _decoder(spec: Any) -> Any:
    steps: list[Any] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _prove(
    tokenizer: SentencePieceTokenizer, library: tokenizers.Tokenizer, texts: Sequence[str]
) -> None:
    """Raises unless both libraries give every text the same ids."""
    library.encode_special_tokens = True  # as `split_special_tokens` says: text is text
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        other = library.encode(text, add_special_tokens=False).ids
        if other != ids.tolist():
            at = next(
                (
                    n
                    for n, pair in enumerate(zip(other, ids.tolist(), strict=False))
                    if len({*pair}) > 1
                ),
                min(len(other), len(ids)),
            )
            shown = tokenizer.decode(ids[max(0, at - 8) : at + 8])
            raise ConfigError(_refusal(f"it would give a text other ids, near {shown!r}"))


def _refusal(reason: str) -> str:
    return (
        "the run's SentencePiece model cannot be converted for transformers: "
        f"{reason}. Export without a tokenizer (--no-tokenizer), and encode with the sentencepiece "
        "library and the model of the prepared folder"
    )
