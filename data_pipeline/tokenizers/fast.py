"""Encoding with tiktoken instead of `tokenizers`, with the same ids: about eight times as fast.

Both do byte-level BPE, but not by the same rules: `tokenizers` joins two tokens where their *pair*
is in the list of merges, tiktoken where the *bytes* of both together are a token. The ids are equal
for every text when three things hold, and `fast_encoder` asks for all three whenever a tokenizer is
loaded:

1. Both split text into the same words. The splitting must be one of the few that are known here
   (`_pattern`): ours, GPT-2's, Llama 3's and Qwen 2's. The two libraries know different versions of
   Unicode: in the versions that are tested together 13 of all 1,112,064 characters are of another
   class. A text with a character that is younger than this Python is left to `tokenizers`.
2. The last step of every token is its merge: encoding the token's own bytes by the merges before
   its own ends in exactly the two parts that its merge joins. Then the bytes decide the pair: where
   a token's bytes have been left alone by their neighbours, the earlier merges have left its two
   parts, however the rest of the text looks. A token that two merges make fails this.
3. A sample comes out equal: texts that are made to be difficult, and the whole vocabulary as text.

What fails one of them is encoded by `tokenizers`, which is said once, with the reason.

Cost: the proof takes about 0.1 s for 8,000 ids and 1 s for 50,000, once per process and tokenizer.
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

from .interface import token_dtype

# Everything without a look-ahead stands in one group: it is then one automaton, where tiktoken's
# engine would try branch after branch. That makes encoding 1.4 times as fast.
_GPT2 = r"(?: ?\p{L}+| ?\p{N}+|'(?:[sdmt]|ll|ve|re)| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"
# Digits(individual_digits=True) in front of it: a digit ends whatever comes before, blanks included
_GPT2_AFTER_DIGITS = (
    r"(?: ?\p{L}+|\p{N}|'(?:[sdmt]|ll|ve|re)| ?[^\s\p{L}\p{N}]+)|\s+(?![^\s\p{N}])|\s"
)
# The tokenizer.json of Llama 3 has the branches of this, then those with a look-ahead, in a row;
# Qwen 2's takes digits one by one. Only expressions that match every character are possible: what
# none matches is a word for `tokenizers`, and lost by tiktoken.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
)
_BLANKS = r"|\s+(?!\S)|\s+"
_KNOWN_SPLITS = {
    f"{branches}{_BLANKS}": f"(?:{branches}){_BLANKS}"
    for branches in (_LLAMA3, _LLAMA3.replace("{1,3}", ""))
}
"""By the expression of a tokenizer.json, the equal one that tiktoken is given."""

# Of another class in one of the libraries: letters and digits of Unicode 17.
_IN_DOUBT = frozenset(map(chr, [*range(0x11DE0, 0x11DEA), *range(0x16FF4, 0x16FF7)]))
_SAMPLE_CHARS = 2**18

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
    """Says why a tokenizer cannot be encoded with tiktoken, or not with the same ids."""


class FastEncoder:
    """Encodes text with tiktoken to the ids of one tokenizer.json."""

    def __init__(self, merges: list[tuple[bytes, bytes]], pattern: str, vocab: dict[bytes, int]):
        tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
        ranks = {token: rank for rank, token in enumerate(tokens)}
        # A special token that no text is searched for: with none, tiktoken's search for them stops
        # at every character.
        never = {"<|end_of_document|>": len(ranks)}
        self._encoding = tiktoken.Encoding(
            "moebius", pat_str=pattern, mergeable_ranks=ranks, special_tokens=never
        )
        ids = [vocab[token] for token in tokens]
        self._ids = np.array(ids, dtype=token_dtype(1 + max(ids)))

    def encode(self, text: str) -> np.ndarray | None:
        """Returns the ids of `text`, 1-D of `token_dtype`, or None: `tokenizers` has to encode it.

        Raises:
            UnicodeEncodeError: the text holds half a surrogate pair.
        """
        if not text.isascii() and _has_character_in_doubt(text):
            return None
        ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        return self._ids.take(ranks)


def fast_encoder(text_json: str) -> FastEncoder:
    """Returns tiktoken's encoder of a tokenizer.json.

    Raises:
        UnsuitableError: it would give other ids, or this could not be shown.
    """
    library = tokenizers.Tokenizer.from_str(text_json)
    library.encode_special_tokens = True
    library.no_truncation()
    library.no_padding()
    described = json.loads(library.to_str())
    pattern = _pattern(described)
    vocab, merges = _bytes_of(described["model"])
    _check_last_steps(merges)
    encoder = FastEncoder(merges, pattern, vocab)
    _check_sample(library, encoder, vocab)
    return encoder


def _pattern(described: dict[str, Any]) -> str:
    """Returns the regular expression by which a tokenizer.json splits text into words."""
    if described.get("normalizer") is not None:
        raise UnsuitableError("it normalises text")
    if texts := [one["content"] for one in described["added_tokens"] if not one["special"]]:
        raise UnsuitableError(f"it searches the text for added tokens such as {texts[0]!r}")
    splitting = described["pre_tokenizer"] or {}
    steps = splitting.get("pretokenizers", [splitting])
    *first, last = [{"type": None} | step for step in steps]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise UnsuitableError("it does not split text byte by byte, without a blank in front")
    kinds = [step["type"] for step in first]
    by_gpt2 = last.get("use_regex", True)
    if not kinds and by_gpt2:
        return _GPT2
    if kinds == ["Digits"] and by_gpt2 and first[0]["individual_digits"]:
        return _GPT2_AFTER_DIGITS
    if kinds == ["Split"] and not by_gpt2:
        split = first[0]
        expression = split["pattern"].get("Regex")
        if expression in _KNOWN_SPLITS and split["behavior"] == "Isolated" and not split["invert"]:
            return _KNOWN_SPLITS[expression]
    raise UnsuitableError("it splits text in a way that has no equal in tiktoken")


def boundaries_of(described: dict[str, Any]) -> str | None:
    """Returns the blanks in front of which a text may be cut without changing its ids.

    None: no place is known to be safe, because the splitting is not that of byte-level BPE, or
    because the text is changed or searched before it is split.
    """
    try:
        pattern = _pattern(described)
    except UnsuitableError:
        return None
    # Llama's and Qwen's let a run of signs swallow the line feed that follows it.
    return " \n" if pattern in (_GPT2, _GPT2_AFTER_DIGITS) else " "


def _bytes_of(model: dict[str, Any]) -> tuple[dict[bytes, int], list[tuple[bytes, bytes]]]:
    """Returns vocabulary and merges of a BPE model as bytes; the merges in their order."""
    if model.get("type") != "BPE":
        raise UnsuitableError(f"it is no BPE but {model.get('type')}")
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    used = [name for name in (*options, "byte_fallback") if model.get(name)]
    if used:
        raise UnsuitableError(f"its {' and '.join(used)} has no equal in tiktoken")
    byte_of = _byte_of_character()
    try:
        merges = [
            (_as_bytes(left, byte_of), _as_bytes(right, byte_of)) for left, right in model["merges"]
        ]
    except KeyError as error:
        raise UnsuitableError(f"its merges are not of bytes ({error})") from error
    made = {bytes([byte]) for byte in range(256)} | {left + right for left, right in merges}
    vocab = {}
    for token, index in model["vocab"].items():
        data = bytes(byte_of[one] for one in token) if set(token) <= byte_of.keys() else None
        if data in made:
            vocab[data] = index
        elif model.get("ignore_merges"):
            raise UnsuitableError(f"it has tokens that no merge makes, such as {token!r}")
    if missing := sorted(made - vocab.keys()):
        raise UnsuitableError(f"its vocabulary lacks {missing[0]!r}")
    return vocab, merges


def _as_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    return bytes(byte_of[character] for character in token)


@cache
def _byte_of_character() -> dict[str, int]:
    """Returns GPT-2's alphabet: the printable character that stands for each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    moved = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in kept} | moved


