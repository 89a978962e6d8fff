"""Words over groups: labels are checked by following every point through the permutations."""

import pytest

from moebius_science.tasks.permutation_words import elements, held_out, train, words

ORDERS = {"s3": 6, "s4": 24, "a4": 12, "s5": 120, "a5": 60, "z60": 60}


def read(record: dict[str, str]) -> tuple[list[str], list[str]]:
    """Returns elements and products."""
    *pairs, end = record["answer"].split()
    assert (record["prompt"].split()[0], end) == ("start", "end")
    return pairs[::2], pairs[1::2]


def follow(given: list[str]) -> str:
    """Returns where each point ends after all permutations."""
    if given[0].startswith("z_"):
        return f"z_{sum(int(word[2:]) for word in given) % 60}"
    images = [word.removeprefix("p_") for word in given]
    ends = []
    for point in range(len(images[0])):
        for image in images:
            point = int(image[point])
        ends.append(str(point))
    return f"p_{''.join(ends)}"


@pytest.mark.parametrize("group", ["s3", "a5", "z60"])
def test_labels_are_the_products_so_far(group):
    for record in held_out(sequences=30, length=7, group=group):
        given, products = read(record)
        assert len(given) == 7
        assert products == [follow(given[: place + 1]) for place in range(7)]


def test_groups_have_their_orders_and_begin_with_the_identity():
    for group, order in ORDERS.items():
        assert len(set(elements(group))) == len(words(group=group)) - 2 == order
        assert list(elements(group)[0]) == list(range(len(elements(group)[0])))


def test_the_group_is_not_abelian_where_it_matters():
    """Otherwise the order would not matter, and counting elements would suffice."""
    a, b = "p_12034", "p_02341"
    assert follow([a, b]) != follow([b, a])


def test_no_test_word_is_trained_on_whatever_the_seed():
    """Nearly all trainable ones of the 216 words of three elements are drawn."""
    trained = {
        tuple(read(record)[0])
        for seed in range(3)
        for record in train(seed, 4, sequences=4000, length=3, group="s3", seed=seed)
    }
    tested = {
        tuple(read(record)[0])
        for seed in range(3)
        for record in held_out(sequences=5, length=3, group="s3", seed=seed)
    }
    assert len(trained) > 190
    assert tested
    assert not trained & tested


def test_every_word_is_known_to_the_tokenizer():
    found = list(held_out(sequences=300, length=5, group="s3"))
    used = {word for record in found for text in record.values() for word in text.split()}
    assert used == set(words(group="s3"))


def test_what_makes_no_task_is_refused():
    with pytest.raises(ValueError, match="group='s6' must be one of s3, s4, a4, s5, a5, z60"):
        words(group="s6")
    with pytest.raises(ValueError, match="length=0: it must be from 1"):
        list(held_out(length=0))
