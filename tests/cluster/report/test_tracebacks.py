"""Tests which traceback of a log is found."""

import subprocess
import sys

from moebius.cluster.report.tracebacks import last_traceback, read_tail, summarise


def output_of(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    ).stderr


def test_plain_exception():
    text = "step 1\n" + output_of("def f():\n    raise KeyError('lost')\nf()") + "goodbye\n"
    error, where = summarise(last_traceback(text))
    assert error == "KeyError: 'lost'"
    assert where == "<string>:2"


def test_prefix_of_distributed_programs_is_removed():
    text = "".join(f"[rank3]: {line}\n" for line in output_of("raise OSError('full')").splitlines())
    assert summarise(last_traceback(text)) == ("OSError: full", "<string>:1")


def test_chained_exceptions_are_kept_and_named_by_the_last():
    program = "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('told') from e"
    found = last_traceback("noise\n" + output_of(program))
    assert "ZeroDivisionError" in found
    assert summarise(found) == ("ValueError: told", "<string>:4")


def test_an_earlier_traceback_that_was_only_logged_is_not_the_cause():
    text = (
        output_of("raise KeyError('handled')") + "went on\n" + output_of("raise OSError('fatal')")
    )
    found = last_traceback(text)
    assert "handled" not in found
    assert summarise(found)[0] == "OSError: fatal"


def test_exceptions_ignored_at_exit_do_not_hide_the_cause():
    text = (
        output_of("raise OSError('fatal')")
        + "Exception ignored in: <function __del__>\n"
        + output_of("raise KeyError(1)")
    )
    assert summarise(last_traceback(text))[0] == "OSError: fatal"


def test_tail_of_a_file(tmp_path):
    assert read_tail(tmp_path / "none", 10) == ""
    (tmp_path / "log").write_text("a" * 100 + "end")
    assert read_tail(tmp_path / "log", 5) == "aaend"


def test_the_tail_of_a_rotated_log_reaches_back(tmp_path):
    log = tmp_path / "rank0.log"
    log.write_text("789")
    (tmp_path / "rank0.log.1").write_text("x" * 50)
    (tmp_path / "rank0.log.2").write_text("0123456")
    assert read_tail(log, 4) == "6789"
    assert read_tail(log, 12) == "xx0123456789"
    assert read_tail(tmp_path / "rank1.log", 10) == ""
