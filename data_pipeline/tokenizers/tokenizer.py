"""The tokenizer of a prepared folder, whose hash must match the shards.

Each folder holds its own copy, so that the data does not depend on the original file or repository.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..atomic import atomic_write
from ..errors import InputError, ShardError
from ..files import json_object, read_regular
from ..manifest import read_manifest
from .huggingface import HuggingFaceTokenizer, check_file
from .interface import (
    CONFIG_FILE,
    END_OF_DOCUMENT,
    MODEL_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    named_token,
)
from .raw_bytes import KIND, BytesTokenizer
from .sentencepiece import SentencePieceTokenizer

_FILES = (TOKENIZER_FILE, MODEL_FILE, CONFIG_FILE)


def tokenizer_of_files(files: Mapping[str, bytes], *, end_of_document: str = "") -> Tokenizer:
    """Makes a tokenizer from the contents of its files.

    Args:
        files: content by name: tokenizer.json or tokenizer.model, and optionally
            tokenizer_config.json.
        end_of_document: the token that ends a document. By default the `eos_token` of
            tokenizer_config.json, else a SentencePiece model's end of sentence, or
            `<|end_of_document|>` for a tokenizer.json.

    Raises:
        ValueError: a file is invalid, or the tokenizer lacks the token.
    """
    config = files.get(CONFIG_FILE, b"{}")
    end = end_of_document or named_token(json_object(config, CONFIG_FILE), "eos_token")
    if TOKENIZER_FILE not in files:
        return SentencePieceTokenizer(files[MODEL_FILE], end_of_document=end)
    text = files[TOKENIZER_FILE].decode("utf-8-sig")
    described = json_object(text, TOKENIZER_FILE)
    if described.get("type") == KIND:
        return BytesTokenizer()
    check_file(described)
    return HuggingFaceTokenizer(text, end_of_document=end or END_OF_DOCUMENT)


def save_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Writes a tokenizer's files into a prepared folder, the main file last."""
    for name, content in sorted(tokenizer.files.items(), key=lambda file: file[0] != CONFIG_FILE):
        with atomic_write(directory / name) as file:
            file.write(content)


def has_tokenizer(directory: Path) -> bool:
    """Returns whether a prepared folder has a tokenizer."""
    return any((directory / name).exists() for name in (TOKENIZER_FILE, MODEL_FILE))


def load_tokenizer(directory: str | Path, *, sha256: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a prepared folder.

    Args:
        directory: the folder.
        sha256: the tokenizer's hash in the manifest; tokenizers with another hash are refused.

    Raises:
        InputError: it is a SentencePiece model, and the library is not installed.
        ShardError: a file is missing, damaged, or of another tokenizer.
    """
    folder = Path(directory)
    if not has_tokenizer(folder):
        raise ShardError(
            f"{folder / TOKENIZER_FILE} does not exist: prepare the data into this folder first"
        )
    there = [name for name in _FILES if (folder / name).exists()]
    path = folder / there[0]
    try:
        tokenizer = tokenizer_of_files({name: read_regular(folder / name) for name in there})
    except InputError:
        raise
    except (ValueError, OSError) as error:
        raise ShardError(
            f"{path} is not a tokenizer ({error}): it is damaged, prepare the data again"
        ) from error
    if sha256 is not None and tokenizer.sha256 != sha256:
        raise ShardError(
            f"{path} has sha256 {tokenizer.sha256[:12]}…, but the shards beside it were made with "
            f"{sha256[:12]}…: ids would mean other text. Restore the tokenizer of the shards, or "
            "prepare the data again"
        )
    return tokenizer


def tokenizer_of(directory: Path) -> Tokenizer:
    """Returns the tokenizer of a folder, cached per process."""
    files = [directory / name for name in _FILES]
    return _loaded(directory, tuple(one.stat().st_mtime_ns for one in files if one.exists()))


@lru_cache(maxsize=1)
def _loaded(directory: Path, made: tuple[int, ...]) -> Tokenizer:
    return load_tokenizer(directory)


def check_meaning(directory: str | Path, position: Mapping[str, Any]) -> None:
    """Checks that the ids of a prepared folder mean what they meant to a checkpoint.

    Args:
        directory: the folder.
        position: the checkpoint's position in its data (`read/samples.py`); {}: unknown.

    Raises:
        ShardError: the folder was prepared with another tokenizer.
    """
    trained = position.get("spec", {}).get("tokenizer_sha256")
    now = read_manifest(directory).header.tokenizer.sha256
    if trained not in (None, now):
        raise ShardError(
            f"{directory} was prepared with another tokenizer ({now[:12]}…) than the checkpoint's data "
            f"({trained[:12]}…), so its ids mean other text to the model: prepare the text with the "
            "run's tokenizer, prepare.tokenizer=FOLDER of its data, or restore that folder"
        )


def prepared_tokenizer(directory: str | Path) -> Tokenizer:
    """Loads the tokenizer that made the shards of a prepared folder.

    Raises:
        ShardError: the folder holds another one.
    """
    return load_tokenizer(directory, sha256=read_manifest(directory).header.tokenizer.sha256)
