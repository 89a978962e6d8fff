"""Checks that every fault has a test, that outcomes are read from pytest, and that a seed fixes the plan."""

import itertools

import pytest

from tests.chaos.plan import KINDS, LEAST_S, MOST_S, make_plan
from tests.chaos.report import (
    FAILED,
    NOT_RUN,
    PASSED,
    SKIPPED,
    faults,
    marked_tests,
    read_outcomes,
    worst,
)

JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.a.test_b" name="test_one[x-1]" time="1.5"/>
<testcase classname="tests.a.test_b" name="test_one[x-2]" time="1.0"/>
<testcase classname="tests.a.test_b" name="test_two" time="0.5"><failure message="no"/></testcase>
<testcase classname="tests.a.test_b" name="test_three" time="0.0"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def test_every_fault_is_there_once_and_has_a_test():
    numbers = [f"F{number}" for number in range(1, 31)] + [f"N{number}" for number in range(1, 8)]
    assert list(faults()) == numbers
    assert [fault for fault, tests in marked_tests().items() if not tests] == []


@pytest.mark.parametrize(
    ("names", "outcome"),
    [("one", PASSED), ("one two", FAILED), ("one three", SKIPPED), ("one four", NOT_RUN)],
)
def test_a_line_is_as_good_as_its_worst_test(tmp_path, names, outcome):
    (tmp_path / "junit.xml").write_text(JUNIT)
    tests = [f"tests/a/test_b.py::test_{name}" for name in names.split()]
    assert worst(tests, read_outcomes(tmp_path / "junit.xml")) == outcome


def test_a_seed_makes_one_plan_that_sees_every_kind():
    plan = make_plan(7, 1200)
    assert plan == make_plan(7, 1200) != make_plan(8, 1200)
    assert {planned.kind for planned in plan} == set(KINDS)
    assert {planned.kind for planned in plan[: len(KINDS)]} == set(KINDS)
    pauses = [after.at_s - before.at_s for before, after in itertools.pairwise(plan)]
    assert LEAST_S - 0.1 <= min(pauses) <= max(pauses) <= MOST_S + 0.1
    assert all(0 <= planned.pick(3) < 3 for planned in plan)
