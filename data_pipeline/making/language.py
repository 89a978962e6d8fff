"""The language filter: a function of the user's names each document's language, an allow-list keeps
some of them.

There is no language model in here: which one is right depends on the text, and the good ones
(fastText's lid.176, GlotLID, CLD3) bring weights with licences of their own. A hook is four lines:

    # my_languages.py, on PYTHONPATH or installed
    import fasttext
    model = fasttext.load_model("lid.176.bin")
    def language(text: str) -> str:
        return model.predict(text.replace("\\n", " "))[0][0].removeprefix("__label__")

    moebius prepare ... data.language.function=my_languages:language data.language.allow="['en']"

The hook is imported in every process that reads documents, and gets the text after normalisation.
It must be a pure function, or the prepared data depends on who has read what.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any

from ..errors import InputError
from .config import LanguageConfig

_CODE = re.compile(r"[A-Za-z0-9_-]{1,35}")  # BCP 47 needs 35


class LanguageFilter:
    """Drops documents in languages that are not allowed. One per process; made once."""

    def __init__(self, config: LanguageConfig):
        """Imports the hook.

        Raises:
            InputError: there is no such module or function.
        """
        self.config = config
        self._hook = _imported(config.function)

    def reason_to_drop(self, text: str) -> str | None:
        """Returns "language: CODE" where the language is not allowed, or None.

        Raises:
            InputError: the hook failed, or returned no language code.
        """
        where = f"data.language.function={self.config.function}"
        try:
            code = self._hook(text)
        except Exception as error:
            raise InputError(
                f"{where} raised {type(error).__name__} ({error}) on a document that begins "
                f"{text[:60]!r}: it must return a language code for every text"
            ) from error
        if not isinstance(code, str) or not _CODE.fullmatch(code):
            raise InputError(
                f"{where} returned {code!r:.100} for a document that begins {text[:60]!r}: it must "
                "return a language code such as 'en'"
            )
        return None if code in self.config.allow else f"language: {code}"


def _imported(path: str) -> Callable[[str], Any]:
    module_name, _, attributes = path.partition(":")
    where = f"data.language.function={path}"
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        advice = (
            "install it, or put its folder on PYTHONPATH"
            if error.name and f"{module_name}.".startswith(f"{error.name}.")
            else f"{module_name} imports it: install it"
        )
        raise InputError(f"{where}: there is no module {error.name!r}: {advice}") from error
    except Exception as error:
        raise InputError(
            f"{where}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for name in attributes.split("."):
        if not hasattr(found, name):
            raise InputError(f"{where}: {module_name} has no {attributes!r}: check the name")
        found = getattr(found, name)
    if not callable(found):
        raise InputError(
            f"{where}: {attributes!r} is a {type(found).__name__}, which cannot be called: name a "
            "function of a text that returns its language code"
        )
    return found
