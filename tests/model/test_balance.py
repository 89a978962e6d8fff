"""The balancing term against its formula written out, and its limits."""

import math

import torch

from moebius.model.balance import negative_entropy, report_routing
from moebius.model.routing import Routing, token_routes

E = 7


def routing(logits_T1E: torch.Tensor) -> Routing:
    experts = logits_T1E.squeeze(1).topk(2).indices
    return Routing(token_routes(experts, torch.full(experts.shape, 0.25), num_experts=E), logits_T1E)


def test_it_is_the_entropy_of_the_average_over_time_and_repeats() -> None:
    """log p = logsumexp over (r, t) of log_softmax(z) − ln(R·T); ℓ = Σ p ln p, per sequence."""
    batch, length, repeats = 3, 11, 4
    z_RBTE = torch.randn(repeats, batch, length, E, generator=torch.Generator().manual_seed(0)) * 3
    expected = []
    for b in range(batch):
        log_p = torch.logsumexp(z_RBTE[:, b].reshape(-1, E).log_softmax(-1), 0) - math.log(repeats * length)
        expected.append((log_p.exp() * log_p).sum())
    summed = torch.stack([report_routing(routing(z.reshape(-1, 1, E)), batch).softmax_sum_BHA for z in z_RBTE]).sum(0)
    torch.testing.assert_close(negative_entropy(summed, repeats * length), torch.stack(expected))


def test_bounds_and_no_nan_where_an_expert_is_never_likely() -> None:
    even = torch.full((1, 1, E), 5.0)
    torch.testing.assert_close(negative_entropy(even, 5 * E), torch.tensor([-math.log(E)]))
    logits = torch.full((4, 1, E), -1e4).index_fill(2, torch.tensor([2]), 1e4).requires_grad_()
    collapsed = negative_entropy(report_routing(routing(logits), 1).softmax_sum_BHA, 4)
    assert collapsed.item() == 0.0
    collapsed.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_loads_count_routes_and_gates() -> None:
    report = report_routing(routing(torch.randn(10, 1, E, generator=torch.Generator().manual_seed(1))), 2)
    assert report.load_N.sum().item() == 20
    assert report.gate_sum.item() == 5.0
    torch.testing.assert_close(report.softmax_sum_BHA.sum(), torch.tensor(10.0))
