"""Modes that list the operations that code runs, and count bytes that it leaves allocated and FLOPs."""

import gc
from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from moebius.model.config.model_config import ModelConfig
from moebius.model.transformer import Transformer


class Operations(TorchDispatchMode):
    """Lists operations: the name, and the dtype of the first argument if it is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((str(func), getattr(args[0], "dtype", None) if args else None))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> Counter[str]:
        """Returns how often each operation ran."""
        return Counter(name for name, _ in self.calls)

    @property
    def counts_exchanged(self) -> int:
        """Returns the number of collectives of integers, which are those of counts."""
        return sum(name.startswith("c10d.") and dtype == torch.int64 for name, dtype in self.calls)


class LiveMemory(TorchDispatchMode):
    """Tracks every storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                storage = leaf.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def num_bytes(self) -> int:
        """Returns the bytes alive now, without what only waits for the garbage collector."""
        gc.collect()
        return sum(
            num_bytes for reference, num_bytes in self._seen.values() if not reference.expired()
        )


def counted_flops(config: ModelConfig, seq_len: int) -> float:
    """Counts one token's training FLOPs with torch, on one group of sequences on the meta
    device.
    """
    batch = config.group_sequences
    with torch.device("meta"):
        model = Transformer(config, backend="segments")
        tokens_BS = torch.zeros(batch, seq_len, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            output = model(tokens_BS, targets_BS=tokens_BS)
            (output.cross_entropy + output.regularisation_B.sum()).backward()
    return counter.get_total_flops() / (batch * seq_len)
