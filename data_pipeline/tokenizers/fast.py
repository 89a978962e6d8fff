"""Encodes with tiktoken instead of `tokenizers`: the same ids, about eight times as fast.

Both do byte-level BPE by different rules: `tokenizers` joins two tokens if their *pair* is in the list
of merges, tiktoken if their joined *bytes* are a token. The ids are equal for every text under three
conditions, all of which `fast_encoder` checks when a tokenizer is loaded:

1. Both split text into the same words. The splitting must be a known one (`_pattern`): ours, GPT-2's,
   Llama 3's, Qwen 2's or DeepSeek V3's. The libraries use different versions of Unicode: in the
   versions tested together, they classify 13 of 1,112,064 characters differently. `tokenizers` encodes
   texts with a character unknown to this Python's Unicode, or with an added token that it searches for.
2. The last step of every token is its merge: encoding its bytes by the earlier merges ends in exactly
   the two parts that its merge joins. Bytes then determine the pair: where neighbours leave a token's
   bytes alone, the earlier merges leave its two parts, whatever the rest of the text. A token with two
   merges fails this.
3. A sample gives equal ids: difficult texts, and the whole vocabulary as text.

If one fails, `tokenizers` encodes, and the log gives the reason once.

Cost: the check takes about 0.1 s for 8,000 ids and 1 s for 50,000, once per process and tokenizer.
"""

import json
import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import tiktoken
import tokenizers

from ..read.token_store import token_dtype

# All branches without a look-ahead share one group. It becomes one automaton, where tiktoken's engine
# would otherwise try branch after branch: encoding is 1.4 times as fast.
_GPT2 = r"(?: ?\p{L}+| ?\p{N}+|'(?:[sdmt]|ll|ve|re)| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"
# with Digits(individual_digits=True) in front: a digit ends whatever comes before, also blanks
_GPT2_AFTER_DIGITS = (
    r"(?: ?\p{L}+|\p{N}|'(?:[sdmt]|ll|ve|re)| ?[^\s\p{L}\p{N}]+)|\s+(?![^\s\p{N}])|\s"
)
# Llama 3's tokenizer.json has these branches, then those with a look-ahead, ungrouped; Qwen 2's takes
# digits one by one. Expressions must match every character: what none matches is a word for
# `tokenizers`, but lost by tiktoken.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
)
_BLANKS = r"|\s+(?!\S)|\s+"
# DeepSeek V3 cuts out digits, then Chinese and Japanese, and splits the rest. The last branch of the one
# expression is what no step matches.
_CJK = "一-龥\u3040-ゟ゠-ヿ"
_SIGN_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_WORDS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
_DEEPSEEK3 = "\n".join((r"\p{N}{1,3}", f"[{_CJK}]+", f"{_SIGN_WORDS}|{_WORDS}{_BLANKS}"))
_DEEPSEEK3_AS_ONE = (
    rf"(?:\p{{N}}{{1,3}}|{_SIGN_WORDS}"
    r"|[^\r\n\p{L}\p{P}\p{S}\p{N}CJK]?[[\p{L}\p{M}]--[CJK]]+| ?[[\p{P}\p{S}]--[CJK]]+[\r\n]*"
    r"|\s*[\r\n]+|[[\p{L}\p{M}]&&[CJK]]+|[[\p{P}\p{S}]&&[CJK]]+)|\s+(?![^\s\p{N}CJK])|\s+"
    r"|[^\s\p{L}\p{M}\p{P}\p{S}\p{N}]+(?![[\p{L}\p{M}]--[CJK]])"
).replace("CJK", _CJK)
_KNOWN_SPLITS = {
    f"{branches}{_BLANKS}": f"(?:{branches}){_BLANKS}"
    for branches in (_LLAMA3, _LLAMA3.replace("{1,3}", ""))
} | {_DEEPSEEK3: _DEEPSEEK3_AS_ONE}
"""The expressions of a tokenizer.json, a line for each step, to the equivalent one for tiktoken."""

