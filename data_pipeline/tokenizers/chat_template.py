"""The chat template of a tokenizer's folder: prompts and answers as the model reads a conversation.

The template (Jinja) writes a user's message and the assistant's answer around the texts, with special
tokens. What it writes up to the answer is the prompt, which is not learned.

Templates are foreign code. They run in Jinja's sandbox, in a process with bounds (`chat_process`), with
the names that transformers gives them. Only special tokens that the template writes become special: text
that spells one stays text. The date is a constant, so that the same records always give the same bytes.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..files import json_object
from ..read.token_store import token_dtype
from ..sources.files import content_of
from .fast import plain_library
from .interface import CONFIG_FILE, TOKENIZER_FILE, Tokenizer, named_token

TEMPLATE_FILE = "chat.json"
"""In a prepared folder: the template, and the special tokens that it may name."""

_JOIN = "prepare.chat_template=false joins prompts and answers without it"
_OLDEST_JINJA = (3, 1, 6)  # earlier sandboxes have known escapes
_MARK = "\ufdd0"  # a noncharacter: no text has it, and it breaks the spelling of a special token
_NAMED = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


class ChatTemplate:
    """Encodes prompts with their answers as one template writes them."""

    def __init__(
        self, saved: bytes, tokenizer: Tokenizer, *, where: str, advice: str = _JOIN
    ) -> None:
        """Reads a template, which is compiled where it is first rendered.

        Args:
            saved: the content of `TEMPLATE_FILE`.
            tokenizer: of the same folder, a tokenizer.json.
            where: the folder or file that has the template, for messages.
            advice: what to do without the template, for messages.

        Raises:
            InputError: the file is damaged, or the tokenizer is of another kind.
        """
        self._name, self._advice = f"the chat template of {where}", advice
        self._tokenizer = tokenizer
        if TOKENIZER_FILE not in tokenizer.files:
            raise InputError(f"{self._name} needs a tokenizer.json beside it; {advice}")
        self._text, self._names = _parts_of(saved, where)
        self._library = plain_library(tokenizer.files[TOKENIZER_FILE].decode("utf-8-sig"))
        self._library.encode_special_tokens = False  # the template's own are special
        self._special = {
            token.content: index
            for index, token in self._library.get_added_tokens_decoder().items()
            if token.special
        }
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._spelled = re.compile(f"({'|'.join(longest_first) or '(?!)'})")

    def encode_batch(
        self, pairs: Iterable[tuple[str, str]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the ids of each prompt and of its answer, without the end of the document.

        Raises:
            InputError: the template refuses them, or does not begin a conversation by its prompt.
        """
        said = [(("user", prompt), ("assistant", answer)) for prompt, answer in pairs]
        texts = self._render([part for both in said for part in (both[:1], both)])
        for begun, whole in zip(texts[::2], texts[1::2], strict=True):
            if not whole.startswith(begun):
                raise InputError(
                    f"{self._name} writes a prompt differently when its answer follows, so the "
                    f"answer cannot be told apart; {self._advice}"
                )
            # the document's own end follows
            ended = whole[len(begun) :].rstrip().removesuffix(self._tokenizer.end_of_document)
            yield self._ids(begun), self._ids(ended)

    def begin(self, prompt: str, turns: Iterable[Sequence[str]] = ()) -> np.ndarray:
        """Returns the ids of a conversation that an answer to a prompt continues.

        Before it come `turns`, prompts with their answers.

        Raises:
            InputError: the template refuses it.
        """
        said = [part for turn in turns for part in zip(("user", "assistant"), turn, strict=True)]
        return self._ids(*self._render([[*said, ("user", prompt)]]))

    def _render(self, conversations: Iterable[Sequence[tuple[str, str]]]) -> list[str]:
        """Renders conversations; one that ends with the user's words is continued by the assistant's."""
        contexts = [
            self._names
            | {
                "add_generation_prompt": said[-1][0] == "user",
                "messages": [{"role": role, "content": self._marked(text)} for role, text in said],
            }
            for said in conversations
        ]
        try:
            return _rendered(self._text, contexts)
        except ValueError as error:
            raise InputError(f"{self._name} {error}; {self._advice}") from None

    def _marked(self, text: str) -> str:
        """Breaks the spelling of special tokens in a text."""
        return self._spelled.sub(lambda found: found[0][0] + _MARK + found[0][1:], text)

    def _ids(self, text: str) -> np.ndarray:
        dtype = token_dtype(self._tokenizer.vocab_size)
        if _MARK not in text:
            return np.array(self._library.encode(text, add_special_tokens=False).ids, dtype=dtype)
        parts = [np.array([], dtype=dtype)]
        for number, words in enumerate(self._spelled.split(text)):
            if number % 2:
                parts.append(np.array([self._special[words]], dtype=dtype))
            elif words:
                parts += self._tokenizer.encode_batch([words.replace(_MARK, "")])
        return np.concatenate(parts)


