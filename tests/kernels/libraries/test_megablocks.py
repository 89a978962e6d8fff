"""The backend on MegaBlocks: against the reference where MegaBlocks is installed; everywhere, what
is asked of its operators.

Everywhere means with a stand-in: the operators' meaning in plain torch, and all that the real ones
refuse.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import kernel_cases
import pytest
import torch
from kernel_cases import BIASES, CASES, Case, Perceptrons, irregular, make_routes
from torch import Tensor

from moebius.kernels import backend
from moebius.kernels.activations import ACTIVATIONS
from moebius.kernels.functional import routed_linear
from moebius.kernels.libraries import megablocks_available as megablocks_library
from moebius.model.routing import Routes

ROOT = Path(__file__).parents[3]
CUDA = torch.device("cuda")
MISSING = (
    megablocks_library.reason_against("cuda", torch.bfloat16)
    if torch.cuda.is_available()
    else "no GPU here"
)


# The stand-in -------------------------------------------------------------------------------------------------------


class StandIn:
    """`megablocks.ops` and `grouped_gemm.backend`, as far as they are used. Unwritten memory is not
    a number.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def gather(
        self, x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int
    ) -> Tensor:
        """Row i of the result is x[indices[i] // top_k]."""
        self.calls.append("gather")
        self._check_places(indices, bin_ids, bins)
        assert x.ndim == 2
        assert x.is_contiguous()
        assert indices.shape[0] == x.shape[0] * top_k
        return x[(indices // top_k).long()]

    def scatter(
        self,
        x: Tensor,
        indices: Tensor,
        bin_ids: Tensor,
        weights: Tensor | None,
        bins: Tensor,
        top_k: int,
    ) -> Tensor:
        """Row indices[i] of a list is row i of x; of that list, the sums of top_k neighbours."""
        self.calls.append("scatter")
        self._check_places(indices, bin_ids, bins)
        assert weights is None
        assert x.is_contiguous()
        num_rows = indices.shape[0]
        out = torch.full((num_rows, x.shape[1]), float("nan"), dtype=x.dtype)
        out[indices.long()] = x[:num_rows]
        return out.view(num_rows // top_k, top_k, -1).sum(1)

    def gmm(
        self,
        a: Tensor,
        b: Tensor,
        batch_sizes: Tensor,
        trans_a: bool = False,
        trans_b: bool = False,
        c: Tensor | None = None,
    ) -> Tensor:
        """Group by group a · b, with b of each group transposed, or aᵀ · b of the group's rows."""
        self.calls.append("trans_a" if trans_a else "trans_b" if trans_b else "plain")
        assert not (trans_a and trans_b)
        assert batch_sizes.dtype == torch.int64
        assert batch_sizes.device.type == "cpu"
        assert batch_sizes.ndim == 1
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert a.ndim == 2
        assert b.ndim == (2 if trans_a else 3)
        sizes = batch_sizes.tolist()
        if trans_a:
            assert c is None
            assert a.shape[0] == b.shape[0] == sum(sizes)
            groups = zip(a.split(sizes), b.split(sizes), strict=True)
            return torch.stack([left.T @ right for left, right in groups])
        matrices = b.transpose(1, 2) if trans_b else b
        assert len(sizes) == len(b)
        assert matrices.shape[1] == a.shape[1]
        result = torch.cat(
            [rows @ matrix for rows, matrix in zip(a.split(sizes), matrices, strict=True)]
        )
        if c is None:
            return result
        assert c.is_contiguous()
        return c.copy_(result)

    def _check_places(self, indices: Tensor, bin_ids: Tensor, bins: Tensor) -> None:
        """Place i is in the bin that it is said to be in; all of it in 32 bits, as the kernels read
        it.
        """
        assert {t.dtype for t in (indices, bin_ids, bins)} == {torch.int32}
        assert indices.shape == bin_ids.shape
        starts = torch.cat((bins.new_zeros(1), bins))
        places = torch.arange(len(indices))
        assert bool((starts[bin_ids.long()] <= places).all())
        assert bool((places < bins[bin_ids.long()]).all())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Behind the operations on this machine's CPU, in any dtype."""
    found = StandIn()
    for name, operators in (
        ("megablocks.ops", ("gather", "scatter")),
        ("grouped_gemm.backend", ("gmm",)),
    ):
        parent, module = ModuleType(name.split(".")[0]), ModuleType(name)
        for operator in operators:
            setattr(module, operator, getattr(found, operator))
        monkeypatch.setitem(sys.modules, parent.__name__, parent)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(megablocks_library, "reason_against", lambda *_: None)
    forget()
    yield found
    forget()


def forget() -> None:
    """What was found, and what was said against it."""
    megablocks_library.load_library.cache_clear()
    backend.reason_against.cache_clear()


def check(
    operation, x: Tensor, weights: list[Tensor], routes: Routes, tolerance: float = 1e-5
) -> None:
    kernel_cases.check(operation, x, weights, routes, tolerance, backend="megablocks")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("biases", ["no bias", "both biases"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", CASES)
def test_mlp_with_the_operators_meaning_equals_the_reference(
    name: str, activation: str, biases: str
) -> None:
    case, operation, generator = (
        CASES[name],
        Perceptrons(activation, BIASES[biases]),
        torch.Generator().manual_seed(1),
    )
    routes = make_routes(case, generator)
    x, weights = (
        torch.randn(case.tokens, case.d_in, generator=generator),
        operation.weights(case, generator),
    )
    check(operation, x, weights, routes)
    check(operation, x, weights, irregular(routes))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("widths", [(24, 8), (8, 24), (8, 8)], ids=str)
@pytest.mark.parametrize("direction", ["token to head", "head to token"])
def test_linear_with_the_operators_meaning_equals_the_reference(
    direction: str, widths: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(2)
    routes, rows = kernel_cases.head_routes(direction, generator)
    x = torch.randn(rows, widths[0], generator=generator)
    w = torch.randn(routes.num_experts, widths[1], widths[0], generator=generator).transpose(1, 2)
    check(routed_linear, x, [w], routes)
    check(routed_linear, x, [w], irregular(routes))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", ["slots", "expert choice", "two slots of a row"])
def test_routes_that_stand_in_order(kind: str) -> None:
    (routes, rows), generator = kernel_cases.equal_counts(kind), torch.Generator().manual_seed(15)
    x, operation = (
        torch.randn(rows, 12, generator=generator),
        Perceptrons("swiglu", BIASES["both biases"]),
    )
    check(operation, x, operation.weights(Case(rows, 12, 7, 5, 1), generator), routes)
    check(routed_linear, x, [torch.randn(5, 12, 13, generator=generator)], routes)


def test_the_work_is_done_by_its_operators(stand_in: StandIn) -> None:
    """Forward: one gather, two products, one scatter. Backward: two gathers, two products of rows
    and two of weights.
    """
    case, generator = CASES["random"], torch.Generator().manual_seed(3)
    routes, operation = make_routes(case, generator), Perceptrons("relu")
    x, weights = (
        torch.randn(case.tokens, case.d_in, generator=generator),
        operation.weights(case, generator),
    )
    y = operation(
        x.requires_grad_(), *(w.requires_grad_() for w in weights), routes, backend="megablocks"
    )
    assert stand_in.calls == ["gather", "plain", "plain", "scatter"]
    stand_in.calls.clear()
    y.sum().backward()
    assert (
        sorted(stand_in.calls) == ["gather"] * 2 + ["scatter"] + ["trans_a"] * 2 + ["trans_b"] * 2
    )


# What is said where it cannot run ---------------------------------------------------------------------------------------


def test_where_it_is_missing_the_error_says_why_and_has_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "megablocks.ops", None)
    with pytest.raises(ValueError, match="backend='megablocks' cannot run here") as error:
        backend.resolve_backend("megablocks", CUDA, torch.bfloat16)
    forget()
    assert "(import of megablocks.ops halted" in str(error.value)
    assert megablocks_library.INSTALL_LINE in str(error.value)


def test_the_error_names_the_part_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "megablocks", ModuleType("megablocks"))
    monkeypatch.setitem(sys.modules, "megablocks.ops", ModuleType("megablocks.ops"))
    monkeypatch.setitem(sys.modules, "grouped_gemm.backend", None)
    reason = megablocks_library.reason_against("cuda", torch.bfloat16)
    assert reason is not None
    assert "(import of grouped_gemm.backend halted" in reason


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)], ids=str
)
def test_other_devices_and_dtypes_are_refused(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError,
        match=f"MegaBlocks is for bfloat16 on CUDA, and the weights are {dtype} on {device}",
    ):
        backend.resolve_backend("megablocks", torch.device(device), dtype)


def test_without_data_it_need_not_be_there() -> None:
    """A dry run on the meta device plans for a machine that has it."""
    assert (
        backend.resolve_backend("megablocks", torch.device("meta"), torch.bfloat16) == "megablocks"
    )


def test_the_line_and_the_file_ask_for_the_same() -> None:
    lines = (ROOT / "requirements-megablocks.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert megablocks_library.INSTALL_LINE.split()[-3:] == pins
    assert megablocks_library.INSTALL_LINE in (ROOT / "docs" / "kernels.md").read_text(
        encoding="utf-8"
    )


# Where it is installed --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(MISSING is not None, reason=f"MegaBlocks cannot run here: {MISSING}")
@pytest.mark.parametrize("name", CASES)
def test_megablocks_itself_equals_the_reference(name: str) -> None:
    kernel_cases.check_on_a_gpu(CASES[name], backend="megablocks")


@pytest.mark.skipif(MISSING is not None, reason=f"MegaBlocks cannot run here: {MISSING}")
def test_two_runs_of_megablocks_are_bitwise_equal() -> None:
    case, operation, generator = (
        CASES["odd widths"],
        Perceptrons("relu"),
        torch.Generator().manual_seed(6),
    )
    routes = kernel_cases.on_device(make_routes(case, generator), "cuda")
    x, grad = (
        torch.randn(case.tokens, width, generator=generator).bfloat16().cuda() for width in (41, 42)
    )
    weights = [w.bfloat16().cuda() for w in operation.weights(case, generator)]
    first, second = (
        kernel_cases.values_and_gradients(operation, x, weights, routes, grad, "megablocks")
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
