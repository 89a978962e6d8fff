"""p-hop induction: follow "where was this letter last, and what came after it" p times.

For a sequence X of letters, find(i) is the place after the last earlier occurrence of the letter at
i, and hop_p(X)_i is the letter at find(find(…find(i))), p times, or "none" if an occurrence is
missing on the way. One hop is the induction head of Olsson et al. (2022).

Source: Sanford, Hsu, Telgarsky, "Transformers, parallel computation, and logarithmic depth" (arXiv
2402.09268), definition 4.1 (k-hop induction heads) and section 5: sequences of 100 of 4 letters, a
first token that gives k from 0 to 16, labels at every position. About log2 p layers are necessary
and sufficient. Saunshi et al., "Reasoning with latent thoughts" (arXiv 2502.17416), section 2, use
it for looped models.

    prompt   hops_2 none                    the number of hops, whose label is not learned
    answer   a none b none a none b a …     pairs of a letter and its label; then "end"

Use `data.targets="paired"`: the model reads hops_2 a b a b … end and predicts the label after each.
A document is 2·(length + 2) tokens with its own end, so `data.seq_len = 2·(length + 2)` gives each
its own row.

Chance: 1/letters for labels that are letters; the best constant, such as always "none", reaches
`constant_accuracy`. No test item has the letters of a training item, for any number of hops. Longer
sequences are out of distribution.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from .draw import NUM_SPLITS, Record, check_sizes, draw_held_out, draw_train

NONE = "none"
_CHUNK = 256


def words(*, letters: int = 4, hops: int = 16) -> list[str]:
    """Returns the task's words: letters, "none", the numbers of hops, "end"."""
    check_sizes(letters=(letters, 2, 26), hops=(hops, 1, 64))
    return [*_letters(letters), NONE, *(f"hops_{p}" for p in range(1, hops + 1)), "end"]


def train(
    split_index: int,
    num_splits: int,
    *,
    sequences: int = 100_000,
    length: int = 100,
    hops: int = 16,
    letters: int = 4,
    seed: int = 0,
) -> Iterator[Record]:
    """Yields training sequences with 1 to `hops` hops each.

    Raises:
        ValueError: a size makes no task.
    """
    chunk = partial(_chunk, length=length, hops=(1, hops), letters=letters)
    yield from draw_train(
        chunk, sequences, seed=seed, split_index=split_index, num_splits=num_splits
    )


train.num_splits = NUM_SPLITS  # type: ignore[attr-defined]


def held_out(
    *,
    sequences: int = 1000,
    length: int = 100,
    least_hops: int = 1,
    hops: int = 16,
    letters: int = 4,
    seed: int = 0,
) -> Iterator[Record]:
    """Yields test sequences with `least_hops` to `hops` hops each.

    Raises:
        ValueError: a size makes no task.
    """
    chunk = partial(_chunk, length=length, hops=(least_hops, hops), letters=letters)
    yield from draw_held_out(chunk, sequences, seed=seed)


def hop(letters_BS: np.ndarray, hops_B: np.ndarray) -> np.ndarray:
    """Returns hop_p of every position: int64 [B, S], −1 for "none"."""
    found_BS = _find(letters_BS)
    place_BS = np.tile(np.arange(letters_BS.shape[1]), (len(letters_BS), 1))
    for done in range(int(hops_B.max())):
        following_BS = _gather(found_BS, place_BS)
        place_BS = np.where((hops_B > done)[:, None], following_BS, place_BS)
    return _gather(letters_BS, place_BS)


def constant_accuracy(records: list[Record]) -> float:
    """Returns the share of labels that the best constant answer gets right."""
    labels = Counter(label for record in records for label in record["answer"].split()[1::2])
    return labels.most_common(1)[0][1] / labels.total()


def _find(letters_BS: np.ndarray) -> np.ndarray:
    """Returns the place after the last earlier occurrence of every letter; −1 if there is none."""
    num_rows, length = letters_BS.shape
    found_BS = np.full((num_rows, length), -1)
    last_BL = np.full((num_rows, int(letters_BS.max()) + 1), -1)
    rows = np.arange(num_rows)
    for place in range(length):
        letter_B = letters_BS[:, place]
        before_B = last_BL[rows, letter_B]
        found_BS[:, place] = np.where(before_B >= 0, before_B + 1, -1)
        last_BL[rows, letter_B] = place
    return found_BS


def _gather(values_BS: np.ndarray, place_BS: np.ndarray) -> np.ndarray:
    """Returns the values at the places; −1 where there is no place."""
    found_BS = np.take_along_axis(values_BS, np.maximum(place_BS, 0), axis=1)
    return np.where(place_BS >= 0, found_BS, -1)


def _chunk(
    rng: np.random.Generator, *, length: int, hops: tuple[int, int], letters: int
) -> Iterator[tuple[str, Record]]:
    least, most = hops
    check_sizes(
        letters=(letters, 2, 26), length=(length, 2, 2**20), hops=(most, 1, 64),
        least_hops=(least, 1, most),
    )  # fmt: skip
    names = [*_letters(letters), NONE]  # −1 is the last one
    letters_BS = rng.integers(letters, size=(_CHUNK, length))
    hops_B = rng.integers(least, most + 1, size=_CHUNK)
    for asked, given, labels in zip(
        hops_B.tolist(), letters_BS.tolist(), hop(letters_BS, hops_B).tolist(), strict=True
    ):
        spelled = [names[letter] for letter in given]
        pairs = zip(spelled, (names[label] for label in labels), strict=True)
        answer = " ".join(word for pair in pairs for word in pair)
        yield "".join(spelled), {"prompt": f"hops_{asked} {NONE}", "answer": f" {answer} end"}


def _letters(count: int) -> list[str]:
    return [chr(ord("a") + index) for index in range(count)]
