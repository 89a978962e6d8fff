"""Tests which traceback of a log is found."""

import traceback

import pytest

from moebius.cluster.report.tracebacks import last_traceback, read_tail, summarise


def output_of(program: str) -> str:
    """Returns what Python prints about the exception that ends a program."""
    try:
        exec(compile(program, "program.py", "exec"), {})
    except Exception as error:  # noqa: BLE001
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return traceback.format_exc()
    raise AssertionError("it did not fail")


PLAIN = output_of("def f():\n    raise KeyError('lost')\nf()")
FATAL = output_of("raise OSError('fatal')")
CHAINED = output_of(
    "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('told') from e"
)


@pytest.mark.parametrize(
    ("log", "error", "where"),
    [
        (f"step 1\n{PLAIN}goodbye\n", "KeyError: 'lost'", "program.py:2"),
        # torch's prefix for distributed programs
        (
            "".join(f"[rank3]: {line}\n" for line in FATAL.splitlines()),
            "OSError: fatal",
            "program.py:1",
        ),
        (f"noise\n{CHAINED}", "ValueError: told", "program.py:4"),
        (f"{PLAIN}went on\n{FATAL}", "OSError: fatal", "program.py:1"),
        (
            f"{FATAL}Exception ignored in: <function __del__>\n{PLAIN}",
            "OSError: fatal",
            "program.py:1",
        ),
        ("one\ntwo\n", "two", None),
    ],
)
def test_the_exception_that_ended_a_program(log, error, where):
    assert summarise(last_traceback(log)) == (error, where)


def test_chained_exceptions_are_kept_and_earlier_ones_are_not():
    found = last_traceback(f"{PLAIN}went on\n{CHAINED}")
    assert "ZeroDivisionError" in found
    assert "KeyError" not in found


def test_the_tail_of_a_log(tmp_path):
    log = tmp_path / "rank0.log"
    log.write_text("0123456")
    assert read_tail(log, 4) == "3456"
    assert read_tail(log, 12) == "0123456"
    assert read_tail(tmp_path / "rank1.log", 10) == ""
