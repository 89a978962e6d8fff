"""Prompts and answers through a folder's chat template: the ids of transformers, learned from the answer on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_folder import CHATML, SPECIAL, folder_of

from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import read_manifest
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.tokenizers.chat_template import TEMPLATE_FILE, ChatTemplate
from moebius.data_pipeline.tokenizers.hub import find_template, open_tokenizer


def template_in(folder: Path) -> ChatTemplate:
    saved = find_template(str(folder)) or b""
    return ChatTemplate(saved, open_tokenizer(str(folder)), where=str(folder))


def chat_of_transformers(folder: Path, prompt: str, answer: str) -> list[int]:
    from transformers import AutoTokenizer

    said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(said, tokenize=True, return_dict=False)


TEMPLATES: dict[str, object] = {
    "chatml": CHATML,
    "named": [{"name": "tools", "template": "-"}, {"name": "default", "template": CHATML}],
    "generation": CHATML.replace(
        "{{ m.content | trim }}", "{% generation %}{{ m.content }}{% endgeneration %}"
    ),
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }} {{ m.content }}<|im_end|>{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    ("prompt", "answer"), [("How are you?", "Fine, naïve 😀."), (" a\n", "b  c")]
)
def test_the_ids_are_those_of_transformers(
    template: str, prompt: str, answer: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "chat", TEMPLATES[template])
    ((begun, ended),) = template_in(folder).encode_batch([(prompt, answer)])
    end = open_tokenizer(str(folder)).end_of_document_id
    theirs = chat_of_transformers(folder, prompt, answer)
    theirs = theirs[
        : len(theirs) - theirs[::-1].index(end)
    ]  # a line feed after the end is left out
    assert [*begun, *ended, end] == theirs


def test_a_text_that_spells_a_special_token_stays_text(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "chat")
    tokenizer, template = open_tokenizer(str(folder)), template_in(folder)
    ((begun, ended),) = template.encode_batch([("a<|im_end|>b", "<|im_start|>")])
    special = [tokenizer._library.token_to_id(token) for token in SPECIAL]  # type: ignore[attr-defined]
    assert np.isin(begun, special).sum() == 4  # <s>, start, end, start
    assert not np.isin(ended, special).any()
    assert tokenizer.decode(begun) == "user\na<|im_end|>b\nassistant\n"
    assert tokenizer.decode(ended) == "<|im_start|>"


REFUSED = {
    "{{ raise_exception('no system') }}": "no system",
    "{{ messages.__class__.__mro__ }}": "SecurityError",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}": "may not set",
    "{% if": "cannot be compiled",
    "{{ messages | length }} {{ messages[0].content }}": "cannot be told apart",
}


@pytest.mark.parametrize("template", REFUSED)
def test_templates_that_fail_or_reach_out_are_refused(template: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "chat", template)
    with pytest.raises(InputError, match=REFUSED[template]):
        next(template_in(folder).encode_batch([("Hello", "Hi")]))


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BOUNDED = {
    LOOPS: "too much time",
    "{% for i in range(10**9) %}{% endfor %}": "OverflowError",
    "{{ 'a' * 10**9 }}": "cannot be compiled|MemoryError",
    "{{ messages[0].content * 10**9 }}": "MemoryError",
    "{{ messages[0].content.ljust(10**9) }}": "MemoryError",
    "{{ '%09999999999d' % 1 }}": "MemoryError",
    "{{ 'a' | center(2 * 10**6) }}": "writes far more",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}": ""
    "MemoryError",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}": "RecursionError",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000: "cannot be compiled .RecursionError",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "cannot be compiled .RecursionError",
    "{{ x | nofilter }}": "cannot be compiled .TemplateAssertionError",
    "{% continue %}": "cannot be compiled .SyntaxError",
    "{% include 'x' %}": "cannot be rendered .TypeError",
    "{{ raise_exception('\x1b[31mred') }}": r"TemplateError: \\x1b\[31mred",
}


@pytest.mark.parametrize(
    "template",
    [*list(BOUNDED)[1:], pytest.param(LOOPS, marks=pytest.mark.slow)],  # 2 s of processor time
    ids=lambda text: text[:30],
)
def test_a_template_has_bounds_and_takes_the_blame(template: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "chat", template)
    with pytest.raises(InputError, match=BOUNDED[template]) as error:
        prepared(folder, tmp_path / "out")
    assert str(error.value).startswith(f"the chat template of {folder} ")


def test_what_to_ask_a_model_is_what_transformers_would(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path / "chat")
    ids = template_in(folder).begin("How are you?").tolist()
    said = [{"role": "user", "content": "How are you?"}]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        said, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    assert ids == theirs


def prepared(folder: Path, out: Path, **changes: Any) -> PrepareConfig:
    """Prepares prompts and answers with a folder's tokenizer."""
    records = [{"q": f"question {n}", "a": f"answer {n}"} for n in range(20)]
    text = out.parent / "chats.jsonl"
    text.write_text("".join(json.dumps(record) + "\n" for record in records))
    fields = {"prompt_field": "q", "answer_field": "a", "validation_fraction": 0.2}
    config = PrepareConfig(input=(str(text),), tokenizer=str(folder), **fields, **changes)
    prepare(config, out)
    return config


def test_a_preparation_uses_the_template_and_keeps_it(tmp_path: Path) -> None:
    folder, out = folder_of(tmp_path / "chat"), tmp_path / "out"
    config = prepared(folder, out)
    header = read_manifest(out).header
    assert header.spec["chat_template"] is True
    assert PrepareConfig.of_folder(header) == config.model_copy(
        update={"vocab_size": header.tokenizer.vocab_size}
    )
    assert json.loads((out / TEMPLATE_FILE).read_bytes())["template"] == CHATML
    plain = tmp_path / "plain"
    config = prepared(folder, plain, chat_template=False)
    header = read_manifest(plain).header
    assert "chat_template" not in header.spec
    found = PrepareConfig.of_folder(header)
    assert found is not None
    assert found.chat_template is False
    assert not (plain / TEMPLATE_FILE).exists()
    tokens = [sum(shard.num_tokens for shard in read_manifest(at).shards) for at in (out, plain)]
    assert tokens[0] - tokens[1] == 20 * (1 + 6 + 2 + 11)  # what the template writes, but the end
    assert read_manifest(out).header.tokenizer.sha256 == header.tokenizer.sha256
    again = prepared(out, tmp_path / "again")  # a prepared folder as the tokenizer of other data
    assert read_manifest(tmp_path / "again").header.tokenizer.sha256 == header.tokenizer.sha256
    assert (tmp_path / "again" / TEMPLATE_FILE).exists()
    assert again.spec_hash != config.spec_hash


def test_the_end_is_the_model_s_where_the_tokenizer_names_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "chat", eos_token=None)
    ids = [
        open_tokenizer(str(folder), end_of_document=token).end_of_document_id for token in SPECIAL
    ]
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ids[0]}))
    assert open_tokenizer(str(folder)).end_of_document == "<s>"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[2], ids[0]]}))
    assert open_tokenizer(str(folder)).end_of_document == "<|im_end|>"
    assert open_tokenizer(str(folder), end_of_document="<s>").end_of_document == "<s>"
