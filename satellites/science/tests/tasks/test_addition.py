"""Addition of many numbers, checked digit by digit as on paper."""

import pytest

from moebius_science.tasks.addition import held_out, train, words


def on_paper(numbers: list[str]) -> str:
    """Adds column by column from the right, with a carry."""
    columns, carry, found = list(zip(*numbers, strict=True))[::-1], 0, ""
    for column in columns:
        carry += sum("0123456789".index(digit) for digit in column)
        found, carry = "0123456789"[carry % 10] + found, carry // 10
    while carry:
        found, carry = "0123456789"[carry % 10] + found, carry // 10
    return found.lstrip("0") or "0"


def read(record: dict[str, str]) -> tuple[list[str], str]:
    question, nothing = record["prompt"].replace(" ", "").split("=")
    assert nothing == ""
    return question.split("+"), record["answer"].replace(" ", "")


def records(split: int = 0, **changes: object) -> list[dict[str, str]]:
    sizes: dict[str, object] = {"sums": 1200, "operands": "2,5,9", "digits": 2}
    return list(train(split, 4, **(sizes | changes)))  # type: ignore[arg-type]


def test_answers_are_those_of_adding_up_on_paper():
    counts = set()
    for record in [*records(), *held_out(sums=100, operands=12, digits=3)]:
        numbers, answer = read(record)
        assert answer == on_paper(numbers)
        counts.add((len(numbers), len(numbers[0])))
    assert counts == {(2, 2), (5, 2), (9, 2), (12, 3)}


def test_no_test_sum_is_trained_on_whatever_the_seed():
    """Nearly all trainable ones of the 100 sums of two digits are drawn."""
    small = {"operands": 2, "digits": 1}
    trained = {
        record["prompt"] for seed in range(3) for record in records(seed, **small, seed=seed)
    }
    tested = {
        r["prompt"] for seed in range(3) for r in held_out(sums=3, operands=2, digits=1, seed=seed)
    }
    assert len(trained) > 85
    assert tested
    assert not trained & tested
    assert len({record["prompt"] for record in held_out(sums=200, operands=3, digits=2)}) == 200


def test_every_word_is_known_to_the_tokenizer():
    used = {word for record in records() for text in record.values() for word in text.split()}
    assert used == set(words())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operands": "2,many"}, "operands='2,many': write whole numbers such as 2,4,8"),
        ({"operands": 1}, "operands=1: it must be from 2 to 1024"),
        ({"digits": 16}, "digits=16: it must be from 1 to 15"),
    ],
)
def test_sizes_that_make_no_task_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        records(**changes)
