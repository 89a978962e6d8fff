"""Lists of routes: which rows they name, by loops, and that rows are listed for readers alone."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moebius.kernels.functional import routed_linear
from moebius.model.routing import (
    Routes,
    head_to_token_routes,
    slot_routes,
    token_routes,
    token_to_head_routes,
)

TOKENS, HEADS, TOP_K, EXPERTS = 5, 3, 2, 6
MAKERS: dict[str, Callable[[], Routes]] = {
    "token": lambda: token_routes(*chosen(TOKENS), num_experts=EXPERTS),
    "token to head": lambda: token_to_head_routes(*chosen(TOKENS, HEADS), num_experts=EXPERTS),
    "head to token": lambda: head_to_token_routes(*chosen(TOKENS, HEADS), num_experts=EXPERTS),
    "slot": lambda: slot_routes(12, num_experts=EXPERTS, device=torch.device("cpu")),
}
# (source, target) of every route, in order
ROWS = {
    "token": [(token, token) for token in range(TOKENS) for _ in range(TOP_K)],
    "token to head": [
        (token, token * HEADS + head)
        for token in range(TOKENS)
        for head in range(HEADS)
        for _ in range(TOP_K)
    ],
    "slot": [(slot, slot) for slot in range(12)],
}
ROWS["head to token"] = [(target, source) for source, target in ROWS["token to head"]]


def chosen(*rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and gates of rows."""
    generator = torch.Generator().manual_seed(0)
    experts = torch.randint(EXPERTS, (*rows, TOP_K), generator=generator)
    return experts, torch.rand(*rows, TOP_K, generator=generator)


def is_listed(routes: Routes) -> bool:
    """Whether any rows were written down."""
    return bool({"source_N", "target_N"} & set(vars(routes)))


@pytest.mark.parametrize("name", MAKERS)
def test_rows_follow_the_rules(name: str) -> None:
    routes = MAKERS[name]()
    assert not is_listed(routes)
    sources, targets = zip(*ROWS[name], strict=True)
    assert routes.source_N.tolist() == list(sources)
    assert routes.target_N.tolist() == list(targets)
    assert routes.source_N.dtype == routes.target_N.dtype == torch.int64
    assert routes.source_N is routes.source_N
    assert routes.num_targets == max(targets) + 1
    assert (routes.target_N is routes.source_N) == (routes.per_source == routes.per_target)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("first", ["source_N", "target_N"])
def test_changed_and_copied_routes_keep_their_rows(name: str, first: str) -> None:
    """Whoever takes the rules away, copies or sends them gets the rows that the rules said."""
    sources, targets = zip(*ROWS[name], strict=True)
    for change in (
        lambda routes: replace(routes, per_source=0, per_target=0),
        lambda routes: routes.with_weights(routes.weight_N * 2),
        lambda routes: routes.kept(torch.ones(len(routes.expert_N), dtype=torch.bool)),
        copy.deepcopy,
        lambda routes: pickle.loads(pickle.dumps(routes)),
    ):
        routes = change(MAKERS[name]())
        getattr(routes, first)
        assert routes.source_N.tolist() == list(sources)
        assert routes.target_N.tolist() == list(targets)
    own = replace(MAKERS[name](), target_N=torch.zeros(len(sources), dtype=torch.int64))
    assert own.source_N.tolist() == list(sources)
    assert not own.target_N.any()


def test_kernels_read_no_list() -> None:
    experts, gates = chosen(TOKENS)
    routes = token_routes(experts, gates, num_experts=EXPERTS)
    x, w = torch.randn(TOKENS, 4), torch.randn(EXPERTS, 4, 3)
    y = routed_linear(x, w, routes, backend="segments")
    assert not is_listed(routes)
    listed = replace(routes, per_source=0, per_target=0)
    torch.testing.assert_close(y, routed_linear(x, w, listed, backend="segments"))
