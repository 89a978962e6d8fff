"""How many programs a multiprocessor runs at once, by NVIDIA's own arithmetic."""

import pytest

from moebius.kernels.triton.tiles import TARGETS, TILES, router_gradient_tiles, router_tile
from moebius.planning.occupancy import (
    MULTIPROCESSORS,
    Needs,
    block_key,
    compiled_programs,
    kernel_key,
    programs_at_once,
)


@pytest.mark.parametrize(
    ("target", "needs", "programs"),
    [
        ("sm_90", Needs(32, 0, 8), 8),  # 64 warps
        ("sm_90", Needs(128, 0, 8), 2),  # 65,536 registers / (128 · 256)
        ("sm_90", Needs(129, 0, 8), 1),  # dealt out by 256 to a warp: 136 for each thread
        ("sm_90", Needs(32, 96 * 1024, 8), 2),  # 228 KiB / (96 + 1)
        ("sm_90", Needs(32, 114 * 1024, 8), 1),
        ("sm_90", Needs(16, 0, 1), 32),  # blocks
        ("sm_80", Needs(32, 80 * 1024, 4), 2),  # 164 KiB / (80 + 1)
        ("sm_89", Needs(32, 40 * 1024, 4), 2),  # 100 KiB
        ("sm_89", Needs(32, 0, 8), 6),  # 48 warps
        ("sm_90", Needs(32, 300 * 1024, 8), 0),
        ("sm_100", Needs(32, 1024, 4, tensor_columns=256), 2),
        ("gfx942", Needs(128, 0, 4), 4),  # 4 waves of 512 registers on each of 4 SIMDs
        ("gfx942", Needs(32, 40 * 1024, 4), 1),  # 64 KiB
        ("gfx950", Needs(32, 40 * 1024, 4), 4),  # 160 KiB
    ],
)
def test_programs_at_once(target: str, needs: Needs, programs: int) -> None:
    assert programs_at_once(needs, target) == programs


def test_every_target_of_the_kernels_is_known() -> None:
    assert set(MULTIPROCESSORS) == set(TARGETS)


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
def test_every_default_tile_was_compiled(target: str) -> None:
    """What the planner asks for has an answer: of every entry some kernel runs at least once."""
    found = compiled_programs(target)
    assert all(count >= 1 for count in found.values())
    own = ("route ", "row_gradient ", "weight_gradient ")
    tiled = {name for name in found if not name.startswith(own)}
    compiled_entries = {tuple(name.removesuffix(" odd").split()[-3:]) for name in tiled}
    assert compiled_entries == set(TILES)
    for experts in (40, 387):
        backward = router_gradient_tiles(target, 16384, experts, 1024)
        taken = zip(own, (router_tile(target, 16384, experts), *backward), strict=True)
        for kernel, tile in taken:
            assert found[block_key(kernel.strip(), tile.rows, tile.columns)] >= 1
    assert found[kernel_key("rows_product", "", ("rows", "bf16", "many"))] >= 1


def test_what_the_documents_say_of_sm_90() -> None:
    """Two programs of K1 forward (relu) and of K2 share a multiprocessor."""
    found = compiled_programs("sm_90")
    assert found[kernel_key("gathered_activation", "relu", ("gather", "bf16", "many"))] == 2
    assert found[kernel_key("rows_product", "", ("rows", "bf16", "many"))] == 2


def test_nothing_is_known_of_other_targets() -> None:
    assert compiled_programs("sm_75") == {}
