"""Counting and packing the sends of an exchange, in C++ and in torch operations, against loops."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from send_cases import CASES, addresses, check_received, check_sends, weights, with_wrong

from moebius.kernels import sends
from moebius.kernels.cpu import library


@pytest.fixture(params=["C++", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects C++ or torch."""
    if request.param == "torch":
        monkeypatch.setattr(library, "loaded", lambda: None)
    elif library.loaded() is None:
        pytest.skip("there is no compiler")
    return request.param


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("name", CASES)
def test_everything_is_written_down_as_by_loops(name: str, shuffled: bool) -> None:
    to = addresses(name, shuffled=shuffled)
    for dtype in (torch.float32, torch.float64):
        weight_N = weights(to, dtype)
        counts = sends.count_sends(to)
        packed = sends.pack_sends(to, counts, weight_N)
        check_sends(to, counts, packed, weight_N)
        came = sends.unpack_sends(packed.metadata_N4, counts.counts_P3, 7)
        check_received(came, packed.metadata_N4, counts.counts_P3)


@pytest.mark.usefixtures("implementation")
def test_lists_with_gaps_between_their_numbers_are_read_rightly() -> None:
    to = addresses("from heads")
    lists: dict[str, Any] = {
        name: torch.stack((getattr(to, name), getattr(to, name) + 1), 1)[:, 0]
        for name in ("source_N", "target_N", "expert_N")
    }
    spaced = replace(to, **lists)
    weight_N = weights(to)
    counts = sends.count_sends(spaced)
    wide_N = torch.stack((weight_N, weight_N), 1)[:, 1]
    check_sends(to, counts, sends.pack_sends(spaced, counts, wide_N), weight_N)


def test_torch_and_cpp_may_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    to = addresses("into heads", shuffled=True)
    weight_N, counts = weights(to), sends.count_sends(to)
    monkeypatch.setattr(library, "loaded", lambda: None)
    check_sends(to, counts, sends.pack_sends(to, counts, weight_N), weight_N)


@pytest.mark.parametrize("what", ["source_N", "target_N", "expert_N"])
def test_a_route_out_of_range_is_refused(what: str) -> None:
    if library.loaded() is None:
        pytest.skip("there is no compiler")
    with pytest.raises(IndexError, match=r"route 4 reads row"):
        sends.count_sends(with_wrong(addresses("tokens"), what))


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("number", [-1, 1000])
def test_routes_that_came_and_name_what_did_not_are_refused(column: int, number: int) -> None:
    if library.loaded() is None:
        pytest.skip("there is no compiler")
    to = addresses("tokens")
    counts = sends.count_sends(to)
    metadata_N4 = sends.pack_sends(to, counts, weights(to)).metadata_N4.clone()
    metadata_N4.view(torch.int32)[7, column] = number
    with pytest.raises(IndexError, match="rows, routes and targets of every source are"):
        sends.unpack_sends(metadata_N4, counts.counts_P3, 7)
    with pytest.raises(IndexError, match="some of the 120 received routes"):
        sends.unpack_sends(metadata_N4, counts.counts_P3[:-1], 7)
