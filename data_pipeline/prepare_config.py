"""What can be left out when data is made: the configuration of the optional stages.

They are apart from the stages themselves (`filters.py`, `language.py`, `near_duplicates.py`,
`decontaminate.py`), because every command reads a configuration and few need numpy or Arrow for it.
"""

from functools import lru_cache
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from .callables import is_function_path

MAX_NGRAM = 1024
"""The longest n-gram of words that is hashed."""

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_Limit = tuple[Annotated[int, Field(ge=1, le=MAX_NGRAM)], Annotated[float, Field(ge=0.0, le=1.0)]]
_FOUND_AT_THRESHOLD = 0.75


class FilterConfig(BaseModel):
    """Says which documents are left out; by default none.

    The published length rule is `min_words=50`, `max_words=100000`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # length; None: no limit
    min_chars: int = Field(default=0, ge=0)
    max_chars: int | None = Field(default=None, ge=1)
    min_words: int = Field(default=0, ge=0)
    max_words: int | None = Field(default=None, ge=1)

    # Gopher A.1, quality filtering
    quality: bool = False
    min_mean_word_chars: float = Field(default=3.0, ge=0.0)
    max_mean_word_chars: float = Field(default=10.0, gt=0.0)
    max_symbols_per_word: float = Field(default=0.1, ge=0.0)  # "#", and ellipses
    max_bullet_lines: float = Field(default=0.9, ge=0.0, le=1.0)
    max_ellipsis_lines: float = Field(default=0.3, ge=0.0, le=1.0)
    min_words_with_letters: float = Field(default=0.8, ge=0.0, le=1.0)
    min_stop_words: int = Field(default=2, ge=0, le=len(STOP_WORDS))  # different ones

    # Gopher A.1, repetition removal: Table A1
    repetition: bool = False
    max_duplicate_lines: float = Field(default=0.30, ge=0.0, le=1.0)
    max_duplicate_paragraphs: float = Field(default=0.30, ge=0.0, le=1.0)
    max_duplicate_line_chars: float = Field(default=0.20, ge=0.0, le=1.0)
    max_duplicate_paragraph_chars: float = Field(default=0.20, ge=0.0, le=1.0)
    # pairs of n and a fraction of characters
    max_top_ngram_chars: tuple[_Limit, ...] = ((2, 0.20), (3, 0.18), (4, 0.16))
    max_duplicate_ngram_chars: tuple[_Limit, ...] = (
        *((5, 0.15), (6, 0.14), (7, 0.13)),
        *((8, 0.12), (9, 0.11), (10, 0.10)),
    )

    @property
    def is_on(self) -> bool:
        """Returns whether any document could be left out."""
        return self.quality or self.repetition or self.limits_chars or self.limits_words

    @property
    def limits_chars(self) -> bool:
        """Returns whether the number of characters is limited."""
        return self.min_chars > 0 or self.max_chars is not None

    @property
    def limits_words(self) -> bool:
        """Returns whether the number of words is limited."""
        return self.min_words > 0 or self.max_words is not None


class LanguageConfig(BaseModel):
    """Names the function that tells a document's language, and the languages that stay."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: str  # "package.module:function"
    allow: tuple[str, ...] = Field(min_length=1)

    @field_validator("function")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if not is_function_path(path):
            raise ValueError(
                f"{path!r} is no function: write package.module:function, for example "
                "my_languages:language"
            )
        return path


class NearDuplicateConfig(BaseModel):
    """Says which documents are near duplicates: those of about `threshold` Jaccard similarity.

    Similarity is that of the sets of all `ngram_words` plain words in a row. More `num_hashes` make
    the step from "stays" to "dropped" around the threshold steeper, and the index larger.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    threshold: float = Field(default=0.8, gt=0.0, lt=1.0)
    ngram_words: int = Field(default=5, ge=1, le=64)
    num_hashes: int = Field(default=240, ge=16, le=4096)

    @property
    def bands_and_rows(self) -> tuple[int, int]:
        """Returns (num_bands, num_rows): the longest bands, of at most `num_hashes` minima
        altogether, with which three of four pairs at the threshold are found.
        """
        return _bands_and_rows(self.threshold, self.num_hashes)

    def probability_of_match(self, similarity: float) -> float:
        """Returns the probability that two documents of this Jaccard similarity share a key."""
        num_bands, num_rows = self.bands_and_rows
        return 1.0 - (1.0 - similarity**num_rows) ** num_bands


@lru_cache(maxsize=16)
def _bands_and_rows(threshold: float, num_hashes: int) -> tuple[int, int]:
    for num_rows in range(num_hashes, 1, -1):
        num_bands = num_hashes // num_rows
        if 1.0 - (1.0 - threshold**num_rows) ** num_bands >= _FOUND_AT_THRESHOLD:
            return num_bands, num_rows
    return num_hashes, 1


class DecontaminateConfig(BaseModel):
    """Names the evaluation sets that training text must not contain.

    `evaluation_sets` are .jsonl and .jsonl.zst files, one item a line. `fields` are those that hold
    text; by default every string in a record counts, in lists and objects as well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    evaluation_sets: tuple[str, ...] = Field(min_length=1)
    fields: tuple[str, ...] = ()
    ngram_words: int = Field(default=13, ge=2, le=MAX_NGRAM)
