"""Expert parallelism in twenty lines of plain torch.

    python examples/expert_parallelism_in_twenty_lines.py

Two ranks are two processes on this CPU. Each has its own tokens and half of the experts: a token
travels to the rank that holds its expert, is computed there, and its result travels back. What
comes out is compared with a loop over tokens in one process that holds all experts. moebius does
the same (distributed/dispatch/alltoall.py), with gradients, in chunks that overlap with the computation; its
default sends a token once per rank instead of once per expert (dedup.py beside it).

Legend: T tokens of a rank, D width, F hidden, E experts, e experts of a rank, K experts per token,
N = T·K routes, R received rows.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

WORLD, T, D, F, E, K = 2, 6, 8, 16, 4, 2


def expert(x_RD: Tensor, up_DF: Tensor, down_FD: Tensor) -> Tensor:
    """One expert: a small MLP."""
    return (x_RD @ up_DF).relu() @ down_FD


def expert_parallel(
    x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, up_eDF: Tensor, down_eFD: Tensor
) -> Tensor:
    """The twenty lines: (T, D) to (T, D), experts spread over the ranks in equal blocks."""
    num_own = len(up_eDF)
    expert_N, order_N = expert_TK.flatten().sort(stable=True)  # grouped by expert, so by rank
    token_N = order_N // expert_TK.shape[1]

    def all_to_all(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    sent = torch.bincount(expert_N // num_own, minlength=dist.get_world_size())
    ones = [1] * len(sent)
    received = all_to_all(sent, ones, ones)  # how many rows come from every rank
    x_RD = all_to_all(x_TD[token_N], received.tolist(), sent.tolist())  # dispatch
    own_R = all_to_all(expert_N, received.tolist(), sent.tolist()) % num_own
    y_RD = torch.empty_like(x_RD)
    for index in range(num_own):
        mine = own_R == index
        y_RD[mine] = expert(x_RD[mine], up_eDF[index], down_eFD[index])
    y_ND = all_to_all(y_RD, sent.tolist(), received.tolist())  # combine: the way back
    weighted_ND = weight_TK.flatten()[order_N, None] * y_ND
    return torch.zeros_like(x_TD).index_add_(0, token_N, weighted_ND)


def on_one_process(
    x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, up_EDF: Tensor, down_EFD: Tensor
) -> Tensor:
    """The meaning: a loop over tokens and their experts."""
    y_TD = torch.zeros_like(x_TD)
    for token, (experts, weights) in enumerate(zip(expert_TK, weight_TK, strict=True)):
        for index, weight in zip(experts, weights, strict=True):
            y_TD[token] += weight * expert(x_TD[token], up_EDF[index], down_EFD[index])
    return y_TD


def problem(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The rank's tokens and their routes; and all experts, the same on every rank."""
    own, shared = (torch.Generator().manual_seed(seed) for seed in (1 + rank, 0))
    x_TD = torch.randn(T, D, generator=own)
    weight_TK, expert_TK = torch.randn(T, E, generator=own).softmax(-1).topk(K)
    up_EDF = torch.randn(E, D, F, generator=shared) / D**0.5
    down_EFD = torch.randn(E, F, D, generator=shared) / F**0.5
    return x_TD, expert_TK, weight_TK, up_EDF, down_EFD


def run_rank(rank: int, meeting_point: str) -> None:
    """Joins the other rank and computes this rank's tokens in both ways."""
    dist.init_process_group("gloo", f"file://{meeting_point}", rank=rank, world_size=WORLD)
    x_TD, expert_TK, weight_TK, up_EDF, down_EFD = problem(rank)
    own = slice(rank * E // WORLD, (rank + 1) * E // WORLD)
    y_TD = expert_parallel(x_TD, expert_TK, weight_TK, up_EDF[own], down_EFD[own])
    expected_TD = on_one_process(x_TD, expert_TK, weight_TK, up_EDF, down_EFD)
    torch.testing.assert_close(y_TD, expected_TD)
    away = int((expert_TK // (E // WORLD) != rank).sum())
    print(f"rank {rank}: {away} of {T * K} routes went to the other rank; equal to one process")
    dist.destroy_process_group()


def main() -> None:
    """Starts the two ranks and waits for them."""
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = str(Path(folder) / "meeting_point")
        mp.spawn(run_rank, (meeting_point,), nprocs=WORLD)  # pyright: ignore[reportPrivateImportUsage]


if __name__ == "__main__":
    main()