def _check_last_steps(merges: list[tuple[bytes, bytes]]) -> None:
    """Checks condition 2: the merges before a token's own leave its two parts of its bytes."""
    rank_of: dict[bytes, int] = {}
    for rank, (left, right) in enumerate(merges):
        token = left + right
        if rank_of.setdefault(token, rank) != rank:
            raise UnsuitableError(f"two merges make the token {token!r}")
        if _merged(token, rank_of, rank) != [left, right]:
            raise UnsuitableError(f"the merges before {token!r} do not leave {left!r}, {right!r}")


def _merged(token: bytes, rank_of: dict[bytes, int], stop: int) -> list[bytes]:
    """Returns the parts of `token` after all merges of a rank below `stop`."""
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
    """Checks condition 3."""
    for text in (*DIFFICULT_TEXTS, *_vocabulary_as_text(vocab)):
        expected = library.encode(text, add_special_tokens=False).ids
        try:
            found = encoder.encode(text)
        except ValueError as error:
            raise UnsuitableError(f"tiktoken cannot encode {text[:40]!r} ({error})") from error
        if found is not None and found.tolist() != expected:
            raise UnsuitableError(f"tiktoken gives other ids for {text[:40]!r}")


def _vocabulary_as_text(vocab: Iterable[bytes]) -> list[str]:
    """Returns the tokens that are text, a few hundred together, evenly chosen where too many."""
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
    """Finds a character that may be in doubt: one of the few of the basic plane, or any beyond."""
    basic = [chr(code) for code in range(0x10000) if unicodedata.category(chr(code)) == "Cn"]
    return re.compile(f"[{re.escape(''.join(basic))}\U00010000-\U0010ffff]")


def _has_character_in_doubt(text: str) -> bool:
    """Returns whether the two libraries might class a character differently."""
    if not _possibly_in_doubt().search(text):
        return False
    return any(unicodedata.category(one) == "Cn" or one in _IN_DOUBT for one in set(text))
