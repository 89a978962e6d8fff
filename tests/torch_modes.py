"""Modes that list the operations that code runs, and count bytes that it leaves allocated."""

import gc
from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
