"""Prompts and their answers as tokens: what a run is tested on while it trains (`data.test_sets`).

They are read as the training data is, from files or functions, with the same fields and the folder's
own tokenizer; every rank reads all of them, for they are small. An item is encoded as a training
document: prompt, answer, end of document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np

from .data_config import DataConfig, TestSet
from .errors import InputError
from .make.tasks import normalised_document
from .sources.documents import Document
from .sources.reading import read_documents
from .sources.splits import plan_splits
from .tokenizers.interface import Tokenizer
from .tokenizers.tokenizer import load_tokenizer


@dataclass(frozen=True)
class TestItem:
    """Holds a prompt and its answer: the first `num_prompt` tokens are given."""

    __test__ = False  # for pytest, which takes the name for a class of tests

    tokens: np.ndarray  # int64, the end of the document included
    num_prompt: int


@lru_cache(maxsize=4)
def read_test_sets(data_json: str) -> dict[str, list[TestItem]]:
    """Returns the items of every test set of a prepared folder's configuration, by name.

    The same configuration is read once per process.

    Args:
        data_json: a `DataConfig` as JSON, `directory` included.

    Raises:
        InputError: a set cannot be read, is empty, or has an item without an answer.
        ShardError: the folder has no tokenizer.
    """
    config = DataConfig.model_validate_json(data_json)
    if not config.test_sets:
        return {}
    tokenizer = load_tokenizer(config.directory)
    return {one.name: _read(config, one, tokenizer) for one in config.test_sets}


def _read(config: DataConfig, test_set: TestSet, tokenizer: Tokenizer) -> list[TestItem]:
    documents = list(islice(_documents(config, test_set), test_set.max_items or None))
    if not documents:
        raise InputError(f"test set {test_set.name!r}: {', '.join(test_set.input)} has no items")
    prompts = tokenizer.encode_batch([document.prompt for document in documents])
    answers = tokenizer.encode_batch([document.text for document in documents])
    end = np.array([tokenizer.end_of_document_id])
    items = []
    for document, prompt, answer in zip(documents, prompts, answers, strict=True):
        if not len(prompt) or not len(answer):
            raise InputError(
                f"test set {test_set.name!r}, {document.source}, record {document.row}: a prompt of "
                f"{len(prompt)} tokens and an answer of {len(answer)}: both need at least one"
            )
        tokens = np.concatenate([prompt, answer, end]).astype(np.int64)
        items.append(TestItem(tokens, len(prompt)))
    return items


def _documents(config: DataConfig, test_set: TestSet) -> Iterator[Document]:
    fields = config.all_sources[0]
    source = fields.model_copy(
        update={"name": test_set.name, "input": test_set.input, "validation_input": ()}
    )
    alone = config.model_copy(update={"sources": (source,), "input": ()})
    for split in plan_splits(alone):
        for document in read_documents(split, source, encoding_faults=config.encoding_faults):
            if not document.fault:
                yield normalised_document(document, has_prompt=source.has_loss_mask)
