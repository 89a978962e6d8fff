"""The bits that an expert computes do not depend on the place of its rows and weights.

Expert parallelism gives a rank some experts, whose weights and rows have other addresses and
neighbours than on one rank. If each rank computes the same bits as one rank does, so does the layer.
With odd widths and sizes, every row and matrix has a different alignment.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
from kernel_cases import BIASES, Case, Operation, Perceptrons, values_and_gradients
from pairwise import parametrize_pairs
from row_order import assert_reordered, reordered
from torch import Tensor

from moebius.kernels.backend import reason_against
from moebius.kernels.cpu import brgemm
from moebius.kernels.functional import routed_linear
from moebius.kernels.reference import ACTIVATIONS
from moebius.model.routing import token_routes

TOKENS, EXPERTS = 90, 5
WIDTHS = (3, 7, 8, 10, 41)
RANKS = ((0, 1), (1, 3), (3, 5))  # first and last slot + 1 of each
KINDS = [
    pytest.param(backend, dtype, id=f"{backend}-{str(dtype).removeprefix('torch.')}")
    for backend, dtype in (
        ("segments", torch.float64),
        ("segments", torch.float32),
        ("segments", torch.bfloat16),
        ("brgemm", torch.float32),
        ("brgemm", torch.bfloat16),
    )
]


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """As many threads as the test asks for, or one."""
    parameters = request.node.callspec.params
    if reason := reason_against(parameters["backend"], "cpu", parameters["dtype"]):
        pytest.skip(f"{parameters['backend']}: {reason}")
    before = torch.get_num_threads()
    torch.set_num_threads(parameters.get("num_threads", 1))
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("backend", "dtype"), KINDS)
def test_an_experts_bits_do_not_depend_on_its_slot(backend: str, dtype: torch.dtype) -> None:
    """Values and all gradients, for odd widths and small ones, three ranks against one."""
    for widths, given in drawn(dtype):
        operation, *_, expert_of = given
        whole = on_a_rank(*given, (0, EXPERTS), backend)
        for slots in RANKS:
            some = on_a_rank(*given, slots, backend)
            for mine, theirs in zip(some, whole, strict=True):
                same = torch.equal(mine, of_a_rank(theirs, expert_of, slots))
                assert same, (widths, operation, slots)


@pytest.mark.parametrize(("backend", "dtype"), KINDS[:2])
def test_rows_of_odd_widths_begin_at_multiples_of_16_bytes(
    backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some CPUs MKL rounds unaligned rows differently; here the bits may agree anyway."""
    product, rows_read = torch.mm, []

    def recorded(left: Tensor, right: Tensor, **named: Tensor) -> Tensor:
        rows_read.extend((left, *named.values()))
        return product(left, right, **named)

    monkeypatch.setattr(torch, "mm", recorded)
    for _, given in drawn(dtype):
        on_a_rank(*given, (0, EXPERTS), backend)
    assert rows_read
    for rows in rows_read:
        assert rows.data_ptr() % 16 == 0
        assert rows.stride(0) * rows.element_size() % 16 == 0


def drawn(
    dtype: torch.dtype,
) -> Iterator[tuple[tuple[int, int], tuple[Operation, Tensor, list[Tensor], Tensor, Tensor]]]:
    """Perceptrons and matrices in turn, of odd widths and small ones: operation, rows, weights,
    gradient, and every row's expert.
    """
    kinds = itertools.cycle(("relu", "geglu", "linear"))
    for place, (d_in, d_hidden) in enumerate(itertools.product(WIDTHS, WIDTHS)):
        kind, generator = next(kinds), torch.Generator().manual_seed(place)
        operation: Operation = routed_linear
        weights = [torch.randn(EXPERTS, d_in, d_hidden, generator=generator)]
        if kind != "linear":
            operation = perceptrons = Perceptrons(kind, BIASES["both biases"])
            weights = perceptrons.weights(Case(TOKENS, d_in, d_hidden, EXPERTS, 1), generator)
        weights = [w.to(dtype) for w in weights]
        widths = d_in, weights[min(1, len(weights) - 1)].shape[2]
        x, grad = (torch.randn(TOKENS, w, generator=generator).to(dtype) for w in widths)
        expert_of = torch.randint(0, EXPERTS, (TOKENS,), generator=generator)
        yield (d_in, d_hidden), (operation, x, weights, grad, expert_of)


