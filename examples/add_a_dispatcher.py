"""Adds a dispatcher from one file: rows travel in bfloat16, which halves the bytes of an exchange.

    cd examples && python add_a_dispatcher.py        # two runs on 2 ranks, and add_a_dispatcher.png

It is the built-in `alltoall` over another communicator. Gate weights and sums stay float32. With
train.precision=bfloat16 the rows are rounded anyway, and both dispatchers give the same bits.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import moebius
from moebius.distributed.dispatch.alltoall import AllToAllDispatcher
from moebius.distributed.dispatch.base import Setup
from moebius.distributed.dispatch.exchange import AsyncCollective, Communicator
from moebius.distributed.dispatch.table import DispatcherEntry, SendingPattern


class Widened(AsyncCollective):
    """Holds rows that are on their way in bfloat16 and arrive in the dtype of the sender's."""

    def __init__(self, sending: AsyncCollective, dtype: torch.dtype) -> None:
        self._sending, self._dtype = sending, dtype

    def wait(self) -> Tensor:
        return self._sending.wait().to(self._dtype)


class HalfWidth(Communicator):
    """Sends rows and outputs in bfloat16, gate weights as they are; gradients take the same way."""

    def all_to_all(
        self, rows: Tensor, sent: list[int], received: list[int], *, is_combine: bool = False
    ) -> AsyncCollective:
        low = rows.to(torch.bfloat16) if rows.dim() == 2 else rows
        sending = super().all_to_all(low, sent, received, is_combine=is_combine)
        return Widened(sending, rows.dtype)


class HalfWidthDispatcher(AllToAllDispatcher):
    """Sends one row per route, in bfloat16."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        full = self.communicator
        self.communicator = HalfWidth(full.group, full.everyone, full.counters, full.node_of_P)
        self.communicators = [self.communicator]


# What `mesh.dispatcher` names. The planner and the cost model read what it sends.
HALF_WIDTH = DispatcherEntry(
    HalfWidthDispatcher, "one row per route, in bfloat16", SendingPattern(row_per_route=True)
)


def main() -> None:
    """Trains with the built-in dispatcher and with this one, and draws loss and bytes."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for dispatcher in ("alltoall", "add_a_dispatcher:HALF_WIDTH"):
        name = dispatcher.rpartition(":")[2]
        moebius.fit(moebius.recipe("small.toml", f"mesh.dispatcher={dispatcher}"), f"runs/{name}")
        steps = [r for r in moebius.history(f"runs/{name}").records() if r["kind"] == "train"]
        sent = [layer["bytes_intra_node"] for layer in steps[-1]["exchange"].values()]
        print(f"{name}: loss {steps[-1]['loss']:.4f}, {sum(sent) / 1e6:.2f} MB per step")
        left.plot([r["step"] for r in steps], [r["loss"] for r in steps], label=name, alpha=0.6)
        right.bar(name, sum(sent) / 1e6)
    left.set(xlabel="step", ylabel="loss, nats per byte")
    left.legend()
    right.set(ylabel="MB sent per forward pass of a step")
    figure.savefig("add_a_dispatcher.png", dpi=120)


if __name__ == "__main__":
    main()
