"""Which errors of a rank no restart can fix."""

import pytest

from moebius.data_pipeline.errors import DataError, ShardError
from moebius.distributed.process.process import DeviceError
from moebius.train import __main__ as program
from moebius.train.config.errors import EXIT_MISTAKE, no_restart_mends
from moebius.train.config.run_config import ConfigError


def raised_from(error: Exception, origin: Exception) -> Exception:
    error.__cause__ = origin
    return error


@pytest.mark.parametrize(
    "error", [ConfigError("x"), DataError("x"), ShardError("x"), DeviceError("x")]
)
def test_our_own_errors_are_mistakes(error):
    assert no_restart_mends(error)


@pytest.mark.parametrize(
    "error",
    [
        ArithmeticError("bad batch"),
        RuntimeError("connection reset by peer"),
        ValueError("100 steps in a row were skipped"),
        raised_from(DataError("cannot be read"), OSError(5, "Input/output error")),
    ],
)
def test_what_may_pass_is_none(error):
    assert not no_restart_mends(error)


def test_data_that_is_not_there_is_one():
    assert no_restart_mends(raised_from(DataError("cannot be read"), FileNotFoundError(2, "x")))


def test_a_rank_says_so_with_its_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train", str(tmp_path)])
    (tmp_path / "config.json").write_text('{"train": {"stepz": 3}}')
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == EXIT_MISTAKE
    assert "train.stepz: unknown key; did you mean train.steps?" in capsys.readouterr().err
    monkeypatch.setattr(program, "train", lambda *_, **_given: 1 / 0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ZeroDivisionError):
        program.main()