def on_a_rank(
    operation: Operation,
    x: Tensor,
    weights: list[Tensor],
    grad: Tensor,
    expert_of: Tensor,
    slots: tuple[int, int],
    backend: str,
) -> list[Tensor]:
    """Values and gradients of a rank with these experts and their rows."""
    first, end = slots
    here = (expert_of >= first) & (expert_of < end)
    gate = torch.full((int(here.sum()), 1), 0.7, dtype=torch.promote_types(x.dtype, torch.float32))
    routes = token_routes(expert_of[here, None] - first, gate, num_experts=end - first)
    own = [w[first:end].contiguous() for w in weights]
    return values_and_gradients(operation, x[here], own, routes, grad[here], backend)


def of_a_rank(values: Tensor, expert_of: Tensor, slots: tuple[int, int]) -> Tensor:
    """A rank's part of token rows or of a bank's gradients, distinguished by their length."""
    first, end = slots
    if len(values) == TOKENS:
        return values[(expert_of >= first) & (expert_of < end)]
    return values[first:end]


@pytest.mark.sample(8)
@parametrize_pairs(
    {"activation": ACTIVATIONS, ("backend", "dtype"): KINDS, "num_threads": [1, 2]},
)
def test_a_row_does_not_depend_on_how_many_rows_share_its_expert(
    activation: str, backend: str, dtype: torch.dtype, num_threads: int
) -> None:
    """A row computed among 1, 2, 3, … or 600 others is the same, as its gradients are.

    To the bit with `brgemm`, up to rounding with torch's products. Widths of 40, and of 13: no multiple
    of any vector's width.
    """
    bound = 0.0 if backend == "brgemm" else reordered(48, 3, dtype)
    operation = Perceptrons(activation, BIASES["both biases"])
    for hidden in (40, 13):
        generator = torch.Generator().manual_seed(4)
        x, grad = (torch.randn(600, width, generator=generator).to(dtype) for width in (47, 48))
        weights = [w.to(dtype) for w in operation.weights(Case(600, 47, hidden, 1, 1), generator)]

        def run(count: int, x=x, grad=grad, weights=weights) -> list[Tensor]:
            gates = torch.full((count, 1), 0.7)
            routes = token_routes(torch.zeros_like(gates).long(), gates, num_experts=1)
            given = operation, x[:count], weights, routes, grad[:count], backend
            y, grad_x, *_, grad_gate = values_and_gradients(*given)
            return [y, grad_x, grad_gate]

        whole = run(600)
        for count in (*range(1, 20), 63, 64, 65, 300):
            for mine, theirs in zip(run(count), whole, strict=True):
                assert_reordered(mine, theirs[:count], bound)


@pytest.mark.parametrize("transposed", [False, True], ids=["matrix", "transposed"])
@pytest.mark.parametrize("k", [1023, 1024, 1025, 2047, 2048, 2049, 2050])
@pytest.mark.parametrize(("backend", "dtype"), KINDS[3:])
def test_a_row_among_others_has_the_same_bits_by_matrices_in_panels(
    backend: str, dtype: torch.dtype, k: int, transposed: bool
) -> None:
    """With sums around the lengths at which they are divided, and with so few rows that a float32
    matrix is not copied, so many that it is.
    """
    generator = torch.Generator().manual_seed(k)
    rows = torch.randn(300, k, generator=generator).to(dtype)
    matrix = torch.randn(k, 144, generator=generator).to(dtype)
    given = matrix.T.contiguous() if transposed else matrix
    whole = brgemm.product(rows, given, transposed=transposed)
    expected = rows.double() @ matrix.double()
    error = (whole.double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype is torch.float32 else 3e-3)
    for count in (1, 5, 63, 64, 65, 255, 256):
        few = brgemm.product(rows[:count], given, transposed=transposed)
        assert torch.equal(few, whole[:count]), count
