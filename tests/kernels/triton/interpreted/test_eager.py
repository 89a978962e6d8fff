"""Triton's operators in eager mode compute the bits that they compute through `torch.library`, and
kernels are launched on their tensors' device.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moebius.kernels.triton import guard
from moebius.kernels.triton.guard import cdiv, launch, next_power_of_2, triton


@pytest.mark.parametrize(("device", "is_entered"), [(-1, False), (0, False), (1, True)])
def test_a_kernel_is_launched_on_its_tensors_device(device: int, is_entered: bool) -> None:
    entered, launched = [], []
    tensor = SimpleNamespace(is_cuda=device >= 0, get_device=lambda: device)

    @contextmanager
    def device_of(tensor: Any) -> Iterator[None]:
        entered.append(tensor)
        yield

    def run(*args: Any, grid: tuple[int], warmup: bool, **constants: Any) -> None:
        assert (grid, warmup) == ((3,), False)
        launched.append((args, constants, list(entered)))

    with (
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "device_of", device_of),
    ):
        launch(SimpleNamespace(run=run), 3, None, tensor, 5, E=2)
        launch(None, 0, tensor)
    assert launched == [((None, tensor, 5), {"E": 2}, [tensor] * is_entered)]


def test_sizes_are_those_of_triton_which_takes_long_for_them() -> None:
    """A call of Triton's own functions on the host takes 3 µs."""
    for path in Path(guard.__file__).parent.glob("*.py"):
        assert not re.findall(r"triton\.(?:cdiv|next_power_of_2)\(", path.read_text()), path
    numbers: Sequence[int] = (1, 2, 3, 16, 17, 1000, 2**20 + 1)
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
    assert [cdiv(n, 7) for n in (0, *numbers)] == [triton.cdiv(n, 7) for n in (0, *numbers)]
