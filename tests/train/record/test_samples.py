"""What a model writes while it trains is what it writes afterwards, from a key-value cache."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_corpus import sections_of_words
from small_model import TINY

from moebius.data_pipeline.tokenizers.tokenizer import prepared_tokenizer
from moebius.evaluation.generate import generate
from moebius.model.transformer import Transformer
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config, ConfigError, TrainConfig
from moebius.train.config.train_config import MetricsConfig
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.samples import write_samples

ON_RANK_0: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))


def test_it_is_the_likeliest_token_each_time(data: Path) -> None:
    config = Config(
        model=TINY,
        **sections_of_words(data, seq_len=24),
        train=TrainConfig(metrics=MetricsConfig(sample_tokens=3)),
    )
    torch.manual_seed(0)
    model = Transformer(config.model)
    samples = write_samples(model, config, ON_RANK_0)
    assert model.training
    assert len({sample.prompt for sample in samples}) == 4
    model.eval()
    tokenizer = prepared_tokenizer(data)
    for sample in samples:
        (prompt,) = tokenizer.encode_batch([sample.prompt])
        assert len(prompt) <= 21
        if len(prompt) < 21:
            continue  # an end of a document is in it, which no text says
        written = generate(
            model, torch.from_numpy(prompt.astype("int64")), num_tokens=3, temperature=0
        )
        assert sample.continuation == tokenizer.decode(list(written))


@pytest.mark.parametrize(
    ("recipe", "overrides", "problem"),
    [
        ("smoke", ["sample_tokens=256"], "leaves no prompt in rows of data.seq_len=256"),
        ("smoke", ["sample_tokens=4", "targets=paired"], "labels its inputs"),
        ("soft_moe", ["sample_tokens=4"], "lets positions read later ones"),
    ],
)
def test_a_model_that_cannot_write_is_not_asked_to(
    recipe: str, overrides: list[str], problem: str
) -> None:
    sections = {"sample_tokens": "train.metrics", "targets": "data"}
    named = [f"{sections[each.partition('=')[0]]}.{each}" for each in overrides]
    with pytest.raises(ConfigError) as caught:
        resolve(recipe, ["data.seq_len=256", *named], RECIPES)
    assert problem in str(caught.value)