# letters and digits of Unicode 17, which the libraries classify differently
_IN_DOUBT = frozenset(map(chr, [*range(0x11DE0, 0x11DEA), *range(0x16FF4, 0x16FF7)]))
_SAMPLE_CHARS = 2**18
_MAX_TOKEN_BYTES = 2**12

DIFFICULT_TEXTS = (
    "",
    " ",
    "The quick brown fox, who'd've thought it, doesn't jump; he's 23,456.78 years old!",
    "  leading,   inner  \t tabs \t\t and trailing blanks   ",
    "line\r\nline\r\n\r\n  indented\n\n\n\tdef f(x):\n        return x  # \r lone CR\n",
    "\x00\x01\x02\x1b[0m\x1c\x1d\x1e\x1f\x7f\x80\x85\x9f \x85x\x0b\x0cx",
    "0123456789" * 40 + " 5  6   7x8 x 9\n10\n\n11",
    "٣٤٥ ½⅓ Ⅷ ² 五十 १२३ 𝟘𝟙 1٢3 x² ½x",
    "'s 't 're 've 'm 'll 'd 'S 'LL ''s x's'x don''t '",
    "naïve café e\u0301e\u0300 Ǆǅǆ ﬁ ß ſ İı",
    "日本語のテキスト。空白がない文章です、改行もない。한국어 ไม่มีช่องว่าง ᠠ᠎ᠠ",
    "مرحبا بالعالم \u200f\u202eabc\u202c שלום हिन्दी தமிழ்",
    "😀👩\u200d👩\u200d👧\ufe0f 🇩🇪 𝔘𝔫𝔦 \U0010ffff \ue000 \ufeff\u200b\u2060",
    "\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000x\u3000 y \u2003 5\u3000",
    "<|endoftext|><|end_of_document|></s><s>[SEP] <|im_start|>",
    "________ -- --- ---- ==== #### .... ,,,, (((()))) \"\"'' `` \\n $x_1^{2}$ a_b-c",
    "https://example.com/a/b?c=d&e=f%20g#h user@example.com C:\\path\\to 1e-5 0x1F",
    "acgt" * 300 + " " * 300 + "\n" * 300 + "-" * 300 + "é" * 300 + "x",
)


class UnsuitableError(Exception):
    """Says why tiktoken cannot replace a tokenizer with the same ids."""


class FastEncoder:
    """Encodes text with tiktoken to the ids of one tokenizer.json."""

    # added tokens, for which `tokenizers` searches a text before it splits it
    searched: Iterable[str] = ()

    def __init__(self, merges: list[tuple[bytes, bytes]], pattern: str, vocab: dict[bytes, int]):
        tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
        ranks = {token: rank for rank, token in enumerate(tokens)}
        # a special token that is never searched for: without any, tiktoken's search for them stops
        # at every character
        never = {"<|end_of_document|>": len(ranks)}
        self._encoding = tiktoken.Encoding(
            "moebius", pat_str=pattern, mergeable_ranks=ranks, special_tokens=never
        )
        ids = [vocab[token] for token in tokens]
        self._ids = np.array(ids, dtype=token_dtype(1 + max(ids)))

    def encode(self, text: str) -> np.ndarray | None:
        """Returns the ids of `text`, 1-D of `token_dtype`; None if `tokenizers` must encode it.

        Raises:
            UnicodeEncodeError: the text holds half a surrogate pair.
        """
        is_in_doubt = not text.isascii() and _has_character_in_doubt(text)
        if is_in_doubt or any(token in text for token in self.searched):
            return None
        ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        return self._ids.take(ranks)


