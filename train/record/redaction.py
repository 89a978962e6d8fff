"""Keeps secrets out of configurations and out of any text that others may read.

Two things count as secrets: values of this process's environment variables with telling names
(AWS_SECRET_ACCESS_KEY, HF_TOKEN), and text in the form of a secret. Anything else cannot be
recognised: a password typed into a document stays.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

BLOT = "***"
MIN_CHARS = 8  # of a variable's value; shorter ones would hide ordinary words

_NAMES = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
# Variables that name a secret's place or handling hold none.
_NO_SECRETS = re.compile(
    r"(PATH|FILE|DIR|MODE|NAME|URL|PARALLELISM)$|^(SSH_|TOKENIZERS_|GPG_|PYTHON)", re.IGNORECASE
)
_FORMS = (
    (re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"), BLOT),  # scheme://user:password@host
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), BLOT),  # of AWS
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}\b"), BLOT),  # of Hugging Face
    (re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_\w{20,}\b"), BLOT),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{20,}\b"), BLOT),
    (re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}"), rf"\1{BLOT}"),
    (
        re.compile(
            r"(?i)([?&](?:[\w-]*(?:token|secret|password|signature|credential|api_?key)|sig)=)[^&\s'\"]+"
        ),
        rf"\1{BLOT}",
    ),
    (
        re.compile(
            r"(?i)(\b(?:aws_)?(?:secret_access_key|session_token|secret_key|password|api_?key)"
            r"[\"']?\s*[=:]\s*[\"']?)(?!\*\*\*)[^\s'\",;&]{4,}"
        ),
        rf"\1{BLOT}",
    ),
)
# A lower-case text without any of these matches no form: 1 µs instead of 10.
_HINTS = ("://", "akia", "asia", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_")
_HINTS += ("sk-", "bearer", "&", "?", "secret", "session_token", "password", "api_key", "apikey")


def redact(
    text: str,
    environment: Mapping[str, str] = os.environ,
    *,
    secrets: Iterable[str] | None = None,
) -> str:
    """Returns a text with its secrets replaced by `***`.

    Args:
        text: any.
        environment: whose variables may hold secrets.
        secrets: the result of `secret_values`, for repeated calls.
    """
    for value in secret_values(environment) if secrets is None else secrets:
        text = text.replace(value, BLOT)
    folded = text.casefold()
    if any(hint in folded for hint in _HINTS):
        for form, blotted in _FORMS:
            text = form.sub(blotted, text)
    return text


def redact_values(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """Returns plain values with secrets replaced in all texts, keys included."""
    if isinstance(value, str):
        return redact(value, environment)
    if isinstance(value, Mapping):
        return {
            redact(str(key), environment): redact_values(each, environment)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_values(each, environment) for each in value]
    return value


def secret_places(values: Any, where: str = "") -> Iterator[str]:
    """Yields the configuration keys whose values look like secrets."""
    if isinstance(values, Mapping):
        for key, each in values.items():
            yield from secret_places(each, f"{where}.{key}" if where else str(key))
    elif isinstance(values, list | tuple):
        for each in values:
            yield from secret_places(each, where)
    elif isinstance(values, str) and redact(values) != values:
        yield where


class RedactingFilter(logging.Filter):
    """Redacts log records; attached to a handler, it covers every library."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redacts the message, and passes every record."""
        message = record.getMessage()
        redacted = redact(message)
        if redacted != message:
            record.msg, record.args = redacted, ()
        return True


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Returns the values of variables whose names mark them as secrets, longest first."""
    values = {
        value
        for name, value in environment.items()
        if _NAMES.search(name) and not _NO_SECRETS.search(name) and len(value) >= MIN_CHARS
    }
    return sorted(values, key=len, reverse=True)
