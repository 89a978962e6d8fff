"""Every statistic, against plain counts over the routes and states of tiny models."""

import itertools
import math

import numpy as np
import pytest
import torch
from analysed import ITEMS, Counted, analysed, count_by_loops, tiny_model, traces_of

import moebius
from moebius_science.analysis.analyse import Analysis, BankAnalysis
from moebius_science.analysis.banks import Bank, Choices, banks_of
from moebius_science.analysis.items import ItemCounter
from moebius_science.analysis.similarity import SimilarityCounter
from moebius_science.analysis.slices import usual_items
from moebius_science.analysis.updates import UpdateCounter
from moebius_science.analysis.usage import UsageCounter, preference_order

MODELS = {  # recipe: changes
    "moeut": (),  # repeats, heads of attention
    "moeut_aabb": (),  # the other order of repeats
    "sigma_moe": (),  # no repeats
    "mh_moe": ("model.layers_per_group=1",),  # sub-tokens: tokens have more or fewer experts
    "switch": ("model.layers_per_group=1",),  # a capacity that refuses rows
    "expert_choice": ("model.layers_per_group=2",),  # experts that choose
    "sut": (),  # halting, one router for Q and O
}
Case = tuple[list[moebius.Trace], Analysis]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    name: str = request.param
    length = 3 if name == "expert_choice" else 6
    padded = name in ("moeut", "mh_moe", "switch")
    return analysed(name, *MODELS[name], length=length, padded=padded)


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
        for item in range(10):
            places = [n for n, token in enumerate(counted.token_ids) if token == item]
            met = [set().union(*(tokens[n] for n in places)) for tokens in sets]
            assert each.items.unique_RV[:, item].tolist() == [len(found) for found in met]
            assert each.items.anywhere_V[item] == len(set().union(*met))
            assert analysis.item_counts_V[item] == len(places)


@pytest.mark.parametrize("name", ["moeut", "dense", "sut"])
def test_updates_are_those_of_a_plain_loop(name: str) -> None:
    loaded = tiny_model(name)
    [seen] = traces_of(loaded, count=1, padded=True)
    counter = UpdateCounter(loaded.config.model.num_layers)
    counter.add(seen)
    counter.add(seen)  # twice the tokens, the same means
    counted = seen.rows.counted_BS.flatten().tolist()
    states = seen.hidden_LBSD.flatten(1, 2).tolist()
    for depth, active in enumerate(seen.active_LBS.flatten(1).tolist()):
        rows = []
        for a, b, is_active, counts in zip(
            states[depth], states[depth + 1], active, counted, strict=True
        ):
            if not (is_active and counts):
                continue
            change = math.sqrt(sum((q - p) ** 2 for p, q in zip(a, b, strict=True)))
            before, after = math.hypot(*a), math.hypot(*b)
            cosine = sum(p * q for p, q in zip(a, b, strict=True)) / before / after
            rows.append((change, before, change / before, abs(cosine)))
        assert counter.tokens_L[depth] == 2 * len(rows)
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)] or [math.nan] * 4
        assert counter.means_LC[depth].tolist() == pytest.approx(means, rel=1e-5, nan_ok=True)


def test_slices_of_single_items(case: Case) -> None:
    for each, counted in each_bank(case):
        if each.slices is None:
            continue
        for place, item in enumerate(ITEMS):
            for repeat, tokens in enumerate(counted.choices):
                experts = [
                    expert
                    for token_id, made in zip(counted.token_ids, tokens, strict=True)
                    if token_id == item.token_id
                    for expert, _ in made
                ]
                counts = [experts.count(expert) for expert in range(each.bank.num_experts)]
                assert each.slices.counts_KRE[place, repeat].tolist() == counts
            counts_RE = each.slices.counts_KRE[place]
            for expert, column in enumerate(each.slices.preference_RE(place).T):
                total = counts_RE[:, expert].sum()
                shares = [count / total if total else math.nan for count in counts_RE[:, expert]]
                assert column.tolist() == pytest.approx(shares, nan_ok=True)


def test_the_usual_items_are_some_of_the_most_frequent() -> None:
    counts = np.zeros(2000, dtype=np.int64)
    assert usual_items(counts) == []
    counts[[7, 3]] = (5, 9)
    assert usual_items(counts) == [3]
    counts[:1500] += np.arange(1500, 0, -1)
    assert usual_items(counts) == [3, 9, 99, 999]


def slow_order(shares: list[list[float]]) -> list[int]:
    """Implements the paper's rule expert by expert: shares[r][e]."""
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


def bank_of(num_experts: int) -> Bank:
    return Bank("group.0.feed_forward.sparse", "feed_forward", 0, (1, 2), num_experts, 1, "tokens")


def one_sided(num_tokens: int, num_experts: int) -> Choices:
    """All tokens choose expert 2."""
    token_N = torch.arange(num_tokens)
    return Choices(
        token_N, torch.full_like(token_N, 2), torch.ones(num_tokens), num_tokens, num_experts
    )


def test_all_tokens_to_one_expert() -> None:
    bank = bank_of(5)
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
    bank = bank_of(5)
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
    """More tokens than fit into a block give the same as all at once."""
    bank = bank_of(7)
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
    changes = ("num_layers", "layers_per_group", "feed_forward.num_experts")
    _, analysis = analysed(
        "moeut", *(f"model.{key}=1" for key in changes), "model.feed_forward.router.top_k=1"
    )
    [feed_forward] = analysis.of_kind("feed_forward")
    assert feed_forward.takes_all
    assert feed_forward.usage.perplexity_R.tolist() == [1.0]
    assert feed_forward.similarity.consecutive_R.shape == (1,)
    assert analysis.updates.tokens_L.tolist() == [48]


def banks(name: str) -> tuple[Bank, ...]:
    loaded = tiny_model(name)
    [seen] = traces_of(loaded, count=1, padded=False)
    return banks_of(seen.routes, loaded.config.model.attention.kind)


def test_banks_say_which_depth_steps_they_serve() -> None:
    found = {(bank.kind, bank.member): bank.depths for bank in banks("moeut_aabb")}
    steps = found["feed_forward", 0]
    assert steps == tuple(range(1, len(steps) + 1))
    assert found["value", 1][0] == len(steps) + 1
    assert {bank.kind for bank in banks("sut")} == {"feed_forward", "attention"}
    assert banks("dense") == ()
