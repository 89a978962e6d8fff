"""Asking a model through its run's chat template, and texts that spell special tokens without one."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from chat_folder import folder_of

from moebius.cli.models import evaluate
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.tokenizers.hub import open_tokenizer
from moebius.evaluation import text as texts
from moebius.evaluation.restore import Restored
from moebius.evaluation.text import Conversation, write_text
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


def test_a_run_without_a_template_says_so(restored: Restored) -> None:
    options = {"num_tokens": 1, "temperature": 0.0, "seed": 0, "chat": True}
    prepare = restored.config.prepare.model_copy(update={"chat_template": False})
    off = replace(restored, config=restored.config.model_copy(update={"prepare": prepare}))
    with pytest.raises(ConfigError, match=r"chat_template=false has turned it off.*leave out --ch"):
        list(write_text(off, "How?", **options))  # type: ignore[arg-type]
    without_template(restored)
    with pytest.raises(ConfigError, match=r"has no chat template.*leave out --chat"):
        list(write_text(restored, "How?", **options))  # type: ignore[arg-type]
    assert Conversation(off).template is Conversation(restored).template is None


def without_template(restored: Restored) -> None:
    file = restored.checkpoint / "source" / "tokenizer_config.json"
    file.write_text('{"eos_token": "<|im_end|>"}')


@pytest.fixture
def chat(restored: Restored, asked: object, monkeypatch: pytest.MonkeyPatch, moebius: Any) -> Any:
    """Returns a function that pipes lines into `moebius chat`."""
    monkeypatch.setattr(evaluate, "_restored", lambda options: restored)

    def pipe(lines: str) -> Any:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return moebius("chat", restored.checkpoint)

    return pipe


def test_each_line_of_a_pipe_is_answered(chat: Any, restored: Restored, monkeypatch: Any) -> None:
    answer = chat("How?\n\n/reset\nWhy?\n/exit\nWho?\n")
    assert (answer.code, answer.out, answer.err) == (0, "Fine\nFine\n", "")
    answer = chat("x" * 999 + "\nHow?")
    assert (answer.code, answer.out) == (2, "Fine\n")
    assert f"but the context {restored.config.data.seq_len}: write a shorter one" in answer.err
    without_template(restored)
    answer = chat("How?\n")
    assert answer.out == "Fine\n"
    assert "has no chat template: the model continues" in answer.err
    clears = open_tokenizer(str(restored.checkpoint / "source")).encode_batch(["\x1b[2J"])[0]
    monkeypatch.setattr(texts, "generate", lambda *given, **options: clears.tolist())
    assert chat("How?\n").out == "\x1b[2J\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert chat("How?\n").out == "\\x1b[2J\n"
    interrupted = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(texts, "generate", interrupted)
    assert (chat("How?\nWhy?\n").code, interrupted.call_count) == (130, 1)


def test_a_prompt_is_seen_after_the_earlier_turns_that_the_context_holds(
    restored: Restored, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(restored)
    tokenizer, context = conversation._tokenizer, restored.config.data.seq_len
    seen: list[str] = []

    def generate(model: object, prompt_S: torch.Tensor, **options: Any) -> Iterator[int]:
        assert len(prompt_S) + options["num_tokens"] <= context
        seen.append(tokenizer.decode(prompt_S.tolist()))
        yield from tokenizer.encode_batch([f"Answer {len(seen)}"])[0].tolist()
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(texts, "generate", generate)
    options = {"num_tokens": 20, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    list(conversation.answer("First <|im_end|>", **options))
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C
        list(conversation.answer("Second", **options))
    asked = "user\nFirst <|im_end|>\nassistant\nAnswer 1\nuser\nSecond\nassistant\n"
    assert seen[1] == asked  # without special tokens
    list(conversation.answer("x" * 150, **options))
    assert "First" not in seen[2]
    assert "user\nSecond\nassistant\nAnswer 2\nuser\nxxx" in seen[2]
    conversation.template = None
    list(conversation.answer("Last", **(options | {"num_tokens": context})))
    assert seen[3] == "Last", "half of the context is free"
    list(conversation.answer("Next", **options))
    assert seen[4] == "LastAnswer 4\nNext"
