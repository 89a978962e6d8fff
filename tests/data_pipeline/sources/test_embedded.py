"""The embedded corpus has enough prose and no code, and is reproducible."""

import hashlib
import subprocess
import sys

import pytest

from moebius.data_pipeline.sources.embedded import (
    NUM_PARTS,
    embedded_documents,
    embedded_part,
    prose,
)

_FINGERPRINT = (
    "import hashlib, moebius.data_pipeline.sources.embedded as c;"
    "print(hashlib.sha256('|'.join(c.embedded_documents()).encode()).hexdigest())"
)


@pytest.mark.slow
def test_there_is_enough_prose_and_every_process_reads_the_same():
    documents = embedded_documents()
    text = "|".join(documents)
    assert len(text) > 1_000_000
    assert len(set(documents)) == len(documents) > 500
    assert min(map(len, documents)) >= 120
    assert ">>>" not in text, "a doctest"
    assert "::=" not in text, "a grammar"
    rows = [pair for part in range(NUM_PARTS) for pair in embedded_part(part)]
    assert dict(rows) == dict(enumerate(documents))
    other = subprocess.run(
        [sys.executable, "-c", _FINGERPRINT], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == hashlib.sha256(text.encode()).hexdigest()


def test_prose_keeps_sentences_and_drops_the_rest():
    docstring = """Return the sum of a list
    of numbers.

    >>> total([1, 2])
    3

    Usage
    =====

    * The first item of a list, wrapped
      over two lines.
    * See :class:`Sum <sums.Sum>` for ``more`` of these.

    name      type      meaning
    a         int       the first number here.

    x = {1: 2}; y = f(x); print(x, y)
    """
    assert prose(docstring) == [
        "Return the sum of a list of numbers.",
        "The first item of a list, wrapped over two lines.",
        "See Sum for more of these.",
    ]
