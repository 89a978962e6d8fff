"""Opens existing tokenizers: a file, a folder, a Hugging Face repository, or a function's words.

    tok/tokenizer.json          any tokenizer of the `tokenizers` library
    tok/spm.model               a SentencePiece model, whatever its name
    tok                         a folder with tokenizer.json or tokenizer.model
    hf://owner/name             a repository; hf://owner/name@revision pins a commit, tag or branch
    python:package.module:function?name=value
                                a function's words, each a token (`word_files`)

The caller, the `eos_token` of a tokenizer_config.json beside the tokenizer, or the tokenizer itself
names the token that ends a document (`tokenizer.tokenizer_of_files`). Where a tokenizer_config.json names
none, the first `eos_token_id` of generation_config.json or config.json does. No text may spell it.
"""

import json
import os
import re
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from ...plugins import PYTHON, named_function
from ..errors import InputError
from ..files import json_object
from ..sources.files import content_of
from .chat_template import TEMPLATE_FILE, template_of_files
from .fast import is_of_library
from .interface import CONFIG_FILE, END_OF_DOCUMENT, MODEL_FILE, TOKENIZER_FILE, Tokenizer
from .tokenizer import tokenizer_of_files

JINJA_FILE = "chat_template.jinja"
_PARTS = ("vocab.json", "merges.txt")  # of a tokenizer as GPT-2's, before there was tokenizer.json
_OF_MODELS = ("generation_config.json", "config.json")
_NAME_A_CLASS = (CONFIG_FILE, "config.json")
_SHOWN = 60  # characters of a wrong word
_HEAD_BYTES = 4096
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")  # a token in base64, its rank
# in a folder; the last ones are SentencePiece models of T5 and XLM-R
_USUAL_FILES = (TOKENIZER_FILE, MODEL_FILE, "spiece.model", "sentencepiece.bpe.model")


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
    except BaseException as error:  # whatever a stranger's file makes the libraries raise
        if not is_of_library(error):
            raise
        raise InputError(f"tokenizer {name!r}: {error}") from error


def _files_of(name: str) -> dict[str, bytes]:
    """Reads a tokenizer's files, by their names in a prepared folder."""
    if name.startswith(PYTHON):
        return word_files(name)
    is_file, folder = _folder_of(name)
    for url in [name] if is_file else [folder + file for file in _USUAL_FILES]:
        if (content := content_of(url)) is not None and (kind := _kind_of(content, url)):
            config = content_of(folder + CONFIG_FILE)
            if kind == TOKENIZER_FILE and not _object_in(config).get("eos_token"):
                config = _config_of_eos_id(content, folder) or config
            return {kind: content} | ({} if config is None else {CONFIG_FILE: config})
    _refuse_parts(name, folder)
    raise InputError(
        f"tokenizer {name!r} is neither a .json or .model file nor a folder with {TOKENIZER_FILE} or "
        f"{MODEL_FILE}: check the name, and your access (HF_TOKEN) to a hub repository, which is "
        "hf://owner/name"
    )


def _folder_of(name: str) -> tuple[bool, str]:
    """Returns whether a name denotes a file, and its folder with a slash."""
    is_file = name.endswith((".json", ".model")) or os.path.isfile(name)
    return is_file, name[: name.rfind("/") + 1] if is_file else f"{name.rstrip('/')}/"


def find_template(name: str) -> bytes | None:
    """Returns the chat template beside a tokenizer, as prepared folders keep it; None without one."""
    if name.startswith(PYTHON):
        return None
    _, folder = _folder_of(name)
    if (prepared := content_of(folder + TEMPLATE_FILE)) is not None:
        return prepared
    try:
        return template_of_files(content_of(folder + JINJA_FILE), content_of(folder + CONFIG_FILE))
    except ValueError as error:
        raise InputError(f"tokenizer {name!r}: {error}") from error


def _config_of_eos_id(tokenizer_json: bytes, folder: str) -> bytes | None:
    """Returns a tokenizer_config.json with the token of the model's end id; None if there is none."""
    ids = [_object_in(content_of(folder + name)).get("eos_token_id") for name in _OF_MODELS]
    firsts = [each[0] if isinstance(each, list) and each else each for each in ids]
    added = _object_in(tokenizer_json).get("added_tokens")
    found = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    known = [one.get("content") for index in firsts for one in found if one.get("id") == index]
    return json.dumps({"eos_token": known[0]}).encode() if known else None


def _object_in(content: bytes | None) -> dict[str, Any]:
    """Returns a file's JSON object; an empty one for anything else, which is reported where it matters."""
    try:
        return json_object(content or b"", "")
    except ValueError:
        return {}


def _refuse_parts(name: str, folder: str) -> None:
    """Raises an InputError with the remedy if a vocabulary and its merges lie where a tokenizer.json should."""
    has = {file: content_of(folder + file) is not None for file in (*_PARTS, *_NAME_A_CLASS)}
    if all(has[file] for file in _PARTS):
        kind = "Auto" if any(has[file] for file in _NAME_A_CLASS) else "GPT2"
        source = folder.removeprefix("hf://").rstrip("/") or "."
        raise InputError(
            f"tokenizer {name!r} is a vocabulary in two files, {' and '.join(_PARTS)}: make a "
            f"{TOKENIZER_FILE} of them (pip install 'moebius[hf]'): python -c \"from transformers import "
            f"{kind}Tokenizer as T; T.from_pretrained({source!r}).save_pretrained('tokenizer')\", and "
            "name tokenizer/"
        )


def _kind_of(content: bytes, url: str) -> str:
    """Returns the name that a tokenizer's file has in a prepared folder, by its content, or "".

    Raises:
        InputError: it is a vocabulary of tiktoken or tekken.
    """
    head = content[:_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip()
    is_json = head.startswith(b"{")
    if _TIKTOKEN.match(head) or (is_json and b'"token_bytes"' in head):
        by, rest = "integrations.mistral import Mistral", ""
        if not is_json:
            by = "convert_slow_tokenizer import TikToken"
            rest = ", pattern=PAT_STR, extra_special_tokens=['<|endoftext|>']"
        raise InputError(
            f"tokenizer {url!r} is a vocabulary of tiktoken or tekken: give the tokenizer.json that the "
            "model's repository on the hub has beside it, or make one (pip install 'moebius[hf]'; the "
            "model's code has PAT_STR and the special tokens of a tiktoken file): "
            f'python -c "from transformers.{by}Converter as C; '
            f"C({url!r}{rest}).converted().save('tokenizer.json')\""
        )
    if url.endswith(_PARTS[0]):
        _refuse_parts(url, url.removesuffix(_PARTS[0]))
    if is_json or url.endswith(".json"):
        return TOKENIZER_FILE
    is_model = content.startswith(b"\n") or url.endswith(".model")  # a list of pieces comes first
    return MODEL_FILE if is_model else ""


def word_files(name: str) -> dict[str, bytes]:
    """Returns the WordLevel tokenizer.json of a function's words.

    Ids are the words' positions in the function's result; the end of a document comes last. Texts are
    split at blanks. An unknown word is an error, since synthetic data has none.

    Raises:
        InputError: the function does not return distinct words.
        PluginError: the function does not exist.
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
