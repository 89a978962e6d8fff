"""The chat template of a tokenizer's folder: prompts and answers as the model reads a conversation.

The template (Jinja) writes a user's message and the assistant's answer around the texts, with special
tokens. What it writes up to the answer is the prompt, which is not learned.

Templates are foreign code. They run in Jinja's sandbox with the names that transformers gives them. Only
special tokens that the template writes become special: text that spells one stays text. The date is a
constant, so that the same records always give the same bytes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..read.token_store import token_dtype
from .fast import plain_library
from .interface import TOKENIZER_FILE, Tokenizer

TEMPLATE_FILE = "chat.json"
"""In a prepared folder: the template, and the special tokens that it may name."""

_DATE = datetime(2025, 1, 1)
_OLDEST_JINJA = (3, 1, 6)  # earlier sandboxes have known escapes
_MARK = "\ufdd0"  # a noncharacter: no text has it, and it breaks the spelling of a special token
_NAMES = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


class ChatTemplate:
    """Encodes prompts with their answers as one template writes them."""

    def __init__(self, text: str, names: Mapping[str, str], tokenizer: Tokenizer) -> None:
        """Compiles a template.

        Args:
            text: the template.
            names: special tokens by the template's names for them, such as `bos_token`.
            tokenizer: of the same folder, a tokenizer.json.

        Raises:
            InputError: the template or Jinja cannot be used, or the tokenizer is of another kind.
        """
        if TOKENIZER_FILE not in tokenizer.files:
            raise InputError(
                "a chat template needs a tokenizer.json beside it; prepare.chat_template=false joins "
                "prompts and answers without it"
            )
        self._names, self._tokenizer = dict(names), tokenizer
        self._template = _compiled(text)
        self._library = plain_library(tokenizer.files[TOKENIZER_FILE].decode("utf-8-sig"))
        self._library.encode_special_tokens = False  # the template's own are special
        self._special = {
            token.content: index
            for index, token in self._library.get_added_tokens_decoder().items()
            if token.special
        }
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._spelled = re.compile("|".join(longest_first) or r"(?!)")

    def encode(self, prompt: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a prompt and of its answer, without the end of the document.

        Raises:
            InputError: the template refuses them, or does not begin a conversation by its prompt.
        """
        begun = self._render([("user", prompt)], add_generation_prompt=True)
        whole = self._render([("user", prompt), ("assistant", answer)])
        if not whole.startswith(begun):
            raise InputError(
                "the chat template writes a prompt differently when its answer follows, so the answer "
                "cannot be told apart; prepare.chat_template=false joins them without it"
            )
        # the document's own end follows
        ended = whole[len(begun) :].rstrip().removesuffix(self._tokenizer.end_of_document)
        return self._ids(begun), self._ids(ended)

    def _render(self, messages: Sequence[tuple[str, str]], **options: bool) -> str:
        said = [{"role": role, "content": self._marked(text)} for role, text in messages]
        try:
            return self._template.render(
                self._names | {"add_generation_prompt": False, "messages": said} | options
            )
        except Exception as error:  # a template may raise anything
            raise InputError(
                f"the chat template raised {type(error).__name__}: {error}; prepare.chat_template=false "
                "joins prompts and answers without it"
            ) from error

    def _marked(self, text: str) -> str:
        """Breaks the spelling of special tokens in a text."""
        return self._spelled.sub(lambda found: found[0][0] + _MARK + found[0][1:], text)

    def _ids(self, text: str) -> np.ndarray:
        dtype = token_dtype(self._tokenizer.vocab_size)
        if _MARK not in text:
            return np.array(self._library.encode(text, add_special_tokens=False).ids, dtype=dtype)
        parts = [np.array([], dtype=dtype)]
        for words, token in _split(self._spelled, text):
            parts += self._tokenizer.encode_batch([words.replace(_MARK, "")]) if words else []
            parts += [np.array([self._special[token]], dtype=dtype)] if token else []
        return np.concatenate(parts)


def _split(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, str]]:
    """Yields what stands in front of each match and the match; at the end, the rest and ""."""
    start = 0
    for found in pattern.finditer(text):
        yield text[start : found.start()], found[0]
        start = found.end()
    yield text[start:], ""


def _compiled(text: str) -> Any:
    """Compiles a template in a sandbox, with what transformers offers to templates."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise InputError("chat templates need Jinja: pip install 'moebius[chat]'") from None
    version = tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3]))
    if version < _OLDEST_JINJA:
        raise InputError(
            f"chat templates need Jinja 3.1.6 or newer, not {jinja2.__version__}, whose sandbox can be "
            "escaped: pip install -U 'moebius[chat]'"
        )

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": _DATE.strftime,
        "namespace": _Namespace,
        "dict": lambda *items, **values: dict(*items, **values),
    }
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise InputError(f"the chat template cannot be compiled: {error}") from error


def _Namespace(*items: Any, **values: Any) -> Any:
    """Returns a namespace that takes no names of Python's own."""
    import jinja2.utils

    class Namespace(jinja2.utils.Namespace):
        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.TemplateError(f"a template may not set {name!r}")
            super().__setitem__(name, value)

    if any(name.startswith("_") for name in dict(*items, **values)):
        raise jinja2.TemplateError("a template may not set names that begin with _")
    return Namespace(*items, **values)


def _as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


# Files -------------------------------------------------------------------------------------------


def template_of_files(template: bytes | None, config: bytes | None) -> bytes | None:
    """Returns the content of `TEMPLATE_FILE`; None if a tokenizer's folder has no template.

    Args:
        template: chat_template.jinja, which wins.
        config: tokenizer_config.json.
    """
    values = json.loads(config or b"{}")
    text = values.get("chat_template") if template is None else template.decode()
    if isinstance(text, list):  # several, by name
        text = next((each["template"] for each in text if each.get("name") == "default"), None)
    if not text:
        return None
    names = {}
    for name in _NAMES:
        token = values.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        names |= {name: token} if isinstance(token, str) else {}
    return json.dumps({"template": text, "names": names}).encode()


@lru_cache(maxsize=1)
def chat_of(directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the chat template of a prepared folder, which its tokenizer encodes; None without one."""
    path = directory / TEMPLATE_FILE
    if not path.exists():
        return None
    saved = json.loads(path.read_bytes())
    return ChatTemplate(saved["template"], saved["names"], tokenizer)
