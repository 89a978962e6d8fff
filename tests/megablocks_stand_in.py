"""A stand-in for MegaBlocks' operators in plain torch, which refuses what the real ones refuse. The
backend then runs on CPUs in any dtype.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moebius.kernels import backend
from moebius.kernels.libraries import megablocks


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
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert (a.ndim, b.ndim) == (2, 2 if trans_a else 3)
        sizes = batch_sizes.tolist()
        if trans_a:
            assert c is None
            groups = zip(a.split(sizes), b.split(sizes), strict=True)
            return torch.stack([left.T @ right for left, right in groups])
        matrices = b.transpose(1, 2) if trans_b else b
        groups = zip(a.split(sizes), matrices, strict=True)
        result = torch.cat([rows @ matrix for rows, matrix in groups])
        if c is None:
            return result
        assert c.is_contiguous()
        return c.copy_(result)

    def _check_places(self, indices: Tensor, bin_ids: Tensor, bins: Tensor) -> None:
        """Place i is in its bin; all of it in 32 bits, as the kernels read it."""
        assert {t.dtype for t in (indices, bin_ids, bins)} == {torch.int32}
        assert indices.shape == bin_ids.shape
        starts = torch.cat((bins.new_zeros(1), bins))
        places = torch.arange(len(indices))
        assert bool((starts[bin_ids.long()] <= places).all())
        assert bool((places < bins[bin_ids.long()]).all())


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """Puts a stand-in in MegaBlocks' place."""
    found = StandIn()
    operators = {"megablocks.ops": ("gather", "scatter"), "grouped_gemm.backend": ("gmm",)}
    with pytest.MonkeyPatch.context() as patch:
        for name, functions in operators.items():
            parent, module = ModuleType(name.split(".")[0]), ModuleType(name)
            for function in functions:
                setattr(module, function, getattr(found, function))
            patch.setitem(sys.modules, parent.__name__, parent)
            patch.setitem(sys.modules, name, module)
        patch.setattr(megablocks, "reason_against", lambda *_: None)
        forget()
        yield found
    forget()


def forget() -> None:
    """Forgets what was found, and what was said against it."""
    megablocks.load_library.cache_clear()
    backend.reason_against.cache_clear()
