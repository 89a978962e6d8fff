"""The recipes of tasks: documents fill their rows as the tokens are counted, and arms are fair."""

from itertools import islice

import pytest

from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.sources.reading import read_documents
from moebius.data_pipeline.sources.splits import plan_splits
from moebius.data_pipeline.tokenizers.hub import open_tokenizer
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.model.transformer import Transformer
from moebius_science.tasks.recipes import ALGORITHMIC

TASKS = ("p_hop", "addition", "permutation_words", "composition")
ARMS = ("dense", "naive_ut", "moeut")


def lengths(prepare: PrepareConfig) -> set[int]:
    """Of some documents of every input, in tokens with the end."""
    tokenizer = open_tokenizer(prepare.tokenizer)
    found = set()
    for split in plan_splits(prepare):
        for document in islice(read_documents(split, prepare.all_sources[0]), 30):
            assert document.prompt
            ids = tokenizer.encode_batch([document.prompt, document.text])
            found.add(sum(map(len, ids)) + 1)
    assert tokenizer.vocab_size <= prepare.vocab_size
    return found


@pytest.mark.parametrize("task", TASKS)
def test_documents_fit_their_rows(task):
    config = ALGORITHMIC[f"{task}_dense"][1]()
    data = config.data
    if data.targets == "paired":
        assert lengths(config.prepare) == {data.seq_len}  # each a row of its own, as rows are cut
    else:
        assert max(lengths(config.prepare)) == data.seq_len + 1  # none is cut


@pytest.mark.parametrize("task", TASKS)
def test_arms_differ_in_the_model_alone(task):
    configs = [ALGORITHMIC[f"{task}_{arm}"][1]() for arm in ARMS]
    for config in configs[1:]:
        for section in ("data", "prepare", "optim", "train", "checkpoint"):
            assert getattr(config, section) == getattr(configs[0], section)
        for size in ("vocab_size", "d_model", "num_layers"):
            assert getattr(config.model, size) == getattr(configs[0].model, size)
    dense, naive, moeut = (config.model for config in configs)
    counts = [
        sum(p.numel() for p in Transformer(model).parameters()) for model in (dense, naive, moeut)
    ]
    assert counts[1] < counts[2] < counts[0] < 1.25 * counts[2]
    experts = moeut.experts
    assert experts is not None
    assert isinstance(experts.router, SigmoidConfig)
    width = dense.feed_forward.d_feed_forward
    assert experts.router.top_k * experts.d_expert == width  # as many columns for a token
    assert 2 * experts.num_experts * experts.d_expert == dense.num_layers * width  # and in all
