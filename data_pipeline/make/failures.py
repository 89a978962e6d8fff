"""What is done about a task that failed: say so, try again, or give its unit up.

    InputError                 the user's: ends the preparation with that reason; with on_poison=
                               "quarantine" the unit is given up
    another DataError          the user's as well, and never the text's: ends the preparation
    a crash, an exception      tried three times, then the unit is given up ("auto", "quarantine")
                               or the preparation ends ("fail")
    no memory, killed          tried three times, then the preparation ends: with fewer workers it
                               may work; given up with on_poison="quarantine" only
    an error of the system,    tried three times, then the preparation ends: no text is at fault,
    a missing module           and giving up what a full disk hits would give up everything

Whatever ends the preparation, the next call goes on where it stopped.
"""

import traceback
from collections import Counter
from collections.abc import Hashable
from typing import Literal

from ..errors import DataError, InputError, PrepareError
from .pools import TaskFailedError, WorkerDiedError, WorkerKilledError

ATTEMPTS = 3
"""How often a task is tried that fails for no fault of the user's."""

OnPoison = Literal["auto", "fail", "quarantine"]
"""What is done with a unit that cannot be prepared: "auto" ends with the user's mistakes and
quarantines what crashes, the others do the one or the other always."""


class Failures:
    """Counts the failures of every task, and judges them."""

    def __init__(self, on_poison: OnPoison):
        self._on_poison = on_poison
        self._counts: Counter[Hashable] = Counter()

    def try_again(self, task: Hashable, error: BaseException) -> bool:
        """Notes that a task failed, and returns whether it is to be tried again.

        Raises:
            DataError: `error`, which is the user's.
        """
        if isinstance(error, InputError) and self._on_poison == "quarantine":
            return False
        if isinstance(error, DataError):
            raise error
        self._counts[task] += 1
        return self._counts[task] < ATTEMPTS

    def check_is_poison(self, what: str, stage: str, error: BaseException) -> None:
        """Checks that a unit is to be given up for an error that came again and again.

        Raises:
            PrepareError: it is not.
        """
        advice = _advice(error)
        if isinstance(error, (MemoryError, WorkerKilledError)) and self._on_poison == "quarantine":
            advice = None
        if advice is not None or self._on_poison == "fail":
            raise ended(what, stage, error)


def ended(what: str, stage: str, error: BaseException) -> PrepareError:
    """Returns the error that ends a preparation."""
    message = f"{what} failed {ATTEMPTS} times in stage {stage!r}: {reason(error)}"
    if (advice := _advice(error)) is not None:
        message += (
            f". No text is known to be at fault, and nothing is lost: {advice}, and run the same "
            "command again; it continues where it stopped"
        )
    result = PrepareError(message)
    result.__cause__ = error
    return result


def reason(error: BaseException) -> str:
    """Says why a task failed, in words that are the same on any machine."""
    if isinstance(error, WorkerKilledError):
        return "its process was killed each time"
    if isinstance(error, WorkerDiedError):
        return "it killed its process each time"
    if isinstance(error, (InputError, TaskFailedError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def account(error: BaseException) -> str:
    """Returns all that is known about a failure: its reason, and where it came from."""
    return "".join(traceback.format_exception(error))


def _advice(error: BaseException) -> str | None:
    """Returns what to do about a failure that no text is to blame for; None: one may be."""
    if isinstance(error, (MemoryError, WorkerKilledError)):
        return (
            "it has probably run out of memory; take fewer workers or a machine with more, or "
            "leave out what fails with on_poison='quarantine' (--on-poison quarantine)"
        )
    if isinstance(error, ImportError):
        return "install what is missing where the tasks run"
    if isinstance(error, OSError) and error.errno is not None:
        return "mend that"  # decoders raise OSErrors, too, but without a number
    return None
