"""Scores of rows, against a plain pass over each row and sums by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import make_uneven, tiny_model
from table_model import random_table, table_model
from world import run_ranks

from moebius.distributed.process.process import start_process
from moebius.evaluation import batches
from moebius.evaluation.batches import Row, shared_length
from moebius.evaluation.group_context import GroupContextText, drawn_group
from moebius.evaluation.scoring import Scorer
from moebius.model.transformer import Transformer

VOCABULARY = 61


def random_row(rng: np.random.Generator, prefix: tuple[int, ...], scored: int) -> Row:
    more = rng.integers(1, 9)
    tokens = (*prefix, *rng.integers(VOCABULARY, size=more + scored).tolist())
    return Row(tokens, scored)


def random_families(seed: int = 0) -> list[list[Row]]:
    """Single rows, rows with long and short common beginnings, rows scored from the second token."""
    rng = np.random.default_rng(seed)
    families = [[random_row(rng, (), int(rng.integers(1, 9)))] for _ in range(3)]
    for length in (3, 20, 21, 20, 33):
        prefix = tuple(rng.integers(VOCABULARY, size=length).tolist())
        families.append([random_row(rng, prefix, int(rng.integers(1, 7))) for _ in range(3)])
    tokens = tuple(rng.integers(VOCABULARY, size=24).tolist())
    families.append([Row(tokens, 23), Row(tokens, 2), Row((*tokens, 5), 1)])
    return families


@torch.no_grad()
def by_hand(
    model: Transformer, row: Row, group_BS: torch.Tensor | None = None, place: int = 0
) -> np.ndarray:
    """Scores a row alone, or from its place in a group."""
    group_BS = torch.tensor([row.tokens[:-1]]) if group_BS is None else group_BS
    logits_SV = model(group_BS).logits_BSV[place].double()
    targets_S = torch.tensor(row.tokens[1:])
    return logits_SV.log_softmax(-1)[range(len(targets_S)), targets_S][-row.num_scored :].numpy()


@pytest.mark.parametrize("name", ["dense", "moeut", "sut", "switch_causal", "mh_moe"])
def test_a_batch_says_what_each_row_alone_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_MOST_TOKENS", 100)  # several batches
    model = make_uneven(tiny_model(name, dtype=torch.float64)).eval()
    families = random_families()
    found = Scorer(model).score(families)
    for family, scores in zip(families, found, strict=True):
        for row, score in zip(family, scores, strict=True):
            np.testing.assert_allclose(score.log_probability_S, by_hand(model, row), atol=1e-10)
            assert score.total(1) == score.log_probability_S[-1]


def test_what_is_shared_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("moeut", dtype=torch.float64).eval()
    prefix = tuple(range(40))
    family = [Row((*prefix, 50 + n, n, n), 2) for n in range(10)]
    assert shared_length(family) == 40
    assert shared_length([Row((1, 2, 3), 1), Row((1, 2, 4), 2)]) == 0
    assert shared_length([Row((1, 2, 3, 4), 1), Row((1, 7, 3, 4), 1)]) == 1
    computed = []
    plain = Scorer._run

    def counting(self: Scorer, tokens: torch.Tensor, *given: Any) -> Any:
        computed.append(tokens.numel())
        return plain(self, tokens, *given)

    monkeypatch.setattr(Scorer, "_run", counting)
    shared = Scorer(model).score([family])
    assert computed == [40, 10 * 2]
    computed.clear()
    apart = Scorer(model).score([[row] for row in family])
    assert computed == [10 * 42]
    for one, other in zip(shared[0], [score for [score] in apart], strict=True):
        np.testing.assert_allclose(one.log_probability_S, other.log_probability_S, atol=1e-12)
        assert one.greedy_S.tolist() == other.greedy_S.tolist()


def test_a_table_is_added_up_by_hand() -> None:
    table = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]]).double().log()
    [[score]] = Scorer(table_model(table)).score([[Row((0, 1, 2, 0), 3)]])
    np.testing.assert_allclose(np.exp(score.log_probability_S), [0.25, 0.8, 0.2])
    assert score.greedy_S.tolist() == [0, 2, 1]
    assert score.total() == pytest.approx(np.log(0.25 * 0.8 * 0.2))
    assert score.total(2) == pytest.approx(np.log(0.8 * 0.2))


def test_rows_are_told_of_and_what_cannot_be_scored_is_refused() -> None:
    told: list[int] = []
    families = random_families()
    model = table_model(random_table(VOCABULARY))
    Scorer(model).score(families, advance=told.append)
    assert sum(told) == sum(map(len, families))
    with pytest.raises(ValueError, match="lets a position read later ones"):
        Scorer(tiny_model("switch"))
    for tokens, scored in (((1,), 1), ((1, 2), 0), ((1, 2), 2)):
        with pytest.raises(ValueError, match="score at least one, each after another token"):
            Row(tokens, scored)
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="log-probabilities are not finite"):
        Scorer(model).score([[Row((0, 1, 2), 2)]])


def scores_of_a_rank() -> list[list[float]]:
    with start_process("cpu", timeout_s=60) as process:
        model = tiny_model("moeut", dtype=torch.float64).eval()
        scorer = Scorer(model, rank=process.rank, num_ranks=process.world_size)
        found = scorer.score(random_families())
        assert [len(scores) for scores in scorer.score([[], random_families()[0]])] == [
            0,
            1,
        ]  # of one rank
    return [[score.total() for score in scores] for scores in found]


def test_ranks_share_the_rows_and_all_know_all() -> None:
    found = Scorer(tiny_model("moeut", dtype=torch.float64).eval()).score(random_families())
    for ranks in run_ranks(scores_of_a_rank, 2):
        for one, alone in zip(ranks, found, strict=True):
            assert one == pytest.approx([score.total() for score in alone], abs=1e-10)


def test_a_mixture_is_asked_beside_a_group_of_its_own(mixture_folder: Path) -> None:
    changes = {"feed_forward.router.sequences_per_group": 4, "vocab_size": 257}
    model = make_uneven(tiny_model("mixture_of_tokens", changes, dtype=torch.float64)).eval()
    families = [[Row((1, 2, 3, 4), 2), Row((1, 2, 9, 9, 9), 3)], [Row((5, 6, 7), 1)]]
    text = GroupContextText(mixture_folder, seq_len=16, seed=3)
    scorer = Scorer(model, text=text)
    assert scorer.needs_draws
    first, second = scorer.score(families), scorer.score(families, draw=1)
    again = scorer.score(families)
    for f, family in enumerate(families):
        for r, row in enumerate(family):
            request = torch.tensor(row.tokens[:-1])
            group, place = drawn_group(model, request, text, key=(f, r, 1))
            expected = by_hand(model, row, group, place)
            np.testing.assert_allclose(second[f][r].log_probability_S, expected, atol=1e-10)
            assert first[f][r].total() == again[f][r].total() != second[f][r].total()
    with pytest.raises(ValueError, match="needs a group context of 3 sequences"):
        Scorer(model).score(families)
