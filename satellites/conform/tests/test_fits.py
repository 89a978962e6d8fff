"""The kit's arithmetic without ranks: shapes, scenes, comparisons."""

import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from moebius_conform import Layer, Shard
from moebius_conform.compare import relative_error
from moebius_conform.contract import ContractError, as_layer, load, spec_of
from moebius_conform.ranks.values import draw
from moebius_conform.ranks.weights import find_router, locate
from moebius_conform.scenes import SCENES, Facts, Scene, batch, fitting, spoiled_row

FACTS = Facts(width=16, num_experts=8, top_k=2, steered=True, given=False)


def build(group: object) -> nn.Module:
    """Stands for a user's function."""
    raise AssertionError(f"nothing here builds a layer for {group}")


def test_shards_are_read_off_shapes_and_names() -> None:
    full = {"gate.weight": (8, 16), "experts.w": (8, 16, 6), "w2": (6, 8), "b": (16,)}
    ours = {"gate.weight": (8, 16), "experts.w": (2, 16, 6), "w2": (6, 2), "b": (16,)}
    assert locate(ours, full, Layer(build), 3, 4) == {
        "gate.weight": None,
        "experts.w": Shard("experts.w", 0, 6, 8),
        "w2": Shard("w2", 1, 6, 8),
        "b": None,
    }


def test_lists_of_experts_are_counted_per_rank_or_over_all() -> None:
    full = {f"experts.{expert}.w1.weight": (6, 16) for expert in range(4)}
    per_rank = {f"experts.{expert}.w1.weight": (6, 16) for expert in range(2)}
    over_all = {f"experts.{expert}.w1.weight": (6, 16) for expert in (2, 3)}
    last_two = [Shard(f"experts.{expert}.w1.weight", None) for expert in (2, 3)]
    for ours in (per_rank, over_all):
        assert list(locate(ours, full, Layer(build), 1, 2).values()) == last_two


def test_a_shape_that_fits_nowhere_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ContractError, match=r"w \(3,\) on rank 0 of 2 .* Layer\.shards"):
        locate({"w": (3,)}, {"w": (8,)}, Layer(build), 0, 2)


def test_the_router_is_found_by_name_and_shape() -> None:
    shapes = {"mlp.gate.weight": (8, 16), "experts.gate_up_proj": (8, 16, 6), "up": (8, 16)}
    assert find_router(shapes, Layer(build)) == "mlp.gate.weight"
    assert find_router(shapes, Layer(build, router="up")) == "up"
    with pytest.raises(ContractError, match="router='none'"):
        find_router(shapes, Layer(build, router="none"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("scene", fitting(FACTS), ids=lambda scene: scene.name)
def test_the_router_sends_rows_where_a_scene_says(scene: Scene, ranks: int) -> None:
    rows = batch(scene, ranks, FACTS)
    sound = np.isfinite(rows.x_TD).all(axis=-1)
    logits_TE = rows.x_TD[sound] @ draw("gate.weight", (8, 16), "gate.weight").T
    chosen = np.sort(logits_TE.argsort(axis=-1)[:, -2:], axis=-1)
    np.testing.assert_array_equal(chosen, np.sort(rows.experts_TK[sound], axis=-1))


def test_a_ranks_rows_are_its_own() -> None:
    there, here = (batch(SCENES[n], 4, FACTS) for n in ("other samples elsewhere", "uneven"))
    np.testing.assert_array_equal(here.x_TD[here.rows_of(0)], there.x_TD[there.rows_of(0)])
    assert (here.x_TD[here.rows_of(1)] != there.x_TD[there.rows_of(1)]).any()
    spoiled = batch(SCENES["NaN in one token"], 4, FACTS)
    (row,) = np.flatnonzero(np.isnan(spoiled.x_TD[:, 0]))
    assert row == spoiled_row(spoiled.counts)


def test_errors_are_relative_and_count_where_the_reference_is_finite() -> None:
    want = np.array([3.0, np.nan, 4.0])
    assert relative_error(np.array([3.0, 7.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_error(np.array([3.0, 7.0, np.nan]), want) == float("inf")
    assert relative_error(np.zeros(2), want) == float("inf")


def test_a_layer_is_named_by_file_and_module(tmp_path: Path) -> None:
    assert spec_of(build) == f"{__file__}:build"
    file = tmp_path / "its_layers.py"
    file.write_text(
        "from moebius_conform import Layer\n"
        "def build(group): ...\n"
        "def settings(): return Layer(build, top_k=3)\n"
    )
    assert load(f"{file}:build").top_k == 2
    assert load(f"{file}:settings").top_k == 3
    with pytest.raises(ContractError, match="ranks find a layer by its name"):
        spec_of(Layer(nn.Linear))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="neither a Layer"):
        as_layer(3, "x:y")
    sys.path.remove(str(tmp_path))
