"""Skips what needs machines of its own where there can be none, and says why."""

from collections.abc import Iterator

import pytest

from tests.network.nodes import Network, network, why_not


@pytest.fixture(scope="session")
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def three(namespaces: None) -> Iterator[Network]:
    """Three machines on a switch."""
    with network(3, seed=7) as machines:
        yield machines


@pytest.fixture
def net(three: Network) -> Network:
    """The three machines, with undisturbed wires whose counters are at 0."""
    three.reset()
    return three
