"""Reduced gradients, their norm and clipping, against one process that holds everything."""

import math

import pytest
import torch
from meshes import meshed
from torch.nn import Parameter
from world import run_ranks

from moebius.distributed.gradients import (
    GradientReducer,
    clip_gradients,
    global_grad_norm,
)
from moebius.distributed.local_shard import block_shard, set_local_shard

NUM_EXPERTS = 4
DENSE_SHAPES = [(3, 5), (7,), (2, 3, 4), (1,)]
EXPERT_SHAPES = [(NUM_EXPERTS, 3, 2), (NUM_EXPERTS, 5)]
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
FOLDED = [
    (4, 2, 4),
    (4, 1, 2),
]  # ep borrows from a larger dp_shard: blocks of experts exist dp_replicate × efsdp times


def gradient(shape, *key, dtype=torch.float32):
    """The gradient of a (rank, parameter), the same on every call."""
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def missing(rank, index):
    """Some gradients are absent on some ranks; parameter 3 has one nowhere."""
    return index == 3 or (rank + index) % 3 == 0


def local_parameters(process, mesh, dtype):
    """This rank's parameters with this rank's gradients. Experts: the block of the ep index."""
    place, block = mesh.coordinates, NUM_EXPERTS // mesh.layout.ep
    dense, experts = [], []
    for index, shape in enumerate(DENSE_SHAPES):
        dense.append(Parameter(torch.zeros(shape, dtype=dtype)))
        if not missing(process.rank, index):
            dense[-1].grad = gradient(shape, 0, process.rank, index, dtype=dtype)
    for index, (_, *rest) in enumerate(EXPERT_SHAPES):
        experts.append(Parameter(torch.zeros((block, *rest), dtype=dtype)))
        if not missing(place.expert_replicas, index):
            full = gradient((NUM_EXPERTS, *rest), 1, place.expert_replicas, index, dtype=dtype)
            experts[-1].grad = full[place.ep * block : (place.ep + 1) * block].clone()
    hold_experts(experts, mesh)
    return dense, experts


def hold_experts(parameters, mesh):
    """Sets each parameter's shard: the block of the ep index."""
    for parameter in parameters:
        rows, *rest = parameter.shape
        shape = (NUM_EXPERTS, *rest)
        set_local_shard(
            parameter,
            block_shard(
                shape,
                0,
                mesh.coordinates.ep * rows,
                rows,
                ranks_per_copy=mesh.layout.ep,
                has_experts=True,
            ),
        )


def expected(world_size, ep, dtype):
    """What one process would have: sums over ranks (dense) and over replicas (experts), summed in
    float64.
    """
    dense = [torch.zeros(shape, dtype=torch.float64) for shape in DENSE_SHAPES]
    experts = [torch.zeros(shape, dtype=torch.float64) for shape in EXPERT_SHAPES]
    for rank in range(world_size):
        for index, total in enumerate(dense):
            if not missing(rank, index):
                total += gradient(total.shape, 0, rank, index, dtype=dtype).double()
    for replica in range(world_size // ep):
        for index, total in enumerate(experts):
            if not missing(replica, index):
                total += gradient(total.shape, 1, replica, index, dtype=dtype).double()
    return dense, experts


def reduced(ep, dtype, bucket_bytes, max_norm, dp_shard=None):
    with meshed(ep=ep, dp_shard=dp_shard) as (process, mesh):
        dense, experts = local_parameters(process, mesh, dtype)
        reducer = GradientReducer(dense, experts, mesh, bucket_bytes=bucket_bytes)
        own = [None if each.grad is None else each.grad.clone() for each in (*dense, *experts)]
        reducer.reduce()
        grads = [[parameter.grad.clone() for parameter in group] for group in (dense, experts)]
        reducer.zero_in_place()
        for parameter, gradient in zip((*dense, *experts), own, strict=True):
            if gradient is not None:
                parameter.grad += gradient
        reducer.reduce()
        for parameter, summed in zip((*dense, *experts), [*grads[0], *grads[1]], strict=True):
            assert torch.equal(parameter.grad, summed)
        parts = dict.fromkeys([*dense, *experts], "other")
        norm, sums, norms = clip_gradients(parts, mesh, max_norm=max_norm, by_part=True)
        assert sums == ()
        assert norms == {"other": norm}
        clipped = [[parameter.grad for parameter in group] for group in (dense, experts)]
        return grads, norm, clipped


def together(results, ep, which):
    """Dense gradients of rank 0, and the experts of the first ep group joined; all ranks must agree
    bit for bit.
    """
    dense = results[0][which][0]
    for result in results:
        assert all(
            torch.equal(mine, first) for mine, first in zip(result[which][0], dense, strict=True)
        )
    for start in range(0, len(results), ep):
        for offset in range(ep):
            mine, first = results[start + offset][which][1], results[offset][which][1]
            assert all(torch.equal(left, right) for left, right in zip(mine, first, strict=True))
    experts = [
        torch.cat([results[rank][which][1][index] for rank in range(ep)])
        for index in range(len(EXPERT_SHAPES))
    ]
    return dense, experts


@pytest.mark.parametrize(
    ("world_size", "ep", "dp_shard"), [*((*layout, None) for layout in LAYOUTS), *FOLDED]
)
def test_sums_norm_and_clipping_equal_one_process(world_size, ep, dp_shard):
    results = run_ranks(
        reduced, world_size, ep, torch.float32, 64, 0.5, dp_shard
    )  # 64 bytes: several buckets, one too large
    dense, experts = expected(world_size, ep, torch.float32)
    found = together(results, ep, 0)
    for mine, true in zip([*found[0], *found[1]], [*dense, *experts], strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-6, atol=1e-6)
    oracle = [Parameter(torch.zeros_like(total)) for total in (*dense, *experts)]
    for parameter, total in zip(oracle, (*dense, *experts), strict=True):
        parameter.grad = total.clone()
    norm = torch.nn.utils.clip_grad_norm_(oracle, 0.5)
    assert len({result[1] for result in results}) == 1
    assert results[0][1] == pytest.approx(norm.item(), rel=1e-6, abs=0)
    clipped = together(results, ep, 2)
    for mine, parameter in zip([*clipped[0], *clipped[1]], oracle, strict=True):
        torch.testing.assert_close(mine.double(), parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 1e-2)])
