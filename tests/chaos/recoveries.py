"""A plugin of pytest, for report.py: says of each test how long the longest recovery in it took, as
the journals below its folder tell it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moebius.cluster.job import JOURNAL, Journal, State

RECOVERY = "recovery_s"  # the property's name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Looks at the test's folder while it is there."""
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    told = {name for name, _ in item.user_properties}
    if folder is not None and RECOVERY not in told:
        found = [seconds for path in folder.rglob(JOURNAL) for seconds in recoveries(path.parent)]
        if found:
            item.user_properties.append((RECOVERY, round(max(found), 2)))
    yield


def recoveries(run_dir: Path) -> list[float]:
    """Returns how long each recovery took: from the last look at which all was well to the first
    step of the next generation.
    """
    found, is_recovering = [], False
    for entry in Journal(run_dir).entries():
        is_recovering |= entry.state is State.RECOVERING
        if entry.state is State.RUNNING and "phases_s" in entry.details:
            if is_recovering:
                found.append(sum(entry.details["phases_s"].values()))
            is_recovering = False
    return found