# Rendering ---------------------------------------------------------------------------------------


def _rendered(template: str, contexts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what a template writes in each context, in a process that bounds it (`chat_process`).

    Raises:
        ValueError: it cannot be compiled or rendered.
    """
    _require_jinja()
    script = Path(__file__).with_name("chat_process.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script)],  # -P: its folder holds no modules for it
        input=json.dumps([template, contexts]).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C reaches this process alone, which then ends it
    )
    if done.returncode:
        why = "takes too much time" if done.returncode == -signal.SIGPROF else "ends its process"
        raise ValueError(f"cannot be rendered (it {why})")
    said = json.loads(done.stdout)
    if "error" in said:
        raise ValueError(said["error"])
    return said["texts"]


def _require_jinja() -> None:
    try:
        version = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        raise InputError("chat templates need Jinja: pip install 'moebius[chat]'") from None
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _OLDEST_JINJA:
        raise InputError(
            f"chat templates need Jinja 3.1.6 or newer, not {version}, whose sandbox can be escaped: "
            "pip install -U 'moebius[chat]'"
        )


# Files -------------------------------------------------------------------------------------------


def template_of_files(template: bytes | None, config: bytes | None) -> bytes | None:
    """Returns the content of `TEMPLATE_FILE`; None if a tokenizer's folder has no template.

    Args:
        template: chat_template.jinja, which wins.
        config: tokenizer_config.json.

    Raises:
        ValueError: one of them is damaged.
    """
    values = json_object(config or b"{}", CONFIG_FILE)
    text = values.get("chat_template") if template is None else template.decode()
    if isinstance(text, list):  # several, by name
        named = [each for each in text if isinstance(each, dict) and each.get("name") == "default"]
        text = named[0].get("template") if named else None
    if not text:
        return None
    if not isinstance(text, str):
        raise ValueError(f"{CONFIG_FILE}: chat_template is {text!r:.60}, not a template")
    keys = [f"{kind}_token" for kind in _NAMED]
    names = {key: token for key in keys if (token := named_token(values, key))}
    return json.dumps({"template": text, "names": names}).encode()


def _parts_of(saved: bytes, where: str) -> tuple[str, dict[str, str]]:
    """Returns the template and the names of tokens in a `TEMPLATE_FILE`."""
    try:
        values = json_object(saved, TEMPLATE_FILE)
        text, names = values["template"], values["names"]
        if not isinstance(text, str) or not all(isinstance(each, str) for each in names.values()):
            raise TypeError("its parts are no texts")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{where}: {TEMPLATE_FILE} is damaged ({error}): restore it") from None
    return text, names


@lru_cache(maxsize=1)
def chat_of(directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the chat template of a prepared folder, which its tokenizer encodes; None without one."""
    saved = content_of(str(directory / TEMPLATE_FILE))
    return None if saved is None else ChatTemplate(saved, tokenizer, where=str(directory))
