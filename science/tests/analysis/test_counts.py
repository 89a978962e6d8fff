"""Every statistic against a plain count over the recorded routes of tiny models."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from analysed import Counted, analysis_of, count_by_loops, passes_of
from family import make_uneven, tiny_model

from moebius_science.analysis.analyse import Analysis, BankAnalysis
from moebius_science.analysis.banks import Bank, Choices, banks_of
from moebius_science.analysis.items import ItemCounter
from moebius_science.analysis.similarity import SimilarityCounter
from moebius_science.analysis.stream import AnalysedPass, rows_of
from moebius_science.analysis.updates import UpdateCounter, tap_residual
from moebius_science.analysis.usage import UsageCounter, preference_order

MODELS: dict[str, dict[str, Any]] = {  # recipe: changes
    "moeut": {},  # repeats, heads of attention
    "moeut_aabb": {},  # the other order of repeats
    "sigma_moe": {},  # no repeats
    "mh_moe": {"layers_per_group": 1},  # sub-tokens: tokens have more or fewer experts
    "switch": {"layers_per_group": 1},  # a capacity that refuses rows
    "expert_choice": {"layers_per_group": 2},  # experts that choose
    "sut": {},  # halting, one router for Q and O
}
Case = tuple[list[AnalysedPass], Analysis]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    name: str = request.param
    model = make_uneven(tiny_model(name, MODELS[name]))
    group = model.config.evaluation_group_sequences
    rows = max(4, group)
    padded = name in ("moeut", "mh_moe", "switch")
    passes = passes_of(model, rows=rows, length=3 if group > 1 else 6, padded=padded)
    return passes, analysis_of(model, passes)


def each_bank(case: Case) -> list[tuple[BankAnalysis, Counted]]:
    passes, analysis = case
    return [(each, count_by_loops(passes, each.bank.layer)) for each in analysis.banks]


def sets_of(counted: Counted) -> list[list[set[int]]]:
    return [[{expert for expert, _ in made} for made in tokens] for tokens in counted.choices]


def test_usage_and_gates(case: Case) -> None:
    for each, counted in each_bank(case):
        for repeat, tokens in enumerate(counted.choices):
            made = [choice for of_token in tokens for choice in of_token]
            counts = [sum(e == expert for e, _ in made) for expert in range(each.bank.num_experts)]
            assert each.usage.counts_RE[repeat].tolist() == counts
            assert each.usage.tokens_R[repeat] == sum(bool(of_token) for of_token in tokens)
            gates = [weight for _, weight in made]
            if gates:
                assert each.usage.gate_min_R[repeat] == pytest.approx(min(gates))
                assert each.usage.gate_max_R[repeat] == pytest.approx(max(gates))
                assert each.usage.gate_mean_R[repeat] == pytest.approx(sum(gates) / len(gates))


def test_balance(case: Case) -> None:
    for each, counted in each_bank(case):
        heads = each.bank.num_heads
        per_head = each.bank.num_experts // heads
        for repeat, tokens in enumerate(counted.choices):
            experts = [expert for of_token in tokens for expert, _ in of_token]
            if not experts:
                assert math.isnan(each.usage.perplexity_R[repeat])
                assert math.isnan(each.usage.dead_R[repeat])
                continue
            dead = sum(expert not in experts for expert in range(each.bank.num_experts))
            assert each.usage.dead_R[repeat] == pytest.approx(dead / each.bank.num_experts)
            found = []
            for head in range(heads):
                own = [e for e in experts if e // per_head == head]
                shares = [own.count(e) / len(own) for e in set(own)]
                found.append(math.exp(-sum(p * math.log(p) for p in shares)) / per_head)
            assert each.usage.perplexity_R[repeat] == pytest.approx(sum(found) / heads)


def test_overlap_of_usage_and_preference(case: Case) -> None:
    for each, counted in each_bank(case):
        lists = [[e for of_token in tokens for e, _ in of_token] for tokens in counted.choices]
        experts, repeats = range(each.bank.num_experts), range(len(lists))
        pairs = []
        for r, q in itertools.product(repeats, repeats):
            if not lists[r] or not lists[q]:
                assert math.isnan(each.usage.overlap_RR[r, q])
                continue
            both = sum(
                min(lists[r].count(e) / len(lists[r]), lists[q].count(e) / len(lists[q]))
                for e in experts
            )
            assert each.usage.overlap_RR[r, q] == pytest.approx(both)
            pairs += [both] if r != q else []
        if pairs:
            assert each.usage.universal_score == pytest.approx(sum(pairs) / len(pairs))
        else:
            assert math.isnan(each.usage.universal_score)
        for e in experts:
            total = sum(found.count(e) for found in lists)
            shares = [found.count(e) / total if total else math.nan for found in lists]
            assert each.usage.preference_RE[:, e].tolist() == pytest.approx(shares, nan_ok=True)


def test_similarity_and_kept_experts(case: Case) -> None:
    for each, counted in each_bank(case):
        sets = sets_of(counted)
        for r, q in itertools.product(range(len(sets)), range(len(sets))):
            pairs = [(a, b) for a, b in zip(sets[r], sets[q], strict=True) if a and b]
            assert each.similarity.pairs_RR[r, q] == len(pairs)
            if not pairs:
                assert math.isnan(each.similarity.jaccard_RR[r, q])
                continue
            jaccard = sum(len(a & b) / len(a | b) for a, b in pairs) / len(pairs)
            assert each.similarity.jaccard_RR[r, q] == pytest.approx(jaccard)
            if q == r - 1:
                kept = sum(len(a & b) / len(a) for a, b in pairs) / len(pairs)
                assert each.similarity.consecutive_R[r] == pytest.approx(kept)
        assert math.isnan(each.similarity.consecutive_R[0])


def test_experts_that_work_together(case: Case) -> None:
    for each, counted in each_bank(case):
        together = np.zeros((each.bank.num_experts, each.bank.num_experts), dtype=int)
        for tokens in sets_of(counted):
            for chosen in tokens:
                for a, b in itertools.product(chosen, chosen):
                    together[a, b] += 1
        assert each.similarity.together_EE.tolist() == together.tolist()


def test_different_experts_of_an_item(case: Case) -> None:
    _, analysis = case
    for each, counted in each_bank(case):
        if each.items is None:
            assert each.bank.kind != "feed_forward"
            continue
        sets = sets_of(counted)
        for item in range(analysis.model.vocab_size):
            places = [n for n, token in enumerate(counted.token_ids) if token == item]
            met = [set().union(*(tokens[n] for n in places)) for tokens in sets]
            assert each.items.unique_RV[:, item].tolist() == [len(found) for found in met]
            assert each.items.anywhere_V[item] == len(set().union(*met))
            assert analysis.item_counts_V[item] == len(places)


@torch.no_grad()
@pytest.mark.parametrize("name", ["moeut", "dense", "sut"])
def test_updates_are_those_of_a_plain_loop(name: str) -> None:
    model = make_uneven(tiny_model(name)).eval()
    tokens_BS = torch.randint(9, (3, 5), generator=torch.Generator().manual_seed(1))
    counted_T = torch.arange(15) % 4 > 0
    seen: list[tuple[Any, Any, Any]] = []

    def look(_layer: Any, inputs: Any, given: Any, output: Any) -> None:
        seen.append((inputs[0], output[0], given["unhalted"]))

    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in model.group]
    with tap_residual(model) as updates:
        model(tokens_BS)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(updates) == model.config.num_layers
    counter = UpdateCounter(model.config.num_layers)
    counter.add(updates, counted_T)
    counter.add(updates, counted_T)  # twice the tokens, the same means
    for depth, (x, y, unhalted) in enumerate(seen):
        rows = []
        for token in counted_T.nonzero().flatten().tolist():
            if unhalted is not None and unhalted.weight_BS.flatten()[token] == 0:
                continue
            a, b = x.flatten(0, 1)[token].tolist(), y.flatten(0, 1)[token].tolist()
            change = math.sqrt(sum((q - p) ** 2 for p, q in zip(a, b, strict=True)))
            before, after = math.hypot(*a), math.hypot(*b)
            cosine = sum(p * q for p, q in zip(a, b, strict=True)) / before / after
            rows.append((change, before, change / before, abs(cosine)))
        assert counter.tokens_L[depth] == 2 * len(rows)
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)] or [math.nan] * 4
        assert counter.means_LC[depth].tolist() == pytest.approx(means, rel=1e-5, nan_ok=True)


def slow_order(shares: list[list[float]]) -> list[int]:
    """The paper's rule, expert by expert: shares[r][e]."""
    places = []
    for e in range(len(shares[0])):
        column = [row[e] for row in shares]
        if any(math.isnan(share) for share in column):
            places.append(math.inf)
            continue
        ordered, position = sorted(column), 0.9 * (len(column) - 1)
        low = math.floor(position)
        high = min(low + 1, len(column) - 1)
        limit = ordered[low] + (ordered[high] - ordered[low]) * (position - low)
        places.append(sum(r * share for r, share in enumerate(column) if share > limit))
    return sorted(range(len(places)), key=lambda e: places[e])


