"""A document in a row with others is what it would be alone; padding is nowhere."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family import (
    NAMES,
    gradients_of,
    make_uneven,
    set_options,
    some_tokens,
    tiny_config,
    tiny_model,
    without_draws,
)
from hypothesis import given
from hypothesis import strategies as st
from parts import layers
from torch import Tensor

from moebius.model.attention.base import LayerCache
from moebius.model.documents import Documents, mark_documents
from moebius.model.execution.compiled import compile_dense_parts
from moebius.model.transformer import ModelOutput, Transformer

CPU = torch.device("cpu")
# Two rows: documents that begin and end anywhere, one token long too; the second has padding.
IDS = torch.tensor(
    [
        [7, 7, 7, 7, 2, 9, 9, 9, 9, 9, 9, 4],
        [1, 1, 1, 1, 1, 1, 8, 8, 8, -1, -1, -1],
    ],
    dtype=torch.int32,
)
EXACT: Any = {"dtype": torch.float64}
ALONE = [
    name
    for name in NAMES
    if tiny_config(name).promises.batch_invariant and tiny_config(name).promises.causal
]
POSITIONS = {
    "learned": {"attention.positions.kind": "learned", "attention.positions.max_positions": 12},
    "none": {"attention.positions.kind": "none"},
    "rotary": {},
}


def tokens(seed: int = 1) -> Tensor:
    return some_tokens(*IDS.shape, seed=seed)


def marked(ids_BS: Tensor = IDS, *, attention: bool = True, balance: bool = False) -> Documents:
    return mark_documents(ids_BS, CPU, attention=attention, balance=balance)


def pieces(ids_BS: Tensor = IDS) -> list[tuple[int, slice]]:
    """Row and place of every document, by a plain loop; padding is none."""
    found = []
    for row, ids in enumerate(ids_BS.tolist()):
        first = 0
        for place in range(1, len(ids) + 1):
            if place == len(ids) or ids[place] != ids[first]:
                if ids[first] >= 0:
                    found.append((row, slice(first, place)))
                first = place
    return found


@given(
    st.integers(1, 6).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(-1, 2), min_size=length, max_size=length), min_size=1, max_size=3
        )
    ),
    st.integers(1, 3),
)
def test_documents_are_runs_of_equal_ids(ids: list[list[int]], times: int) -> None:
    ids_BS = torch.tensor(ids)
    found: Any = marked(ids_BS, balance=True)
    documents, width = pieces(ids_BS), len(ids[0])
    for row, line in enumerate(ids):
        first = 0
        for place, number in enumerate(line):
            if place and number != line[place - 1]:
                first = place
            assert found.positions_BS[row, place] == place - first
            seen = found.visible_B1SS[row, 0, place].nonzero().flatten().tolist()
            assert seen == [*range(first, place + 1)]
    rows = found.rows.repeated(times)
    own = {
        row * width * times + place: index
        for index, (row, where) in enumerate(documents)
        for place in range(where.start * times, where.stop * times)
    }
    assert rows.num_rows == ids_BS.numel() * times
    assert rows.num_real == len(own)
    assert rows.count_B.tolist() == [times * sum(each >= 0 for each in line) for line in ids]
    if -1 in ids_BS:
        assert rows.real_R.tolist() == rows.real_T.nonzero().flatten().tolist() == sorted(own)
    else:
        assert rows.real_R is rows.real_T is None
    assert all(rows.document_T[row] == index for row, index in own.items())
    sizes = [times * (where.stop - where.start) for _, where in documents]
    assert rows.length_D.tolist() == sizes
    assert rows.length_DB.tolist() == [
        [size * (row == each) for each in range(len(ids))]
        for size, (row, _) in zip(sizes, documents, strict=True)
    ]


def test_only_what_is_asked_for_is_made() -> None:
    plain = marked(IDS[:1], attention=False)
    assert (plain.positions_BS, plain.visible_B1SS, plain.rows, plain.real_BS) == (None,) * 4
    padded = marked(attention=False).rows
    assert padded is not None
    assert padded.length_D is padded.document_T is None


# Attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(5)
@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("name", "positions"),
    [(name, "rotary") for name in ALONE] + [("moeut", "learned"), ("dense", "none")],
)
def test_a_document_is_what_it_would_be_alone(name: str, positions: str) -> None:
    """Logits and the loss's gradients, of every architecture that keeps sequences apart."""
    model = make_uneven(tiny_model(name, POSITIONS[positions], **EXACT)).eval()
    rows, targets = tokens(), tokens(2)
    packed = model(rows, documents=marked()).logits_BSV
    losses = []
    for row, where in pieces():
        both = packed[row, where], model(rows[row : row + 1, where]).logits_BSV[0]
        torch.testing.assert_close(*both, rtol=0, atol=1e-10)
        losses.append(
            [F.cross_entropy(each, targets[row, where], reduction="sum") for each in both]
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours, theirs = (
        torch.autograd.grad(sum(found), parameters, allow_unused=True)  # type: ignore[arg-type]
        for found in zip(*losses, strict=True)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_a_cache_and_documents_are_refused() -> None:
    model = tiny_model("dense").eval()
    with pytest.raises(ValueError, match="leave documents out"):
        model(tokens(), [LayerCache() for _ in range(model.config.num_layers)], documents=marked())


# Ways to run it -------------------------------------------------------------------------------------------------------


def gradients(model: Transformer, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Loss and gradients of a micro-batch with documents, padding and a loss mask."""
    ids = torch.cat((IDS, IDS[:, -1:]), 1)
    rows = torch.cat((tokens(), tokens(2)[:, :1]), 1)
    mask = (ids[:, :-1] >= 0) & (ids[:, 1:] >= 0) & (rows[:, 1:] % 3 > 0)
    options = {"loss_mask_BS": mask, "global_targets": int(mask.sum())}
    return gradients_of(model, dtype, rows, documents=marked(balance=True), **options)


@pytest.mark.parametrize("name", ["moeut", "sut", "deepseek", "switch", "mh_moe"])
def test_recomputation_makes_the_same_gradients(name: str) -> None:
    expected = gradients(make_uneven(tiny_model(name)))
    for mode in ("selective", "full"):
        model = make_uneven(tiny_model(name))
        set_options(model, recompute=mode)
        torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["moeut", "sut_no_act", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_compiled_parts_make_the_same_gradients(name: str, dtype: torch.dtype) -> None:
    """With a backend that makes no code."""
    torch._dynamo.reset()
    expected = gradients(make_uneven(tiny_model(name)), dtype)
    model = make_uneven(tiny_model(name))
    compile_dense_parts(model, backend="aot_eager")
    torch.testing.assert_close(gradients(model, dtype), expected, rtol=1e-4, atol=1e-6)


# Balancing and padding ------------------------------------------------------------------------------------------------


def training_pass(
    model: Transformer, rows: Tensor, documents: Documents | None = None
) -> ModelOutput:
    model.before_step(0)
    return model.train()(rows, documents=documents)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("moeut", {}),
        ("switchhead", {"attention.balance": 0.1}),  # its recipe asks for none
        ("deepseek", {}),
        (
            "mh_moe_parity",  # sub-tokens, first choices, and a loss that is no entropy
            {
                "feed_forward.router.balance_scope": "sequence",
                "feed_forward.router.top_k": 2,
                "feed_forward.router.z_loss": 0.1,
            },
        ),
    ],
)
def test_a_loss_over_documents_is_the_mean_of_their_own(name: str, changes: dict) -> None:
    """Each weighed by its tokens, against the loss of every document as a sequence of its own."""
    model, rows = make_uneven(tiny_model(name, changes, **EXACT)), tokens()
    found = training_pass(model, rows, marked(balance=True))
    total_B, count_B = torch.zeros(2, dtype=torch.float64), torch.zeros(2)
    for row, where in pieces():
        alone = training_pass(model, rows[row : row + 1, where])
        size = where.stop - where.start
        total_B[row] += size * alone.regularisation_B[0]
        count_B[row] += size
    torch.testing.assert_close(found.regularisation_B, total_B / count_B, rtol=1e-6, atol=0)
    assert found.regularisation_B.all()


# Padding is a token of a mixture like any other, and one of the rows of which experts take a share.
UNPADDED = [
    name
    for name in NAMES
    if name not in ("mixture_of_tokens", "soft_moe", "transition", "expert_choice_flat")
]
DRAWS = {
    "gshard": ("second_expert", "always"),
    "sigma_moe_original": ("expert_dropout", 0.0),
    "x_moe_torchscale": ("top_k", 1),
}


@pytest.mark.parametrize("name", UNPADDED)
def test_padding_changes_nothing(name: str) -> None:
    """Outputs, losses, loads and what routers carry are those of the rows without it."""
    changes = without_draws(name)
    config = tiny_config(name)
    router = None if config.experts is None else config.experts.router
    if getattr(router, "capacity_factor", None) is not None:  # else it follows the number of rows
        changes = {"feed_forward.router.capacity_factor": 100.0}
    if name in DRAWS:  # for padding too, and so other numbers for the rest
        changes["feed_forward.router." + DRAWS[name][0]] = DRAWS[name][1]
    sequences = config.group_sequences
    model = make_uneven(tiny_model(name, changes, **EXACT))
    rows = some_tokens(max(2, sequences), 9, seed=6)
    padded = torch.cat((rows, torch.full((len(rows), 3), 5)), 1)
    ids = torch.zeros_like(padded)
    ids[:, 9:] = -1
    expected = training_pass(model, rows)
    found = training_pass(model, padded, marked(ids, attention=False))
    torch.testing.assert_close(found.logits_BSV[:, :9], expected.logits_BSV)
    torch.testing.assert_close(found.regularisation_B, expected.regularisation_B)
    torch.testing.assert_close(found.auxiliary, expected.auxiliary)
    torch.testing.assert_close(found.carried, expected.carried)
    if name == "expert_choice":  # at a position of nothing but padding experts take padding
        return
    for kind, load in expected.loads.items():
        assert torch.equal(found.loads[kind].load_LN, load.load_LN), kind
        assert torch.equal(found.loads[kind].wanted_L, load.wanted_L), kind
        torch.testing.assert_close(found.loads[kind].gate_sum_L, load.gate_sum_L)


@pytest.mark.parametrize("order", ["position_major", "token_major", "slot_major", "priority"])
def test_padding_takes_no_place_in_a_capacity(order: str) -> None:
    """Rows ask in an order in which padding comes first; half of all find a place."""
    asks = {"kind": "token_choice", "top_k": 1, "capacity_factor": 0.5, "drop_order": order}
    model = make_uneven(tiny_model("switch", {"feed_forward.router": asks}))
    router = layers(model)[-1].feed_forward.router
    x_TD = torch.randn(12, 24, generator=torch.Generator().manual_seed(7))
    x_TD[:6] = x_TD[0] * 2  # padding, all for one expert, and surer of it than the others
    chosen = router(x_TD, batch_size=2, real_T=torch.arange(12) >= 6).routes
    assert chosen.source_N.min() >= 6
    wanted = router.choose(x_TD).experts_TK[6:, 0].bincount(minlength=router.num_experts)
    served = chosen.expert_N.bincount(minlength=router.num_experts)
    assert torch.equal(served, wanted.clamp_max(math.ceil(0.5 * 12 / router.num_experts)))


def test_experts_take_padding_last() -> None:
    model = make_uneven(tiny_model("expert_choice"))
    router = next(each for _, kind, each in model.routers() if kind == "feed_forward")
    members = router.config.sequences_per_group
    taken = router.config.taken(router.num_experts, members)
    x_TD = torch.randn(members, 24, generator=torch.Generator().manual_seed(8))
    for num_real in (members - 1, taken, 1):
        real_T = torch.arange(members) >= members - num_real
        routes = router(x_TD, batch_size=members, real_T=real_T).routes
        for expert in range(router.num_experts):
            rows = routes.source_N[routes.expert_N == expert]
            assert int(real_T[rows].sum()) == min(taken, num_real)


@pytest.mark.parametrize("name", ["moeut", "sut", "sut_no_act", "top_k", "deepseek", "dense"])
@pytest.mark.parametrize("balance", [False, True])
def test_a_micro_batch_of_nothing_but_padding_is_no_nan(name: str, balance: bool) -> None:
    model = make_uneven(tiny_model(name))
    found = training_pass(model, tokens(), marked(torch.full_like(IDS, -1), balance=balance))
    assert found.logits_BSV.isfinite().all()
    assert found.regularisation_B.tolist() == [0.0, 0.0]
    (found.logits_BSV.sum() + found.regularisation_B.sum()).backward()
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()
    assert all(int(load.load_LN.sum()) == 0 for load in found.loads.values())