def fast_encoder(text_json: str) -> FastEncoder:
    """Returns tiktoken's encoder of a tokenizer.json.

    Raises:
        UnsuitableError: the ids differ, or their equality cannot be shown.
    """
    library = plain_library(text_json)
    described = json.loads(library.to_str())
    pattern = _pattern(described)
    vocab, merges = _bytes_of(described["model"])
    _check_last_steps(merges)
    encoder = FastEncoder(merges, pattern, vocab)
    encoder.searched = [one["content"] for one in described["added_tokens"] if not one["special"]]
    _check_sample(library, encoder, vocab)
    return encoder


def is_of_library(error: BaseException) -> bool:
    """Returns whether the Rust library may have raised an error: plain Exceptions, and panics."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def plain_library(text_json: str) -> tokenizers.Tokenizer:
    """Loads a tokenizer.json without what would change a text's ids or cut them."""
    library = tokenizers.Tokenizer.from_str(text_json)
    # otherwise a text that contains "<|end_of_document|>" could end a document
    library.encode_special_tokens = True
    # the file may truncate texts, for example to 512 tokens
    library.no_truncation()
    library.no_padding()
    if isinstance(library.model, tokenizers.models.BPE):
        library.model.dropout = None  # which skips merges at random
    return library


def _pattern(described: dict[str, Any]) -> str:
    """Returns tiktoken's regular expression for a tokenizer.json's splitting into words."""
    if _changes_text(described.get("normalizer")):
        raise UnsuitableError("it normalises text")
    splitting = described["pre_tokenizer"] or {}
    steps = splitting.get("pretokenizers", [splitting])
    if not steps:
        raise UnsuitableError("it does not split text")
    *first, last = [{"type": None} | step for step in steps]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise UnsuitableError("it does not split text byte by byte, without a blank in front")
    kinds = [step["type"] for step in first]
    by_gpt2 = last.get("use_regex", True)
    if not kinds and by_gpt2:
        return _GPT2
    if kinds == ["Digits"] and by_gpt2 and first[0]["individual_digits"]:
        return _GPT2_AFTER_DIGITS
    if set(kinds) == {"Split"} and not by_gpt2:
        texts = [str(one["pattern"].get("Regex")) for one in first]
        steps = "\n".join(text.replace("\r", r"\r").replace("\n", r"\n") for text in texts)
        is_plain = all(one["behavior"] == "Isolated" and not one["invert"] for one in first)
        if is_plain and steps in _KNOWN_SPLITS:
            return _KNOWN_SPLITS[steps]
    raise UnsuitableError("it splits text in a way that has no equal in tiktoken")


def _changes_text(normalizer: dict[str, Any] | None) -> bool:
    """Returns whether a normaliser does anything; an empty sequence does not."""
    if normalizer and normalizer["type"] == "Sequence":
        return any(map(_changes_text, normalizer["normalizers"]))
    return normalizer is not None


def boundaries_of(described: dict[str, Any]) -> str | None:
    """Returns the blanks in front of which cutting a text keeps its ids; None if none are known.

    None are known if the splitting is not that of byte-level BPE, or if the tokenizer changes or
    searches text before it splits.
    """
    try:
        pattern = _pattern(described)
    except UnsuitableError:
        return None
    searches = not all(one["special"] for one in described["added_tokens"])
    # with Llama's, Qwen's and DeepSeek's, a run of punctuation includes the following line feed
    blanks = " \n" if pattern in (_GPT2, _GPT2_AFTER_DIGITS) else " "
    return None if searches else blanks


