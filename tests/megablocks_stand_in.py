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

    def gather(
        self, x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int
    ) -> Tensor:
        """Row i of the result is x[indices[i] // top_k]."""
        self._check_places(indices, bin_ids, bins)
        _check_contiguous(x)
        assert (x.ndim, len(indices)) == (2, len(x) * top_k)
        return x[(indices // top_k).long()]

    def scatter(
        self,
        x: Tensor,
        indices: Tensor,
        bin_ids: Tensor,
        weights: None,
        bins: Tensor,
        top_k: int,
    ) -> Tensor:
        """Row indices[i] of a list is row i of x; of that list, the sums of top_k neighbours."""
        self._check_places(indices, bin_ids, bins)
        _check_contiguous(x)
        assert weights is None
        out = torch.full((len(indices), x.shape[1]), float("nan"), dtype=x.dtype)
        out[indices.long()] = x[: len(indices)]
        return out.unflatten(0, (-1, top_k)).sum(1)

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
        assert (batch_sizes.dtype, batch_sizes.device.type) == (torch.int64, "cpu")
        _check_contiguous(a, b)
        assert (a.ndim, b.ndim) == (2, 2 if trans_a else 3)
        rows = a.split(batch_sizes.tolist())
        if trans_a:
            assert not trans_b
            assert c is None
            others = b.split(batch_sizes.tolist())
            return torch.stack([x.T @ y for x, y in zip(rows, others, strict=True)])
        matrices = b.transpose(1, 2) if trans_b else b
        result = torch.cat([x @ matrix for x, matrix in zip(rows, matrices, strict=True)])
        if c is None:
            return result
        _check_contiguous(c)
        return c.copy_(result)

    def _check_places(self, indices: Tensor, bin_ids: Tensor, bins: Tensor) -> None:
        """Place i is in its bin; all of it in 32 bits, as the kernels read it."""
        assert {t.dtype for t in (indices, bin_ids, bins)} == {torch.int32}
        assert indices.shape == bin_ids.shape
        sizes = bins.diff(prepend=bins.new_zeros(1))
        assert torch.equal(bin_ids.long(), torch.arange(len(bins)).repeat_interleave(sizes.long()))


def _check_contiguous(*tensors: Tensor) -> None:
    assert all(each.is_contiguous() for each in tensors)


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
