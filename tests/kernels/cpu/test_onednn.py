"""Float32 through oneDNN: allowed only if a trial finds it exact, with the same values."""

from collections.abc import Iterator

import pytest
import torch
from kernel_cases import CASES, check, make_call
from torch import Tensor

from moebius.kernels.cpu import onednn


@pytest.fixture(autouse=True)
def back_to_mkl() -> Iterator[None]:
    assert not onednn.float32_is_onednn()
    yield
    onednn.allow(False)


def test_a_trial_leaves_the_setting_as_it_was() -> None:
    for setting in (False, True):
        onednn.allow(setting)
        assert 0 < onednn.relative_error() < 1e-2  # rounded operands at the worst
        assert onednn.float32_is_onednn() == setting


def test_rounded_operands_are_not_exact() -> None:
    a, b = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for shape in ((64, 512), (512, 64))
    )

    def error(product: Tensor) -> float:
        exact = a.double() @ b.double()
        return ((product.double() - exact).norm() / exact.norm()).item()

    assert error(a @ b) < onednn.EXACT < error(a.bfloat16().float() @ b.bfloat16().float())


def test_where_it_is_not_exact_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "relative_error", lambda: 2e-3)
    with pytest.raises(ValueError, match=r"relative error of 2.0e-03 .* set kernels.onednn=false"):
        onednn.allow_if_exact()
    assert not onednn.float32_is_onednn()


@pytest.mark.parametrize("name", CASES)
def test_the_experts_are_as_exact_with_it(name: str) -> None:
    if (error := onednn.relative_error()) >= onednn.EXACT:
        pytest.skip(f"this CPU rounds: {error}")
    onednn.allow_if_exact()
    check(*make_call(name, "relu", "no bias"), "segments")
