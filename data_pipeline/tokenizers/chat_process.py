"""Renders a chat template in a process of its own, which answers one request, in JSON.

A template is a program that somebody else wrote. Jinja's sandbox keeps it away from Python, and the
system keeps it within bounds: no in-process check stops `'a' * 10**9`, a doubling string and a loop in a
loop alike. Too much processor time ends this process; too much memory raises MemoryError here.

`chat_template` runs this file as a script, which imports only Jinja and starts in 0.1 s.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
import jinja2.debug  # Jinja imports it where an error is raised, when there may be no memory left
import jinja2.ext
import jinja2.sandbox

# what a request may take, and what more for every byte of it
_CPU_S, _CPU_S_PER_BYTE = 2, 5e-7
_MEMORY_BYTES, _MEMORY_PER_BYTE = 2**29, 16
_CHARS, _CHARS_PER_BYTE = 2**17, 8
_DATE = datetime(2025, 1, 1)


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def answer(request: bytes) -> dict[str, Any]:
    """Renders a template with each context of a request; returns the texts, or what went wrong."""
    template, contexts = json.loads(request)
    what = "cannot be compiled"
    try:
        compiled = _compiled(template)
        what = "cannot be rendered"
        return {"texts": [_rendered(compiled, context, len(request)) for context in contexts]}
    except Exception as error:  # noqa: BLE001 (a template may raise anything)
        reason = ": ".join(filter(None, (type(error).__name__, f"{error!s:.500}")))
        shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in reason)
        return {"error": f"{what} ({shown})"}


def _rendered(template: jinja2.Template, context: dict[str, Any], num_bytes: int) -> str:
    pieces, left = [], _CHARS + _CHARS_PER_BYTE * num_bytes
    for piece in template.generate(context):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise jinja2.TemplateError("it writes far more than the texts that it is given")
    return "".join(pieces)


def _compiled(text: str) -> jinja2.Template:
    """Compiles a template in a sandbox, with what transformers offers to templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _DATE.strftime,
        "namespace": _namespace,
        "dict": lambda *items, **values: dict(*items, **values),
    }
    return environment.from_string(text)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Namespace(jinja2.utils.Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.TemplateError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _namespace(*items: Any, **values: Any) -> Any:
    """Returns a namespace that takes no names of Python's own."""
    if any(name.startswith("_") for name in dict(*items, **values)):
        raise jinja2.TemplateError("a template may not set names that begin with _")
    return _Namespace(*items, **values)


def _as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _serve() -> None:
    """Answers the request of the other end of the pipe, within its bounds."""
    sys.set_int_max_str_digits(0)  # the time is bounded
    request = sys.stdin.buffer.read()
    # its signal ends the process, also inside of C
    signal.setitimer(signal.ITIMER_PROF, _CPU_S + _CPU_S_PER_BYTE * len(request))
    with suppress(ValueError, OSError):  # a lower limit is set, or macOS, which takes none
        memory = _MEMORY_BYTES + _MEMORY_PER_BYTE * len(request)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sys.stdout.write(json.dumps(answer(request)))


if __name__ == "__main__":
    _serve()
