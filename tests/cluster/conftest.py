"""Provides the simulated cluster that the tests of one file share."""

from collections.abc import Iterator

import pytest

from moebius.cluster.places.simulated import SimulatedCluster, simulated_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    """Starts two simulated nodes with 4 CPUs each, to which this process is connected."""
    pytest.importorskip("ray")
    with simulated_cluster(2, cpus_per_node=4) as running:
        yield running
