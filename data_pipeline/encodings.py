"""Guesses the encoding of bytes that are not UTF-8, for the advice in an error message.

Single-byte encodings differ in a few letters, so a text can look right in several: the advice then shows
how each one reads a word. Of 200 texts in 23 languages, 94 % get the right one first
(tests/data_pipeline/sources/test_encodings.py).
"""

import codecs
import re
from itertools import zip_longest

SAMPLE_BYTES = 2**16

# by Python's names, of what people have, the likelier one first; `iconv` knows all of them
_WIDE = ["utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be"]
_ASIAN = ["euc_jp", "cp932", "gb18030", "big5", "big5hkscs", "cp949", "johab"]
_WINDOWS = ["cp1252", "cp1250", "cp1251", "koi8_r", "koi8_u"]
_WINDOWS += [f"cp{page}" for page in (1253, 1254, 1255, 1256, 1257, 1258, 874)]
_ISO = [f"iso8859_{part}" for part in (2, 3, 5, 6, 7, 8, 9, 13, 14, 15, 16)]
_OLD = ["cp866", "cp850", "cp437", "cp852", "cp862", "mac_roman", "mac_cyrillic"]
_ORDER = [*_WIDE, *_ASIAN, *_WINDOWS, *_ISO, *_OLD]
_WIDE_BYTES = 64  # shorter ones may mean anything as UTF-16
# which of four bytes are null in much of a text
_NULLS = {"0101": "UTF-16LE", "1010": "UTF-16BE", "0111": "UTF-32LE", "1110": "UTF-32BE"}
_NULLS |= {"0011": "UTF-32LE", "1100": "UTF-32BE"}  # without ASCII
_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32"}
_MARKS |= {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_CLOSE = 0.04, 0.06  # in disorder and in letters of a language; smaller differences decide nothing
_MOST = 3
_ESCAPES = re.compile(rb"\x1b\$\)?([@ABC(])")
_BY_ESCAPE = {b"A": "ISO-2022-CN", b"C": "ISO-2022-KR"}


def conversion(sample: bytes, old: str = "OLD", new: str = "NEW") -> str:
    """Returns what to do about a file that is not UTF-8, from some of its bytes."""
    text = sample.decode("utf-8", errors="replace")
    beyond_ascii = len(text) - len(text.encode("ascii", "ignore"))
    if beyond_ascii > 4 * text.count("\ufffd"):
        return "Nearly all of its text is UTF-8, so it is damaged there: repair or fetch it again"
    found = guessed(sample)
    typed = f"iconv -f {next(iter(found), 'ENCODING')} -t UTF-8 {old} > {new}"
    if not found:
        return f"Its encoding is unknown (`file {old}` may tell). Convert it first: {typed}"
    if len(found) == 1:
        return f"Convert the file first: {typed}"
    words = ", ".join(f"{name} ({word[:20]!r})" for name, word in found.items())
    return f"It may be {words}. Convert the file first, for example: {typed}"


def guessed(sample: bytes) -> dict[str, str]:
    """Returns the likeliest encodings by `iconv`'s names, each with the first word that tells them apart."""
    from charset_normalizer import from_bytes

    if certain := certain_encoding(sample):
        return {certain: ""}
    sample = sample[:SAMPLE_BYTES]
    if sum(byte > 127 for byte in sample) < len(sample) / 10:  # too little for the library
        lines = [line for line in sample.split(b"\n") if not line.isascii()]
        sample = b"\n".join(lines) or sample
    tried = _ORDER if len(sample) >= _WIDE_BYTES else _ORDER[len(_WIDE) :]
    matches = list(from_bytes(sample, cp_isolation=tried))
    if not matches:
        return {}
    chaos, coherence = matches[0].chaos + _CLOSE[0], matches[0].coherence - _CLOSE[1]
    close = [one for one in matches if one.chaos <= chaos and one.coherence >= coherence]
    names = {name for match in close for name in match.could_be_from_charset if name in _ORDER}
    texts: dict[str, str] = {}  # those that differ, with the name of the likeliest that reads so
    for name in sorted(names, key=_ORDER.index):
        texts.setdefault(sample.decode(name, errors="replace"), iconv_name(name))
    found = list(texts)[:_MOST]
    words = zip_longest(*map(str.split, found), fillvalue="")
    telling = next((row for row in words if len({*row}) == len(row)), [""] * len(found))
    return {texts[text]: word for text, word in zip(found, telling, strict=True)}


def iconv_name(name: str) -> str:
    """Returns the name by which `iconv` knows one of Python's codecs."""
    plain = {"mac_roman": "macintosh"}.get(name, name).upper().replace("_", "-")
    return re.sub("-([LB]E)$", r"\1", plain)


def certain_encoding(head: bytes) -> str:
    """Returns the encoding that a file's mark, null bytes or escapes between alphabets show; "" for none."""
    is_null = [64 * head[place:4096:4].count(0) > len(head[place:4096:4]) for place in range(4)]
    by_nulls = _NULLS.get("".join("01"[one] for one in is_null), "")
    marked = next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")
    if marked or (by_nulls and decodes(head, by_nulls)):
        return marked or by_nulls
    found = _ESCAPES.search(head)
    return _BY_ESCAPE.get(found[1], "ISO-2022-JP") if found else ""


def decodes(sample: bytes, encoding: str = "utf-8") -> bool:
    """Returns whether bytes are of an encoding; the last character may be cut."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return False
    return True