def test_other_precisions_are_summed_in_at_least_float32(dtype, tolerance):
    results = run_ranks(reduced, 4, 2, dtype, 2**20, 1e9)
    dense, experts = expected(4, 2, dtype)
    found = together(results, 2, 0)
    for mine, true in zip([*found[0], *found[1]], [*dense, *experts], strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=tolerance)
    total = torch.cat([part.double().flatten() for part in (*found[0], *found[1])]).norm()
    assert results[0][1] == pytest.approx(total.item(), rel=1e-6, abs=0)  # 1e9 clips nothing
    assert all(
        torch.equal(*pair) for pair in zip(found[0], together(results, 2, 2)[0], strict=True)
    )


def bfloat16_sum():
    """1, e, -1, e with e = 2^-10: whichever neighbours are added first, a bfloat16 sum loses at
    least one e.
    """
    with meshed() as (process, mesh):
        parameter = Parameter(torch.zeros(1, dtype=torch.bfloat16))
        parameter.grad = torch.tensor(
            [[1.0, 2.0**-10, -1.0, 2.0**-10][process.rank]], dtype=torch.bfloat16
        )
        GradientReducer([parameter], [], mesh).reduce()
        return parameter.grad.item()


def test_bfloat16_gradients_do_not_lose_small_terms():
    assert run_ranks(bfloat16_sum, 4) == [2.0**-9] * 4


def poisoned(ep, bad_rank, where, value):
    with meshed(ep=ep) as (process, mesh):
        dense, experts = local_parameters(process, mesh, torch.float32)
        if process.rank == bad_rank:
            tensor = {"dense": dense[1], "experts": experts[1]}[where]
            tensor.grad = torch.full_like(tensor, value)
        GradientReducer(dense, experts, mesh).reduce()
        numbers = (False, process.rank == bad_rank, torch.tensor(0.25 + process.rank))
        parts = dict.fromkeys(dense, "dense") | dict.fromkeys(experts, "experts")
        norm, sums, norms = global_grad_norm(parts, mesh, numbers=numbers, by_part=True)
        assert [math.isfinite(norms[part]) for part in ("dense", "experts")] == [
            math.isfinite(norm) or where != part for part in ("dense", "experts")
        ]
        ranks = range(process.world_size)
        assert sums == (0.0, float(bad_rank in ranks), 0.25 * len(ranks) + sum(ranks))
        return math.isfinite(norm), bool(sums[1])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ranks", "ep", "bad_rank", "where", "value", "told"),
    [
        *(
            (4, 2, 3, where, bad, (False, True))
            for where in ("dense", "experts")
            for bad in (INF, NAN)
        ),
        (4, 2, 3, "dense", -INF, (False, True)),
        (1, 1, 0, "dense", NAN, (False, True)),
        (2, 2, 7, "dense", 0.0, (True, False)),  # no rank is bad, and none raises the flag
    ],
)
def test_a_non_finite_gradient_on_one_rank_is_seen_by_all(ranks, ep, bad_rank, where, value, told):
    assert run_ranks(poisoned, ranks, ep, bad_rank, where, value) == [told] * ranks
