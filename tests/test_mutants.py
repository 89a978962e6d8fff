"""The list of mutants fits the code: each can be made, and its tests exist."""

from pathlib import Path

import pytest
from mutants import ROOT, Mutant, copy_to, misfit, read_mutants, run_tests


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made(mutant: Mutant) -> None:
    assert misfit(mutant, ROOT) is None


@pytest.mark.slow
def test_pytest_knows_every_test_that_a_mutant_names(tmp_path: Path) -> None:
    named = sorted({test for mutant in read_mutants() for test in mutant.tests})
    assert run_tests(named, copy_to(tmp_path / "moebius"), "--collect-only") == 0
