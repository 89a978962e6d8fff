"""Gauges, scraped as Prometheus would."""

import logging
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from fake_sink import facts_of, line_of_loads

from moebius.train.metrics.records import Record
from moebius.train.sinks.prometheus import Prometheus, gauge_name

pytest.importorskip("prometheus_client")


def scrape(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read().decode()


def test_the_newest_numbers_are_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sink = Prometheus(facts_of(tmp_path))
    told = re.search(r"http://127\.0\.0\.1:\d+/metrics", caplog.text)
    assert told is not None
    try:
        sink.write(
            [line_of_loads(1, 2.0), line_of_loads(2, 1.5), Record("eval", 2, 7.0, {"loss": 1.25})]
        )
        page = scrape(told[0])
    finally:
        sink.close("finished")
    for gauge in (
        "moebius_loss_train 1.5",
        "moebius_loss_validation 1.25",
        'moebius_step{kind="train"} 2.0',
        'moebius_experts_max_violation{kind="feed_forward"} 0.5',
        'moebius_experts_by_depth_max_violation{depth="2",kind="feed_forward"} 0.25',
    ):
        assert gauge in page
    assert f'run="{tmp_path.name}"' in page
    assert not sink._thread.is_alive()


def test_a_port_that_is_taken_is_an_error_that_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            Prometheus(facts_of(tmp_path, prometheus_port=port))


def test_names_are_prometheus_s() -> None:
    assert gauge_name("loss/auxiliary") == "moebius_loss_auxiliary"
