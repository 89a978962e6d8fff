"""The simulated cluster that tests of one module share."""

from collections.abc import Iterator

import pytest

from moebius.cluster.simulated import SimulatedCluster, simulated_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    """Two pretended nodes with 4 CPUs each; this process is connected."""
    pytest.importorskip("ray")
    with simulated_cluster(2, cpus_per_node=4) as running:
        yield running
