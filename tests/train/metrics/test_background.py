"""A sink on a thread of its own: no step waits for it, no step fails of it, and what it lacks is
told.
"""

import pytest
from fake_sink import FakeSink, in_background, line, wait_until


def test_lines_come_in_order_and_the_sink_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeSink()
    sink = in_background(fake)
    for step in (1, 2):
        sink.write(line(step))
    sink.go_back_to(1)
    sink.write(line(2))
    sink.close("finished", limit_s=60)
    assert (fake.opened, fake.steps, fake.closed) == ([1], [1, 2, -1, 2], ["finished"])
    assert "expert_load" not in fake.records[0].values
    assert not caplog.text


def test_a_sink_that_fails_is_told_of_once_opened_anew_and_gets_the_same_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "opensesame")
    fake = FakeSink()
    fake.failures = 2
    sink = in_background(fake)
    sink.write(line(1))
    wait_until(lambda: len(fake.opened) == 3)
    sink.close("finished", limit_s=60)
    assert fake.steps == [1]
    # an earlier process is forgotten once; what this one has written stays
    assert fake.opened == [1, None, None]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "fake cannot be written (OSError: the disk is full; key ***): make room" in told[0]
    assert "fake is written again; it lacks 0 lines" in told[1]


def test_lines_that_never_pass_are_given_up_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeSink()
    fake.failures = 3
    sink = in_background(fake)
    sink.write(line(1))
    wait_until(lambda: not fake.failures)
    sink.write(line(2))
    sink.close("finished", limit_s=60)
    assert fake.steps == [2]
    assert "it lacks 1 lines" in caplog.text


def test_a_sink_that_hangs_holds_up_nobody_and_the_oldest_lines_give_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeSink()
    fake.may_write.clear()
    sink = in_background(fake, capacity=3)
    sink.write(line(1))
    assert fake.is_writing.wait(60)
    for step in range(2, 10):
        sink.write(line(step))
    fake.may_write.set()
    sink.close("stopped", limit_s=60)
    assert fake.steps == [1, 7, 8, 9]
    assert "fake takes lines more slowly than they come, and lacks 5" in caplog.text


def test_a_run_that_ends_leaves_a_hanging_sink_behind(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeSink()
    fake.may_write.clear()
    sink = in_background(fake)
    sink.write(line(1))
    assert fake.is_writing.wait(60)
    sink.write(line(2))
    sink.close("failed", limit_s=0.01)
    assert "fake did not end within 0.01 s" in caplog.text
    fake.may_write.set()  # or the thread would wait for ever


def test_what_fails_at_the_end_is_not_tried_for_long(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeSink()
    fake.failures = 1000
    sink = in_background(fake)
    sink.write(line(1))
    sink.close("finished", limit_s=60)
    assert not fake.steps
    assert "fake lacks 1 lines in all, of these the last 1" in caplog.text
