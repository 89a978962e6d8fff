"""The list of mutants fits the code: each can be made, and its tests exist."""

import pytest
from mutants import ROOT, Mutant, misfit, read_mutants


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_and_its_tests_exist(mutant: Mutant) -> None:
    assert misfit(mutant, ROOT) is None
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in text if name else text
