"""The language filter: a function of the user's names each document's language, an allow-list keeps
some of them.

There is no language model in here: which one is right depends on the text, and the good ones
(fastText's lid.176, GlotLID, CLD3) bring weights with licences of their own. A hook is four lines:

    # my_languages.py, on PYTHONPATH or installed
    import fasttext
    model = fasttext.load_model("lid.176.bin")
    def language(text: str) -> str:
        return model.predict(text.replace("\\n", " "))[0][0].removeprefix("__label__")

    moebius prepare ... prepare.language.function=my_languages:language prepare.language.allow="['en']"

The hook is imported in every process that reads documents, and gets the text after normalisation.
It must be a pure function, or the prepared data depends on who has read what.
"""

import re

from ..callables import import_function
from ..errors import InputError
from ..prepare_config import LanguageConfig

_CODE = re.compile(r"[A-Za-z0-9_-]{1,35}")  # BCP 47 needs 35


class LanguageFilter:
    """Drops documents in languages that are not allowed. One per process; made once."""

    def __init__(self, config: LanguageConfig):
        """Imports the hook.

        Raises:
            InputError: there is no such module or function.
        """
        self.config = config
        self._hook = import_function(
            config.function,
            where=f"prepare.language.function={config.function}",
            purpose="a function of a text that returns its language code",
        )

    def reason_to_drop(self, text: str) -> str | None:
        """Returns "language: CODE" where the language is not allowed, or None.

        Raises:
            InputError: the hook failed, or returned no language code.
        """
        where = f"prepare.language.function={self.config.function}"
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
