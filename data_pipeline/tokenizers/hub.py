"""Opens existing tokenizers: a file, a folder, a Hugging Face repository, or a function's words.

    tok/tokenizer.json          any tokenizer of the `tokenizers` library
    tok/spm.model               a SentencePiece model
    tok                         a folder with tokenizer.json or tokenizer.model
    hf://owner/name             a repository; hf://owner/name@revision pins a commit, tag or branch
    python:package.module:function?name=value
                                a function's words, each a token (`word_files`)

The caller, the `eos_token` of a tokenizer_config.json beside the tokenizer, or the tokenizer itself
names the token that ends a document (`tokenizer.tokenizer_of_files`). No text may spell it.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from ...own_parts import PYTHON, named_function
from ..errors import InputError
from ..retries import explain, is_of_connection, is_passing, patiently
from .interface import CONFIG_FILE, END_OF_DOCUMENT, MODEL_FILE, TOKENIZER_FILE, Tokenizer
from .tokenizer import tokenizer_of_files

_HUB = "hf://"
_SHOWN = 60  # characters of a wrong word


def open_tokenizer(name: str, *, end_of_document: str = "") -> Tokenizer:
    """Opens a tokenizer by its path, its name on the hub, or its function.

    Raises:
        InputError: it does not exist, cannot be fetched or read, or cannot end documents.
    """
    files = _files_of(name)
    try:
        return tokenizer_of_files(files, end_of_document=end_of_document)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"tokenizer {name!r}: {error}") from error


def _files_of(name: str) -> dict[str, bytes]:
    if name.startswith(PYTHON):
        return word_files(name)
    return _from_hub(name) if name.startswith(_HUB) else _from_disk(name)


def _from_disk(name: str) -> dict[str, bytes]:
    """Reads a tokenizer's files, by their names in a prepared folder."""
    path = Path(name)
    if path.is_dir():
        path = next(
            (path / file for file in (TOKENIZER_FILE, MODEL_FILE) if (path / file).exists()), path
        )
    kind = {".json": TOKENIZER_FILE, ".model": MODEL_FILE}.get(path.suffix)
    if kind is None or not path.is_file():
        raise InputError(
            f"tokenizer {name!r} is neither a .json or .model file nor a folder with "
            f"{TOKENIZER_FILE} or {MODEL_FILE}: check the path; a hub repository is {_HUB}owner/name"
        )
    try:
        files = {kind: path.read_bytes()}
        beside = path.with_name(CONFIG_FILE)
        return files | ({CONFIG_FILE: beside.read_bytes()} if beside.is_file() else {})
    except OSError as error:
        raise InputError(f"tokenizer {name!r} cannot be read ({error.strerror})") from error


def _from_hub(name: str) -> dict[str, bytes]:
    """Downloads a tokenizer's files into the hub library's cache."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise InputError(
            f"tokenizer {name!r} needs a package: pip install 'moebius[hub]'"
        ) from error
    repository, _, revision = name.removeprefix(_HUB).partition("@")
    files: dict[str, bytes] = {}
    for file in (TOKENIZER_FILE, MODEL_FILE, CONFIG_FILE):
        if file == MODEL_FILE and files:
            continue
        try:
            path = patiently(
                partial(
                    huggingface_hub.hf_hub_download, repository, file, revision=revision or None
                )
            )
        except (errors.LocalEntryNotFoundError, errors.HFValidationError) as error:
            raise _unreachable(name, error) from error
        except errors.EntryNotFoundError:
            continue
        except Exception as error:
            if not is_of_connection(error):
                raise
            raise _unreachable(name, error) from error
        files[file] = Path(path).read_bytes()
    if not {TOKENIZER_FILE, MODEL_FILE} & files.keys():
        raise InputError(
            f"tokenizer {name!r}: the repository has neither {TOKENIZER_FILE} nor {MODEL_FILE}"
        )
    return files


def _unreachable(name: str, error: Exception) -> InputError:
    # the hub library's messages are paragraphs
    reason = explain(error) if is_passing(error) else " ".join(str(error).split())
    return InputError(
        f"tokenizer {name!r} cannot be fetched from the hub ({reason}): check the name and your "
        "access (HF_TOKEN), or download it and give its folder"
    )


def word_files(name: str) -> dict[str, bytes]:
    """Returns the WordLevel tokenizer.json of a function's words.

    Ids are the words' positions in the function's result; the end of a document comes last. Texts are
    split at blanks. An unknown word is an error, since synthetic data has none.

    Raises:
        InputError: the function does not return distinct words.
        OwnPartError: the function does not exist.
    """
    where = f"tokenizer {name!r}"
    wants = "a function that returns words"
    function, settings = named_function(name, where=where, wants=wants)
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
                f"{where}: {word!r:.{_SHOWN}} is not a word or is repeated: words must be distinct "
                "strings without blanks"
            )
        seen.add(word)
    if not found or END_OF_DOCUMENT in seen:
        raise InputError(
            f"{where} returned {len(found)} words: give at least one, and not {END_OF_DOCUMENT!r}"
        )
    return found
