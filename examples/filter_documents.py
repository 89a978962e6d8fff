"""Filters for `moebius prepare`: plain functions that keep a document or say why it is dropped.

    PYTHONPATH=examples moebius prepare --input "texts/*.jsonl" --output shards \\
        prepare.filters="['filter_documents:length', 'filter_documents:repetition']"

A filter gets the document's text and returns None to keep it, or a short reason. Reasons are counted,
so many documents should share one. A filter must give the same answer in every process. For the
language of a text, call the model of your choice in the same way:

    model = fasttext.load_model("lid.176.bin")
    def english(text):
        label = model.predict(text.replace("\\\\n", " "))[0][0]
        return None if label == "__label__en" else f"language: {label.removeprefix('__label__')}"
"""

import re
from collections import Counter
from itertools import pairwise

MIN_WORDS, MAX_WORDS = 50, 100_000
STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}


def length(text: str) -> str | None:
    """Drops texts outside the length limits of Gopher (Rae et al. 2021, appendix A.1)."""
    words = len(text.split())
    if words < MIN_WORDS:
        return "length: too few words"
    return "length: too many words" if words > MAX_WORDS else None


def quality(text: str) -> str | None:
    """Drops texts that break some of Gopher's quality rules, made for English web pages."""
    words = text.split()
    if not 3 <= sum(map(len, words)) / max(1, len(words)) <= 10:
        return "quality: mean word length"
    if (text.count("#") + text.count("...") + text.count("…")) > 0.1 * len(words):
        return "quality: symbols"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * len(words):
        return "quality: words without letters"
    if len(STOP_WORDS & {word.lower() for word in words}) < 2:
        return "quality: too few stop words"
    return None


def repetition(text: str) -> str | None:
    """Drops texts that repeat their lines, or one pair of words again and again."""
    lines = [line for line in re.split(r"\n+", text) if line.strip()]
    if len(lines) - len(set(lines)) > 0.3 * len(lines):
        return "repetition: lines"
    pairs = Counter(pairwise(text.split()))
    if pairs:
        (pair, count), *_ = pairs.most_common(1)
        if count > 1 and count * len("".join(pair)) > 0.2 * len(text):
            return "repetition: the most frequent pair of words"
    return None
