"""Prometheus: the newest numbers as gauges, on a page of rank 0's machine that a server there scrapes.

`experts/max_violation` of the feed-forward is moebius_experts_max_violation{kind="feed_forward"};
moebius_step and moebius_time_seconds say of when the numbers are, moebius_run_info of which run.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

from ..metrics.curves import Point, points_of
from ..metrics.records import Record, RunFacts

logger = logging.getLogger(__name__)


class Prometheus:
    """Serves gauges over HTTP, from a thread of prometheus_client's."""

    def __init__(self, facts: RunFacts) -> None:
        """Begins to listen.

        Raises:
            OSError: the port is taken, or the address is not this machine's.
        """
        from prometheus_client import CollectorRegistry, Gauge, Info, start_http_server

        self._facts = facts
        self._make_gauge = Gauge
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        info = Info("moebius_run", "The run that these numbers are of", registry=self._registry)
        info.info({"run": facts.name, "run_dir": str(facts.run_dir)})
        settings = facts.settings
        self._server, self._thread = start_http_server(
            settings.prometheus_port, settings.prometheus_host, self._registry
        )
        host = settings.prometheus_host
        logger.info(
            "metrics for Prometheus: http://%s:%d/metrics",
            f"[{host}]" if ":" in host else host,
            self._server.server_port,
        )

    def write(self, records: Sequence[Record]) -> None:
        """Sets the gauges to what the newest records say."""
        for record in records:
            for point in points_of(record, depths=self._facts.expert_depths, by_depth=True):
                self._set(point)
            if record.kind in ("train", "eval"):
                self._set(Point("step", record.step, {"kind": record.kind}))
                self._set(Point("time_seconds", record.time_s, {"kind": record.kind}))

    def go_back_to(self, step: int) -> None:
        """Does nothing: the next line says where the run is."""

    def close(self, state: str) -> None:
        """Ends the page."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, point: Point) -> None:
        gauge = self._gauges.get(point.name)
        if gauge is None:
            gauge = self._make_gauge(
                gauge_name(point.name), point.name, list(point.labels), registry=self._registry
            )
            self._gauges[point.name] = gauge
        (gauge.labels(**point.labels) if point.labels else gauge).set(point.value)


def gauge_name(name: str) -> str:
    """Returns the name of a curve as Prometheus spells it: gradient/norm is moebius_gradient_norm."""
    return "moebius_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
