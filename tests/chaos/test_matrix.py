"""Checks that the matrix names existing tests, that a seed fixes the plan, and that outcomes are read from pytest."""

import ast
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.matrix import MATRIX, NETWORK
from tests.chaos.plan import KINDS, LEAST_S, MOST_S, make_plan
from tests.chaos.report import (
    FAILED,
    LINES,
    NOT_RUN,
    PASSED,
    SKIPPED,
    UNTESTED,
    judge,
    read_outcomes,
)

ROOT = Path(__file__).resolve().parents[2]
JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.a.test_b" name="test_one[x-1]" time="1.5"/>
<testcase classname="tests.a.test_b" name="test_one[x-2]" time="1.0"/>
<testcase classname="tests.a.test_b" name="test_two" time="0.5"><failure message="no"/></testcase>
<testcase classname="tests.a.test_b" name="test_three" time="0.0"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def test_every_fault_is_there_once_and_has_a_test_or_a_reason():
    assert [fault.id for fault in MATRIX] == [f"F{number}" for number in range(1, 31)]
    assert [fault.id for fault in NETWORK] == [f"N{number}" for number in range(1, 8)]
    for fault in LINES:
        assert fault.tests or fault.missing, fault.id


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists():
    named = {test for fault in LINES for test in fault.tests}
    found = {file: names_in(file) for file in {test.partition("::")[0] for test in named}}
    lost = [test for test in named if test.partition("::")[2] not in found[test.partition("::")[0]]]
    assert lost == []


@pytest.mark.parametrize(
    ("tests", "outcome"),
    [
        (("one",), PASSED),
        (("one", "two"), FAILED),
        (("one", "three"), SKIPPED),
        (("one", "four"), NOT_RUN),
        ((), UNTESTED),
    ],
)
def test_a_line_is_as_good_as_its_worst_test(tmp_path, tests, outcome):
    (tmp_path / "junit.xml").write_text(JUNIT)
    named = " ".join(f"tests/a/test_b.py::test_{name}" for name in tests)
    fault = replace(MATRIX[0], node_ids=named)
    assert judge(fault, read_outcomes(tmp_path / "junit.xml")) == outcome


def test_a_seed_makes_one_plan_that_sees_every_kind():
    plan = make_plan(7, 1200)
    assert plan == make_plan(7, 1200) != make_plan(8, 1200)
    assert {planned.kind for planned in plan} == set(KINDS)
    assert {planned.kind for planned in plan[: len(KINDS)]} == set(KINDS)
    pauses = [after.at_s - before.at_s for before, after in itertools.pairwise(plan)]
    assert LEAST_S - 0.1 <= min(pauses) <= max(pauses) <= MOST_S + 0.1
    assert all(0 <= planned.pick(3) < 3 for planned in plan)
