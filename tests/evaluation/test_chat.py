"""Asking a model through its run's chat template, and texts that spell special tokens without one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chat_folder import folder_of

from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.tokenizers.hub import open_tokenizer
from moebius.evaluation import text as texts
from moebius.evaluation.restore import Restored
from moebius.evaluation.text import write_text
from moebius.model.config.model_config import ModelConfig
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config, ConfigError


@pytest.fixture
def restored(tmp_path: Path) -> Restored:
    """A run that was imported from a folder with a chat template, of which it kept the small files."""
    folder = folder_of(tmp_path / "run" / "source")
    size = open_tokenizer(str(folder)).vocab_size
    model = Transformer(ModelConfig(vocab_size=size, d_model=16, num_layers=2))
    prepare = PrepareConfig(tokenizer=str(folder), vocab_size=size)
    config = Config().model_copy(update={"model": model.config, "prepare": prepare})
    return Restored(model, config, 0, tmp_path / "run")


@pytest.fixture
def asked(restored: Restored, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Returns a function that gives the ids of a prompt; the model answers "Fine", its end, and more."""
    tokenizer = open_tokenizer(str(restored.checkpoint / "source"))
    answer = [*tokenizer.encode_batch(["Fine"])[0], tokenizer.end_of_document_id, 65]
    prompts: list[list[int]] = []

    def generate(model: Transformer, prompt_S: torch.Tensor, **options: object) -> Iterator[int]:
        prompts.append(prompt_S.tolist())
        yield from map(int, answer)

    monkeypatch.setattr(texts, "generate", generate)

    def ask(prompt: str, *, chat: bool) -> list[int]:
        options = {"num_tokens": 9, "temperature": 0.0, "seed": 0, "chat": chat}
        written = "".join(write_text(restored, prompt, **options))  # type: ignore[arg-type]
        assert written == ("Fine" if chat else f"{prompt}Fineb")
        return prompts[-1]

    return ask


def test_chat_asks_as_the_template_says_and_ends_with_the_answer(
    restored: Restored, asked: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = open_tokenizer(str(restored.checkpoint / "source"))
    special = {tokenizer._library.token_to_id(one) for one in tokenizer.special_tokens}  # type: ignore[attr-defined]
    ids = asked("How <|im_end|>?", chat=True)
    assert sum(index in special for index in ids) == 4
    assert not caplog.records
    assert not special & {*asked("How <|im_end|>?", chat=False)}
    assert "<|im_end|> in the text is encoded as plain text" in caplog.text


def test_a_run_without_a_template_says_so(restored: Restored, tmp_path: Path) -> None:
    (restored.checkpoint / "source" / "tokenizer_config.json").write_text(
        '{"eos_token": "<|im_end|>"}'
    )
    options = {"num_tokens": 1, "temperature": 0.0, "seed": 0, "chat": True}
    with pytest.raises(ConfigError, match=r"has no chat template.*leave out --chat"):
        list(write_text(restored, "How?", **options))  # type: ignore[arg-type]
