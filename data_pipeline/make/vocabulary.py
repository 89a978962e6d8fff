"""The tokenizer of a preparation: found in the folder, opened, or trained on a sample.

The sample consists of the heads of many units of all sources, so the first token needs no full pass over
the text. The first units of a source are sampled only after they are chosen, because one of their
documents may be held out regardless of its hash.
"""

from collections.abc import Sequence
from pathlib import Path

from ..atomic import atomic_write
from ..errors import InputError
from ..prepare_config import PrepareConfig
from ..tokenizers.chat_template import TEMPLATE_FILE, ChatTemplate
from ..tokenizers.hub import find_template, open_tokenizer
from ..tokenizers.interface import Tokenizer
from ..tokenizers.raw_bytes import BytesTokenizer
from ..tokenizers.tokenizer import has_tokenizer, save_tokenizer
from ..words import some_of
from .tasks import TrainTask
from .units import Unit, sample_shares

SAMPLE_BYTES = 32 * 2**20  # of text; training takes about 20 s
_FIRST_UNITS = 2  # of a source: one of its first two documents may be held out in them


class Vocabulary:
    """Tracks the samples until the tokenizer is trained."""

    def __init__(self, config: PrepareConfig, folder: Path, units: Sequence[Unit]):
        self._config, self._folder, self._units = config, folder, units
        if config.tokenizer != "bpe" and not has_tokenizer(folder):
            tokenizer = BytesTokenizer() if config.tokenizer == "bytes" else _opened(config)
            if config.uses_chat_template and (template := find_template(config.tokenizer)):
                chat = ChatTemplate(template, tokenizer, where=config.tokenizer)
                next(chat.encode_batch([("Hello", "Hi")]))  # what fails here fails everywhere
                with atomic_write(folder / TEMPLATE_FILE) as file:  # before its mark, the tokenizer
                    file.write(template)
            save_tokenizer(folder, tokenizer)
        self.is_ready = has_tokenizer(folder)
        """Whether the folder has its tokenizer."""
        self.shares: dict[int, int] = {}
        """Bytes of text to sample, by unit."""
        if not self.is_ready:
            self.shares = sample_shares(units, SAMPLE_BYTES)
        self._left = set(self.shares)
        self._waiting = {
            index
            for index in self.shares
            if units[index].role == "both" and units[index].number < _FIRST_UNITS
        }
        self._sampled: dict[int, int] = {}  # bytes

    @property
    def units_to_begin_with(self) -> list[int]:
        """Returns the units that can be sampled immediately."""
        return sorted(self.shares.keys() - self._waiting)

    def waits_for(self, index: int) -> bool:
        """Returns whether a unit can be sampled only after it is chosen."""
        return index in self._waiting

    def take(self, index: int, num_bytes: int | None) -> bool:
        """Takes the size of a unit's sample, or None if it failed; returns True with the last one.

        Raises:
            InputError: all samples are empty.
        """
        self._left.discard(index)
        if num_bytes is not None:
            self._sampled[index] = num_bytes
        if self._left or not self.shares:
            return False
        if not any(self._sampled.values()):
            names = [name for source in self._config.all_sources for name in source.input]
            raise InputError(
                f"input {some_of(names)} has no text to train the tokenizer on: give files with text"
            )
        return True

    @property
    def task(self) -> TrainTask:
        """Returns the task that trains the tokenizer."""
        sampled = tuple(self._units[index] for index in sorted(self._sampled))
        return TrainTask(self._folder, self._config.vocab_size, sampled)


def _opened(config: PrepareConfig) -> Tokenizer:
    """Opens the tokenizer that the configuration names."""
    tokenizer = open_tokenizer(config.tokenizer, end_of_document=config.end_of_document)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"tokenizer {config.tokenizer!r} has {tokenizer.vocab_size} ids, more than "
            f"prepare.vocab_size={config.vocab_size}: set prepare.vocab_size={tokenizer.vocab_size}, and "
            "model.vocab_size at least as high"
        )
    return tokenizer
