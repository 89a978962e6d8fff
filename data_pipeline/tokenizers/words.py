"""A tokenizer whose tokens are whole words: `python:package.module:function`, which gives them.

    # my_task.py, on PYTHONPATH or installed
    def words(letters):
        return [*"abcdefghijklmnopqrstuvwxyz"[:letters], "none"]

    moebius train my_task.toml 'prepare.tokenizer=python:my_task:words?letters=4'

The ids are the words' places in what the function returns, and the end of a document comes last.
Texts are split at blanks. A word that is not among them is an error, for made-up data has none. What
is written into a prepared folder is an ordinary tokenizer.json (WordLevel).
"""

from collections.abc import Iterable

import tokenizers
from tokenizers import models, pre_tokenizers

from ..callables import import_function, is_function_path, split_settings
from ..errors import InputError
from .interface import END_OF_DOCUMENT, TOKENIZER_FILE

FUNCTION = "python:"
"""What the name of such a tokenizer begins with."""

_SHOWN = 60  # characters of what is wrong


def word_files(name: str) -> dict[str, bytes]:
    """Returns the files of the tokenizer whose words a function gives.

    Raises:
        InputError: there is no such function, or it does not return different words.
    """
    where = f"tokenizer {name!r}"
    path, settings = split_settings(name.removeprefix(FUNCTION), where=where)
    if not is_function_path(path):
        raise InputError(f"{where}: write {FUNCTION}package.module:function")
    function = import_function(path, where=where, purpose="a function that returns words")
    try:
        words = function(**settings)
    except Exception as error:
        raise InputError(f"{where}: the function raised {type(error).__name__}: {error}") from error
    return {TOKENIZER_FILE: _tokenizer_json(_checked(words, where)).encode()}


def _tokenizer_json(words: list[str]) -> str:
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer.to_str()


def _checked(words: object, where: str) -> list[str]:
    if isinstance(words, str) or not isinstance(words, Iterable):
        raise InputError(f"{where} returned {words!r:.{_SHOWN}}: it must return a list of words")
    found = list(words)
    seen: set[str] = set()
    for word in found:
        if not isinstance(word, str) or word.split() != [word] or word in seen:
            raise InputError(
                f"{where}: {word!r:.{_SHOWN}} is not a word, or is there twice: each must be a text "
                "without blanks, and another one"
            )
        seen.add(word)
    if not found or END_OF_DOCUMENT in seen:
        raise InputError(
            f"{where} returned {len(found)} words: give at least one, and not {END_OF_DOCUMENT!r}"
        )
    return found
