"""Cuts a long text into pieces that are encoded one by one, so that no text takes more than time
linear in its length.

tiktoken's regular expression gives up on a run of some 10 million blanks, and both libraries slow
down by a factor of ten on a "word" of as many letters (their heap leaves the cache). Therefore a
text is cut before any engine sees it, by a rule that knows no engine: a piece has at most
`MAX_PIECE_CHARS` characters and ends, where it can, in front of the last blank in reach that
follows something else. There a byte-level tokenizer's own splitting has a boundary anyway (a blank
begins a word, never continues one), so the ids are those of the uncut text. Only a stretch of more
than `MAX_PIECE_CHARS` characters without such a place is cut elsewhere, after exactly that many.
"""

MAX_PIECE_CHARS = 2**16


def cut_text(text: str, *, before: str, max_chars: int = MAX_PIECE_CHARS) -> list[str]:
    """Returns the pieces of `text`, in order.

    Args:
        text: of any length.
        before: the characters, blanks all of them, in front of which a cut changes nothing.
        max_chars: the greatest length of a piece, at least 1.
    """
    pieces = []
    start = 0
    while len(text) - start > max_chars:
        stop = _last_boundary(text, start, start + max_chars, before) or start + max_chars
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def _last_boundary(text: str, start: int, stop: int, before: str) -> int | None:
    """Returns the last place in (start, stop] where one of `before` follows what is no blank."""
    while stop > start:
        place = max(text.rfind(character, start + 1, stop + 1) for character in before)
        if place < 0:
            return None
        if not text[place - 1].isspace():
            return place
        # Over the whole run of blanks at once: one by one would be quadratic in its length.
        stop = start + len(text[start:place].rstrip())
        if stop > start and text[stop] in before:
            return stop
        stop -= 1
    return None
