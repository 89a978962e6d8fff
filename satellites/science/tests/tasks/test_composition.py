"""Composition over a knowledge graph, against a dictionary graph walked fact by fact."""

from collections import Counter

import pytest

from moebius_science.tasks.composition import graph, held_out, train, words

SMALL = {"entities": 60, "relations": 12, "facts_per_entity": 8}
Fact = tuple[str, ...]


def read(records) -> list[Fact]:
    return [(*record["prompt"].split(), record["answer"].strip()) for record in records]


def trained(ratio: float = 3.0, **changes: int) -> list[Fact]:
    return [
        fact
        for split in range(4)
        for fact in read(train(split, 4, ratio=ratio, **SMALL, **changes))
    ]


def kept_out(split: str, **changes: int) -> list[Fact]:
    return read(held_out(split=split, most=10**6, ratio=3.0, **SMALL, **changes))


def walk(atomic: dict[tuple[str, str], str]) -> set[Fact]:
    """Returns every two-hop fact of a graph."""
    return {
        (head, first, second, tail)
        for (head, first), bridge in atomic.items()
        for (start, second), tail in atomic.items()
        if start == bridge
    }


def test_the_sides_are_those_of_the_definition():
    """Of all pairs of facts that meet: both in distribution, or both out of it."""
    known = [fact for fact in trained() if len(fact) == 3]
    atomic = {(head, relation): tail for head, relation, tail in known}
    assert len(atomic) == len(known) == 60 * 8
    assert set(Counter(head for head, _ in atomic).values()) == {8}  # different relations
    inside = kept_out("atomic_in_distribution")
    outside = kept_out("atomic_out_of_distribution")
    assert len(outside) == 24
    assert Counter([*inside, *outside]) == Counter(known)
    both_in, both_out = (
        walk({(head, relation): tail for head, relation, tail in facts})
        for facts in (inside, outside)
    )
    two_hops = {fact for fact in trained() if len(fact) == 4}
    assert two_hops | set(kept_out("in_distribution")) <= both_in
    assert len(kept_out("in_distribution")) == round(0.005 * len(both_in))
    assert set(kept_out("out_of_distribution")) == both_out
    assert both_out
    assert both_in | both_out < walk(atomic)


def test_no_test_fact_is_trained_on():
    known = {fact[:-1] for fact in trained()}
    for split in ("in_distribution", "out_of_distribution"):
        questions = [fact[:-1] for fact in kept_out(split)]
        assert len(set(questions)) == len(questions) > 0
        assert not known & set(questions)
    assert {fact[:-1] for fact in kept_out("trained")} < known


def test_training_facts_are_there_once_in_the_ratio_that_is_asked_for():
    facts = trained()
    assert len(set(facts)) == len(facts)
    assert Counter(map(len, facts)) == {3: 480, 4: 3 * 456}
    assert trained(seed=1) != facts == trained()


def test_every_word_is_known_to_the_tokenizer():
    used = {word for fact in trained() for word in fact}
    assert used == set(words(entities=60, relations=12))


def test_the_published_size_has_the_published_numbers():
    found = graph()
    assert (len(found.atomic), found.is_ood.sum(), len(found.two_hop)) == (40_000, 2000, 800_000)
    in_training, in_test, out_test = ((found.side == side).sum() for side in range(3))
    assert in_training == pytest.approx(718_000, rel=0.005)
    assert in_test == pytest.approx(0.005 * (in_training + in_test), abs=1)
    assert out_test == pytest.approx(2000, rel=0.1)


def test_what_makes_no_graph_is_refused():
    with pytest.raises(ValueError, match="facts_per_entity=20: it must be from 1 to 12"):
        graph(entities=60, relations=12)
    with pytest.raises(ValueError, match="split='test' must be one of in_distribution"):
        kept_out("test")
    with pytest.raises(ValueError, match=r"ratio=300.0 asks for 136800 .* from 0 to \d"):
        trained(300.0)
