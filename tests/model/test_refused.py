"""Models that cannot work are refused with the values and the way out: the whole answer.

Each paragraph of refused.txt is a recipe of the family (or `default`) with changed keys, and the answer.
`PYTHONPATH=$PYTHONPATH:tests python tests/model/test_refused.py` writes today's answers into the file.
"""

import json
import re
from pathlib import Path
from textwrap import fill

import pytest
from family import tiny_config
from pydantic import ValidationError

from moebius.model.config.model_config import ModelConfig

FILE = Path(__file__).with_name("refused.txt")
MISTAKES = re.findall(r"^(\w+) (\{.*\})\n((?: .+\n)+)", FILE.read_text(), re.MULTILINE)


def answer_to(recipe: str, changes: str) -> str:
    """Returns the first message, as a paragraph of the file has it."""
    given = json.loads(changes)
    with pytest.raises(ValidationError) as raised:
        ModelConfig.from_dotted(given) if recipe == "default" else tiny_config(recipe, given)
    error = raised.value.errors()[0]
    place = "".join(f"{part}: " for part in error["loc"][-1:])
    said = place + error["msg"].removeprefix("Value error, ")
    indent = {"initial_indent": "    ", "subsequent_indent": "    "}
    return fill(said, 100, break_long_words=False, break_on_hyphens=False, **indent) + "\n"


@pytest.mark.parametrize(("recipe", "changes", "answer"), MISTAKES)
def test_the_answer_is_written(recipe: str, changes: str, answer: str) -> None:
    assert answer_to(recipe, changes) == answer


def test_every_paragraph_is_read() -> None:
    assert len(MISTAKES) == FILE.read_text().count("\n\n")


if __name__ == "__main__":
    head = FILE.read_text().partition("\n\n")[0]
    found = (f"{name} {changes}\n{answer_to(name, changes)}" for name, changes, _ in MISTAKES)
    FILE.write_text("\n".join([head + "\n", *found]))