@pytest.mark.parametrize("repeats", [1, 2, 5, 12])
def test_experts_are_sorted_by_the_papers_rule(repeats: int) -> None:
    rng = np.random.default_rng(repeats)
    shares = rng.random((repeats, 20))
    shares = shares / shares.sum(0)
    shares[:, 3] = np.nan
    assert preference_order(shares).tolist() == slow_order(shares.tolist())
    assert preference_order(shares)[-1] == 3


def test_a_clear_preference_is_a_diagonal() -> None:
    order = np.array([2, 0, 1])
    assert preference_order(np.eye(3)[order]).tolist() == order.tolist()


# Degenerate cases -------------------------------------------------------------------------------------------


def one_sided(num_tokens: int, num_experts: int) -> Choices:
    """All tokens to expert 2."""
    token_N = torch.arange(num_tokens)
    return Choices(
        token_N, torch.full_like(token_N, 2), torch.ones(num_tokens), num_tokens, num_experts
    )


def test_all_tokens_to_one_expert() -> None:
    bank = Bank("group.0.feed_forward.sparse", "feed_forward", 0, (1, 2), 5)
    usage, similarity, items = UsageCounter(bank), SimilarityCounter(bank), ItemCounter(bank, 4)
    for repeat in range(2):
        usage.add(repeat, one_sided(6, 5))
        items.add(repeat, one_sided(6, 5), torch.arange(6) % 3)
    similarity.add([one_sided(6, 5), one_sided(6, 5)])
    assert usage.perplexity_R.tolist() == pytest.approx([1 / 5, 1 / 5])
    assert usage.dead_R.tolist() == pytest.approx([4 / 5, 4 / 5])
    assert usage.dead_everywhere == pytest.approx(4 / 5)
    assert usage.overlap_RR.tolist() == [[1, 1], [1, 1]]
    assert np.isnan(usage.preference_RE[:, 0]).all()
    assert similarity.jaccard_RR.tolist() == [[1, 1], [1, 1]]
    assert items.unique_RV.tolist() == [[1, 1, 1, 0]] * 2


