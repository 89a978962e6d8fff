"""Units that pass their ReLU, rows that are alike, slices of single items: against plain loops."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from analysed import ITEMS, analysis_of, count_by_loops, pass_of, passes_of
from family import make_uneven, tiny_model
from torch import Tensor

from moebius.model.transformer import Transformer
from moebius.train.record.route_tap import tap
from moebius_science.analysis.cosines import row_cosines
from moebius_science.analysis.hidden import PARTS
from moebius_science.analysis.slices import usual_items
from moebius_science.analysis.stream import AnalysedPass
from moebius_science.pictures.weight_pictures import relu_pass_rate

TOKENS = torch.randint(9, (4, 6), generator=torch.Generator().manual_seed(1))
COUNTED = torch.ones(4, 6, dtype=torch.bool)
COUNTED[:3, 4:] = False

Units = dict[tuple[int, str], list[int]]  # depth step and part: units that passed, and all


def _above_zero(units: Units, place: tuple[int, str], values: Tensor) -> None:
    found = units.setdefault(place, [0, 0])
    found[0] += sum(value > 0 for value in values.tolist())
    found[1] += len(values)


@torch.no_grad()
def units_by_loops(model: Transformer, passed: AnalysedPass, tokens_BS: Tensor) -> Units:
    """Goes through every route and every token of the feed-forwards."""
    units: Units = {}
    counted = passed.counted_T.tolist()
    inputs: list[tuple[str, Tensor]] = []
    hooks = [
        module.register_forward_hook(
            lambda _module, given, _output, name=name: inputs.append((name, given[0]))
        )
        for name, module in model.named_modules()
        if name.endswith((".feed_forward", ".shared"))
    ]
    with tap(model, with_values=True) as calls:
        model(tokens_BS)
    for hook in hooks:
        hook.remove()
    for call in calls:
        if not call.id.layer.endswith(".sparse"):
            continue
        layer: Any = model.get_submodule(call.id.layer)
        experts = layer.experts
        rows_UD = call.rows_UD
        assert rows_UD is not None
        for row, expert in zip(
            call.routes.source_N.tolist(), call.routes.expert_N.tolist(), strict=True
        ):
            if counted[row // (call.num_rows // len(counted))]:
                bias = 0 if experts.b_up is None else experts.b_up[expert]
                hidden_F = experts.w_up[expert].T @ rows_UD[row] + bias
                _above_zero(units, (call.id.depth, "experts"), hidden_F)
    places: dict[str, int] = {}
    for name, x_BSD in inputs:
        module: Any = model.get_submodule(name)
        if not hasattr(module, "up"):
            continue
        member = int(name.split(".")[1])
        depths = [n for n, used in enumerate(model.config.schedule, start=1) if used == member]
        depth = depths[places.setdefault(name, 0)]
        places[name] += 1
        part = "shared" if name.endswith(".shared") else "dense"
        for row, x_D in enumerate(x_BSD.flatten(0, 1)):
            if counted[row]:
                bias = 0 if module.up.bias is None else module.up.bias
                _above_zero(units, (depth, part), module.up.weight @ x_D + bias)
    return units


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("moeut", {}),
        ("mh_moe", {"layers_per_group": 1, "feed_forward.activation": "relu"}),
        ("dense", {"feed_forward.activation": "relu"}),
        ("naive_ut", {"feed_forward.activation": "relu"}),
        ("deepseek", {"feed_forward.activation": "relu"}),
        ("sut", {"feed_forward.activation": "relu"}),
    ],
)
def test_units_that_pass(name: str, changes: dict[str, Any]) -> None:
    model = make_uneven(tiny_model(name, changes, dtype=torch.float64)).eval()
    seen = pass_of(model, TOKENS)
    analysis = analysis_of(model, [seen])
    expected = units_by_loops(model, seen, TOKENS)
    found = {
        (depth + 1, part): [
            int(analysis.hidden.passed_LP[depth, place]), int(analysis.hidden.units_LP[depth, place])
        ]
        for depth in range(model.config.num_layers)
        for place, part in enumerate(PARTS)
        if analysis.hidden.units_LP[depth, place]
    }  # fmt: skip
    assert found == expected
    assert all(0 < passed < units for passed, units in found.values())


def test_units_of_padding_do_not_count() -> None:
    model = make_uneven(tiny_model("moeut")).eval()
    whole, padded = (
        analysis_of(model, [pass_of(model, TOKENS, counted)]).hidden for counted in (None, COUNTED)
    )
    share = int(COUNTED.sum()) / COUNTED.numel()
    assert (padded.units_LP == whole.units_LP * share).all()
    dense = make_uneven(tiny_model("dense", {"feed_forward.activation": "relu"})).eval()
    place = PARTS.index("dense")
    whole, padded = (
        analysis_of(dense, [pass_of(dense, TOKENS, counted)]).hidden for counted in (None, COUNTED)
    )
    assert (padded.units_LP[:, place] == whole.units_LP[:, place] * share).all()


def test_other_activations_and_mixtures() -> None:
    model = tiny_model("moeut", {"feed_forward.activation": "gelu"})
    gelu = analysis_of(model, passes_of(model, count=1))
    assert not gelu.hidden.units_LP.any()
    assert "is gelu: no unit is switched off" in relu_pass_rate(gelu).absent
    soft = make_uneven(tiny_model("soft_moe", {"feed_forward.activation": "relu"})).eval()
    hidden = analysis_of(soft, passes_of(soft, count=1)).hidden
    assert hidden.units_LP[:, PARTS.index("experts")].any()  # of its slots


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / math.sqrt((one @ one) * (other @ other)))


def _pair_means(rows: list[list[np.ndarray]]) -> tuple[float, float, float]:
    """Same expert, different experts, all: by going through all pairs."""
    flat = [(expert, row) for expert, own in enumerate(rows) for row in own if row.any()]
    same, different = [], []
    for (a, one), (b, other) in itertools.combinations(flat, 2):
        (same if a == b else different).append(_cosine(one, other))
    means = [
        sum(values) / len(values) if values else math.nan
        for values in (same, different, same + different)
    ]
    return means[0], means[1], means[2]


@pytest.mark.parametrize("name", ["moeut", "dense", "sut", "x_moe", "sigma_moe"])
def test_rows_that_are_alike(name: str) -> None:
    model = make_uneven(tiny_model(name))
    with torch.no_grad():
        if name == "moeut":
            first: Any = model.group[0].feed_forward
            first.sparse.experts.w_down[1, 2] = 0.0  # has no direction
    found = {(one.member, one.matrix): one for one in row_cosines(model)}
    for member, layer in enumerate(model.group):
        feed_forward: Any = layer.feed_forward
        if hasattr(feed_forward, "up"):
            matrices = {
                "W1": [list(feed_forward.up.weight)],
                "W2": [list(feed_forward.down.weight.T)],
            }
        else:
            experts, router = feed_forward.sparse.experts, feed_forward.router
            scores = {"sut": "output.weight", "x_moe": "expert_embedding"}.get(name, "weight")
            matrices = {
                "W1": [list(w.T) for w in experts.w_up],
                "W2": [list(w) for w in experts.w_down],
                "W_r": [[row] for row in router.get_parameter(scores)],
            }
        for matrix, rows in matrices.items():
            plain = [[row.detach().double().numpy() for row in own] for own in rows]
            one = found.pop((member, matrix))
            assert (one.experts, one.rows) == (len(rows), sum(map(len, rows)))
            expected = _pair_means(plain)
            values = one.same_expert, one.different_experts, one.all_pairs
            assert values == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert not found


@pytest.mark.parametrize("name", ["moeut", "mh_moe", "expert_choice"])
def test_slices_of_single_items(name: str) -> None:
    model = make_uneven(tiny_model(name))
    group = model.config.evaluation_group_sequences
    passes = passes_of(model, rows=max(4, group), padded=name == "moeut")
    for each in analysis_of(model, passes).of_kind("feed_forward"):
        counted = count_by_loops(passes, each.bank.layer)
        assert each.slices is not None
        for place, item in enumerate(ITEMS):
            for repeat, tokens in enumerate(counted.choices):
                experts = [
                    expert
                    for token_id, made in zip(counted.token_ids, tokens, strict=True)
                    if token_id == item.token_id
                    for expert, _ in made
                ]
                assert experts
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
