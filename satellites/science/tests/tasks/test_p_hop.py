"""p-hop induction, against its definition implemented again, letter by letter."""

import pytest

from moebius_science.tasks.p_hop import constant_accuracy, held_out, train, words

SIZES = {"length": 12, "hops": 5, "letters": 3}


def find(text: str, place: int) -> int | None:
    """Returns the largest j <= place with X[j - 1] = X[place] (arXiv 2402.09268, definition 4.1)."""
    return max((j for j in range(1, place + 1) if text[j - 1] == text[place]), default=None)


def label(text: str, place: int, hops: int) -> str:
    at: int | None = place
    for _ in range(hops):
        at = None if at is None else find(text, at)
    return "none" if at is None else text[at]


def read(record: dict[str, str]) -> tuple[int, str, list[str]]:
    """Returns hops, letters, labels."""
    asked, nothing = record["prompt"].split()
    *pairs, end = record["answer"].split()
    assert (nothing, end) == ("none", "end")
    return int(asked.removeprefix("hops_")), "".join(pairs[::2]), pairs[1::2]


def records(split: int = 0, **changes: int) -> list[dict[str, str]]:
    return list(train(split, 4, **({"sequences": 4000} | SIZES | changes)))


def test_labels_are_those_of_the_definition():
    for record in [*records()[:200], *held_out(sequences=100, **SIZES)]:
        hops, text, labels = read(record)
        assert len(text) == 12
        assert labels == [label(text, place, hops) for place in range(12)]


def test_the_example_of_the_induction_head():
    assert [label("abcab", place, 1) for place in range(5)] == ["none", "none", "none", "b", "c"]


def test_no_test_sequence_is_trained_on_whatever_seed_and_hops_it_is_drawn_with():
    small = {"length": 6, "letters": 2, "hops": 3}  # 64 sequences: nearly all are drawn
    trained = {read(record)[1] for seed in range(4) for record in records(seed, **small, seed=seed)}
    tested = {
        read(record)[1] for seed in range(4) for record in held_out(sequences=2, **small, seed=seed)
    }
    assert len(trained) > 50
    assert tested
    assert not trained & tested


def test_splits_share_the_count_and_are_the_same_each_time():
    splits = [records(split, sequences=4001) for split in range(4)]
    assert [len(split) for split in splits] == [1001, 1000, 1000, 1000]
    assert records(1, sequences=4001) == splits[1] != splits[2]
    assert records(seed=1) != records(seed=0)


def test_test_sequences_differ_and_have_the_hops_that_are_asked_for():
    found = [read(record) for record in held_out(sequences=300, least_hops=4, **SIZES)]
    assert len({text for _, text, _ in found}) == 300
    assert {hops for hops, *_ in found} == {4, 5}


def test_every_word_is_known_to_the_tokenizer():
    known = words(letters=3, hops=5)
    assert len(known) == 3 + 1 + 5 + 1
    used = {word for record in records() for text in record.values() for word in text.split()}
    assert used == set(known)


def test_the_best_constant_is_counted():
    one = {"prompt": "hops_1 none", "answer": " a none b none a b end"}
    assert constant_accuracy([one]) == 2 / 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"letters": 1}, "letters=1: it must be from 2 to 26"),
        ({"hops": 0}, "hops=0: it must be from 1 to 64"),
        ({"length": 1}, "length=1: it must be from 2"),
    ],
)
def test_sizes_that_make_no_task_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        records(**changes)


def test_more_test_items_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="the task has too few different items"):
        list(held_out(sequences=64, length=3, hops=1, letters=2))