def test_no_token_at_all_is_unknown_and_not_zero() -> None:
    bank = Bank("group.0.feed_forward.sparse", "feed_forward", 0, (1, 2), 5)
    usage, similarity = UsageCounter(bank), SimilarityCounter(bank)
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = Choices(nothing, nothing, torch.zeros(0), 0, 5)
    for repeat in range(2):
        usage.add(repeat, empty)
    similarity.add([empty, empty])
    for unknown in (usage.perplexity_R, usage.dead_R, usage.gate_mean_R, similarity.jaccard_RR):
        assert np.isnan(unknown).all()
    assert math.isnan(usage.universal_score)


def test_many_tokens_are_counted_in_blocks() -> None:
    """More tokens than a block holds give what all at once give."""
    bank = Bank("group.0.feed_forward.sparse", "feed_forward", 0, (1, 2), 7)
    rng = torch.Generator().manual_seed(0)
    of_repeats = []
    for _ in range(2):
        token_N = torch.arange(2500).repeat_interleave(2)
        expert_N = torch.randint(7, (5000,), generator=rng)
        of_repeats.append(Choices(token_N, expert_N, torch.ones(5000), 2500, 7))
    similarity = SimilarityCounter(bank)
    similarity.add(of_repeats)
    a, b = (each.chosen_TE.numpy() for each in of_repeats)
    expected = ((a & b).sum(1) / (a | b).sum(1)).mean()
    assert similarity.jaccard_RR[0, 1] == pytest.approx(expected)
    assert similarity.together_EE[1, 4] == (a[:, 1] & a[:, 4]).sum() + (b[:, 1] & b[:, 4]).sum()


def test_a_single_depth_step_and_a_single_expert() -> None:
    changes = {
        "num_layers": 1,
        "layers_per_group": 1,
        "feed_forward.num_experts": 1,
        "feed_forward.router.top_k": 1,
    }
    model = tiny_model("moeut", changes)
    analysis = analysis_of(model, passes_of(model))
    [feed_forward] = analysis.of_kind("feed_forward")
    assert feed_forward.takes_all
    assert feed_forward.usage.perplexity_R.tolist() == [1.0]
    assert feed_forward.similarity.consecutive_R.shape == (1,)
    assert analysis.updates.tokens_L.tolist() == [48]


def test_banks_say_which_depth_steps_they_serve() -> None:
    found = {(bank.kind, bank.member): bank.depths for bank in banks_of(tiny_model("moeut_aabb"))}
    steps = found["feed_forward", 0]
    assert steps == tuple(range(1, len(steps) + 1))
    assert found["value", 1][0] == len(steps) + 1
    assert {bank.kind for bank in banks_of(tiny_model("sut"))} == {"feed_forward", "attention"}
    assert banks_of(tiny_model("dense")) == ()


def test_tokens_become_whole_rows() -> None:
    assert [rows_of(tokens, 128) for tokens in (1, 128, 129, None)] == [1, 1, 2, None]
    with pytest.raises(ValueError, match="--tokens 0: nothing would be counted"):
        rows_of(0, 128)
