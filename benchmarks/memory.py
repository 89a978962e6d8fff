"""How much memory autograd keeps for the pass back."""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(forward: Callable[[], Tensor], *, beside: Iterable[Tensor]) -> tuple[Tensor, int]:
    """The result, and the bytes of all storages that were saved for the pass back, each counted
    once.

    Args:
        beside: tensors whose storages do not count: the weights, which are there anyway.
    """
    ignored = {tensor.untyped_storage().data_ptr() for tensor in beside} | {0}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(kept.values())
