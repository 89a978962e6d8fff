"""Breaks texts and plain values at random, as by a bad disk, a typo or a forger."""

import copy
import math
import random
import string
from collections.abc import Iterator
from typing import Any

# What a person never means, and what machines make of values.
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.0, -0.0, 1.5,
    1e308, 5e-324, math.nan, math.inf, -math.inf, "", " ", "none", "nan", "true", "[/x]", "[red]",
    "../..", "/", "a/b", "x" * 300, "ä\n\r", "\x00", "\x1b[2J", "𝔘", "$(id)", "`id`", "%s{}", "auto",
    [], {}, [[]], [{}], {"": 1}, {"kind": "x"}, [1, "a"], {"a": {"b": {"c": 1}}},
)  # fmt: skip
STRANGE_TEXT = (
    b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"[" * 3000, b"{" * 3000, b'{"a":' * 3000, b"= = =", b"]]",
    b"nan", b"1e999", b"9" * 5000, b"-", b'"""', b"\\u0000", b"\\ud800", b"\n\n", b"\r", b"[[x]]\n",
    b"recipe = 1\n", b"true", b"null", b"..", b"'", b"#",
)  # fmt: skip


def broken_text(rng: random.Random, text: bytes) -> bytes:
    """Returns text with one to three changed bytes, pieces or lines."""
    for _ in range(rng.randint(1, 3)):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        end = min(end, at + rng.choice((1, 8, 200)))
        match rng.randrange(6):
            case 0 if at < len(text):
                text = text[:at] + bytes([text[at] ^ 1 << rng.randrange(8)]) + text[at + 1 :]
            case 1:
                text = text[:at] + text[end:]
            case 2:
                text = text[:at]
            case 3:
                text = text[:end] + text[at:]
            case _:
                text = text[:at] + rng.choice(STRANGE_TEXT) + text[at:]
    return text


def broken_value(rng: random.Random, value: Any) -> Any:
    """Returns a plain value with one to three places changed, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return rng.choice(STRANGE)
        holder, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[broken_name(rng, key)] = rng.choice(STRANGE)
            case 2 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(rng.choice(holder)))
            case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
                holder[key] = rng.choice((holder[key] + 1, -holder[key], holder[key] * 1000))
            case _:
                holder[key] = copy.deepcopy(rng.choice(STRANGE))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every holder and key of a plain value, outermost first."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from _places(value[key])


def broken_name(rng: random.Random, name: str) -> str:
    if not name or rng.random() < 0.2:
        return rng.choice(("", "x", "a.b", "ä", "__class__", "kind", "\n"))
    at = rng.randrange(len(name))
    return name[:at] + rng.choice(string.ascii_lowercase) + name[at + 1 :]
