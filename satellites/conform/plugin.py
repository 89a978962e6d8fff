"""The pytest plugin with the fixture `conform`.

    # conftest.py
    pytest_plugins = ["moebius_conform.plugin"]

    # test_layer.py
    def test_my_layer_conforms(conform):
        conform(build)  # a function of this file, or of a module; or a Layer; or "FILE.py:NAME"

It is not an entry point, because pytest would then load it in every run of every user.
"""

from collections.abc import Callable

import pytest

from .report import Report
from .run import LIMIT_S, RANKS, assert_conforms


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --conform-ranks and --conform-limit."""
    group = parser.getgroup("conform", "expert-parallel layers against one rank")
    group.addoption("--conform-ranks", default=",".join(map(str, RANKS)), metavar="1,2,4")
    group.addoption("--conform-limit", type=float, default=LIMIT_S, metavar="SECONDS")


@pytest.fixture
def conform(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Asserts that a layer behaves as on one rank; settings as for `moebius_conform.check`."""
    listed = str(request.config.getoption("--conform-ranks"))
    ranks = tuple(int(part) for part in listed.split(","))
    settings = {"ranks": ranks, "limit_s": request.config.getoption("--conform-limit")}

    def assert_it(subject: object, **more: object) -> Report:
        return assert_conforms(subject, **settings | more)  # type: ignore[arg-type]

    return assert_it
