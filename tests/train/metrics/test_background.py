"""A sink on its own thread delays and fails no step, and its losses are logged."""

import pytest
from fake_sink import FakeSink, in_background, line
from jobs import wait_for


def test_lines_come_in_order_and_the_sink_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeSink()
    sink = in_background(fake)
    for step in (1, 2, 3):
        sink.write(line(step))
    sink.close("finished", limit_s=60)
    assert (fake.opened, fake.steps, fake.closed) == ([1], [1, 2, 3], ["finished"])
    assert not caplog.text


def test_a_sink_that_fails_is_reported_once_reopened_and_gets_the_same_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "opensesame")
    fake = FakeSink()
    fake.failures = 2
    sink = in_background(fake)
    sink.write(line(1))
    wait_for(lambda: len(fake.opened) == 3)
    sink.close("finished", limit_s=60)
    assert fake.steps == [1]
    # Steps of an earlier process are hidden once; what this one wrote stays.
    assert fake.opened == [1, None, None]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "OSError: the disk is full; key ***): make room" in told[0]
    assert "it lacks 0 lines" in told[1]


@pytest.mark.parametrize(
    ("failures", "lost"), [pytest.param(3, 1, id="at first"), pytest.param(1000, 2, id="always")]
)
def test_lines_that_never_pass_are_dropped_and_counted(
    failures: int, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeSink()
    fake.failures = failures
    sink = in_background(fake)
    sink.write(line(1))
    wait_for(lambda: fake.failures <= failures - 3)
    sink.write(line(2))
    sink.close("finished", limit_s=60)
    assert fake.steps == [1, 2][lost:]
    assert f"fake lacks {lost} lines in all" in caplog.text


def test_a_sink_that_hangs_stops_nobody_and_the_oldest_lines_give_way(
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
    assert [one.step for one in fake.records] == [1, 7, 8, 9]
    assert "lacks 5 lines" in caplog.text


def test_a_run_that_ends_abandons_a_hanging_sink(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeSink()
    fake.may_write.clear()
    sink = in_background(fake)
    sink.write(line(1))
    assert fake.is_writing.wait(60)
    sink.write(line(2))
    sink.close("failed", limit_s=0.01)
    assert "fake did not close within 0.01 s" in caplog.text
    fake.may_write.set()  # or the thread would wait forever