def _bytes_of(model: dict[str, Any]) -> tuple[dict[bytes, int], list[tuple[bytes, bytes]]]:
    """Returns the vocabulary and the ordered merges of a BPE model as bytes."""
    if model.get("type") != "BPE":
        raise UnsuitableError(f"it is not BPE but {model.get('type')}")
    options = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    used = [name for name in (*options, "byte_fallback") if model.get(name)]
    if used:
        raise UnsuitableError(f"its {' and '.join(used)} has no equal in tiktoken")
    byte_of = byte_of_character()
    try:
        merges = [(_as_bytes(left), _as_bytes(right)) for left, right in model["merges"]]
    except KeyError as error:
        raise UnsuitableError(f"its merges are not of bytes ({error})") from error
    made = {bytes([byte]) for byte in range(256)} | {left + right for left, right in merges}
    vocab = {}
    for token, index in model["vocab"].items():
        data = _as_bytes(token) if set(token) <= byte_of.keys() else None
        if data in made:
            vocab[data] = index
        elif model.get("ignore_merges"):
            raise UnsuitableError(f"it has tokens that no merge makes, such as {token!r}")
    if missing := sorted(made - vocab.keys()):
        raise UnsuitableError(f"its vocabulary lacks {missing[0]!r}")
    return vocab, merges


def _as_bytes(token: str) -> bytes:
    return bytes(map(byte_of_character().__getitem__, token))


@cache
def byte_of_character() -> dict[str, int]:
    """Returns GPT-2's alphabet: the byte that each printable character stands for."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    moved = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in kept} | moved


def _check_last_steps(merges: list[tuple[bytes, bytes]]) -> None:
    """Checks condition 2: the merges before a token's own reduce its bytes to its two parts."""
    rank_of: dict[bytes, int] = {}
    for rank, (left, right) in enumerate(merges):
        token = left + right
        if len(token) > _MAX_TOKEN_BYTES:  # the check below takes quadratic time
            raise UnsuitableError(f"its token {token[:40]!r}… has {len(token):,} bytes")
        if rank_of.setdefault(token, rank) != rank:
            raise UnsuitableError(f"two merges make the token {token!r}")
        if _merged(token, rank_of, rank) != [left, right]:
            raise UnsuitableError(f"the merges before {token!r} do not leave {left!r}, {right!r}")


def _merged(token: bytes, rank_of: dict[bytes, int], stop: int) -> list[bytes]:
    """Returns the parts of `token` after all merges of ranks below `stop`."""
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 1:
        ranks = [rank_of.get(parts[i] + parts[i + 1], stop) for i in range(len(parts) - 1)]
        if (lowest := min(ranks)) >= stop:
            break
        first = ranks.index(lowest)
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


def _check_sample(
    library: tokenizers.Tokenizer, encoder: FastEncoder, vocab: dict[bytes, int]
) -> None:
    """Checks condition 3: equal ids for a sample of texts."""
    for text in (*DIFFICULT_TEXTS, *_vocabulary_as_text(vocab)):
        expected = library.encode(text, add_special_tokens=False).ids
        try:
            found = encoder.encode(text)
        except ValueError as error:
            raise UnsuitableError(f"tiktoken cannot encode {text[:40]!r} ({error})") from error
        if found is not None and found.tolist() != expected:
            raise UnsuitableError(f"tiktoken gives other ids for {text[:40]!r}")


def _vocabulary_as_text(vocab: Iterable[bytes]) -> list[str]:
    """Returns the tokens that are valid text, 300 joined at a time; an even sample if too many."""
    texts = []
    for token in vocab:
        try:
            texts.append(token.decode())
        except UnicodeDecodeError:
            continue
    step = 1 + sum(map(len, texts)) // _SAMPLE_CHARS
    chosen = texts[::step]
    return ["".join(chosen[start : start + 300]) for start in range(0, len(chosen), 300)]


@cache
def _possibly_in_doubt() -> re.Pattern[str]:
    """Returns a quick filter: unassigned characters of the basic plane, and all beyond it."""
    basic = [chr(code) for code in range(0x10000) if unicodedata.category(chr(code)) == "Cn"]
    return re.compile(f"[{re.escape(''.join(basic))}\U00010000-\U0010ffff]")


def _has_character_in_doubt(text: str) -> bool:
    """Returns whether the two libraries might classify a character differently."""
    if not _possibly_in_doubt().search(text):
        return False
    return any(unicodedata.category(one) == "Cn" or one in _IN_DOUBT for one in set(text))
