"""The simulated cluster that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from moebius.cluster.places.simulated import SimulatedCluster, simulated_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[SimulatedCluster]:
    """Two pretended nodes with 4 CPUs each; this process is connected."""
    pytest.importorskip("ray")
    with simulated_cluster(2, cpus_per_node=4) as running:
        yield running
