"""What an expert computes does not depend on its slot: on which experts stand beside it, and how many
rows they have.

Expert parallelism gives a rank some of the experts, in slots that begin elsewhere in memory, and
their rows. If all that a rank computes has the bits that one rank has, so has the whole layer. In
memory every row of an odd width begins somewhere else, as every matrix of an odd size does.
"""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_cases import BIASES, Case, Perceptrons, values_and_gradients
from torch import Tensor

from moebius.kernels.backend import reason_against
from moebius.kernels.functional import routed_linear
from moebius.model.routing import token_routes

TOKENS, EXPERTS = 90, 5
WIDTHS = (3, 7, 8, 10, 41)
RANKS = ((0, 1), (1, 3), (3, 5))  # first and last slot + 1 of each
KINDS = [
    ("segments", torch.float64),
    ("segments", torch.float32),
    ("segments", torch.bfloat16),
    ("brgemm", torch.float32),
    ("brgemm", torch.bfloat16),
]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("backend", "dtype"), KINDS, ids=str)
def test_an_experts_bits_do_not_depend_on_its_slot(backend: str, dtype: torch.dtype) -> None:
    """Values and all gradients, for odd widths and small ones, three ranks against one."""
    if (reason := reason_against(backend, "cpu", dtype)) is not None:
        pytest.skip(f"{backend}: {reason}")
    for place, (d_in, d_hidden) in enumerate(itertools.product(WIDTHS, WIDTHS)):
        generator = torch.Generator().manual_seed(place)
        operation, weights = an_operation(place, d_in, d_hidden, generator)
        weights = [w.to(dtype) for w in weights]
        width = weights[min(1, len(weights) - 1)].shape[2]
        x, grad = (
            torch.randn(TOKENS, columns, generator=generator).to(dtype) for columns in (d_in, width)
        )
        expert_of = torch.randint(0, EXPERTS, (TOKENS,), generator=generator)
        whole = on_a_rank(operation, x, weights, grad, expert_of, (0, EXPERTS), backend)
        for slots in RANKS:
            some = on_a_rank(operation, x, weights, grad, expert_of, slots, backend)
            unlike = [
                number
                for number, (mine, theirs) in enumerate(zip(some, whole, strict=True))
                if not torch.equal(mine, of_a_rank(theirs, expert_of, slots))
            ]
            assert unlike == [], (d_in, d_hidden, operation, slots)


def an_operation(
    place: int, d_in: int, d_hidden: int, generator: torch.Generator
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Perceptrons and matrices in turn."""
    kinds = ("relu", "geglu", "linear")
    kind = kinds[place % len(kinds)]
    if kind == "linear":
        return routed_linear, [torch.randn(EXPERTS, d_in, d_hidden, generator=generator)]
    operation = Perceptrons(kind, BIASES["both biases"])
    return operation, operation.weights(Case(TOKENS, d_in, d_hidden, EXPERTS, 1), generator)


def on_a_rank(
    operation: Callable[..., Tensor],
    x: Tensor,
    weights: list[Tensor],
    grad: Tensor,
    expert_of: Tensor,
    slots: tuple[int, int],
    backend: str,
) -> list[Tensor]:
    """Values and gradients of a rank that has these experts and the rows that go to them."""
    first, end = slots
    here = (expert_of >= first) & (expert_of < end)
    gate = torch.full((int(here.sum()), 1), 0.7, dtype=torch.promote_types(x.dtype, torch.float32))
    routes = token_routes(expert_of[here, None] - first, gate, num_experts=end - first)
    own = [w[first:end].contiguous() for w in weights]
    return values_and_gradients(operation, x[here], own, routes, grad[here], backend)


def of_a_rank(values: Tensor, expert_of: Tensor, slots: tuple[int, int]) -> Tensor:
    """A rank's part of rows of tokens or of gradients of a bank, which tell themselves by their length."""
    first, end = slots
    if len(values) == TOKENS:
        return values[(expert_of >= first) & (expert_of < end)]
    return values[first:end]
