"""The expert operations on torch's own grouped product, `torch.nn.functional.grouped_mm`: nothing
to install, on CUDA and CPU.

What is done is in grouped_products.py. On CUDA in bfloat16 the operator is one kernel for all
experts (from capability 9.0 on; below it is a loop that reads the counts), and nothing here waits
for the device. On CPUs, in float32 and bfloat16, it is a loop over the experts inside torch: there
it serves as a second opinion, not for speed.

What the operator asks for, and how it is met:
  * rows and columns that begin at multiples of 16 bytes: widths that are not such (412 or 82
    columns of bfloat16) are filled with zero columns in copies of the rows and the weights; the
    weights' copy costs a pass over them per product;
  * on CUDA bfloat16 and fewer than 1,024 experts; float64 nowhere (backend.py refuses what cannot
    be);
  * what it leaves unwritten is not read: rows past the last expert's, and weight gradients of
    experts without rows, which on some GPUs are whatever the memory held (pytorch issue 172439).

Legend: U source rows, T targets, N routes, E experts, D input width, O output width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..calls import ROW_SLACK, SortedRoutes
from ..cpu.library import workspace
from ..permute import sum_to_sources, sum_to_targets
from .grouped_products import GroupedProducts, Operators

_ALIGNMENT_BYTES = 16
_MAX_GROUPS_ON_CUDA = 1023


class GroupedMM(GroupedProducts):
    """Implements the operations on torch's operator."""

    def operators(self, routes: SortedRoutes) -> Operators:
        return _GroupedMM(routes)


class _GroupedMM:
    """Implements `grouped_products.Operators` on torch's operator."""

    def __init__(self, routes: SortedRoutes) -> None:
        """Takes the routes' counts.

        Raises:
            ValueError: there are more experts than the operator takes.
        """
        self._routes = routes
        self._ends_E = routes.starts_E1[1:]
        if self._ends_E.is_cuda and self._ends_E.shape[0] > _MAX_GROUPS_ON_CUDA:
            raise ValueError(
                f"kernels.backend='grouped_mm' takes at most {_MAX_GROUPS_ON_CUDA} experts on "
                "CUDA, and these are "
                f"{self._ends_E.shape[0]}: choose segments or triton, or spread them over more "
                "ranks"
            )

    def gather_sources(self, x_UD: Tensor) -> Tensor:
        return self._gather("x", x_UD, self._routes.source_rows())

    def gather_targets(self, grad_TO: Tensor) -> Tensor:
        return self._gather("dy", grad_TO, self._routes.target_rows())

    def add_to_targets(self, rows_NO: Tensor) -> Tensor:
        return sum_to_targets(rows_NO, self._routes).contiguous()

    def add_to_sources(self, rows_ND: Tensor, num_sources: int) -> Tensor:
        return sum_to_sources(rows_ND, self._routes, num_sources).contiguous()

    def product(self, rows_ND: Tensor, w_EDO: Tensor) -> Tensor:
        num_rows, width = rows_ND.shape[0], w_EDO.shape[2]
        if self._routes.num_routes == 0:
            return rows_ND.new_empty(num_rows, width)
        return F.grouped_mm(_aligned(rows_ND), _aligned(w_EDO, rows=True), offs=self._ends_E)[
            :, :width
        ]

    def product_transposed(self, rows_NO: Tensor, w_EDO: Tensor) -> Tensor:
        num_rows, width = rows_NO.shape[0], w_EDO.shape[1]
        if self._routes.num_routes == 0:
            return rows_NO.new_empty(num_rows, width)
        w_EOD = _aligned(w_EDO, rows=True).transpose(1, 2)
        return F.grouped_mm(_aligned(rows_NO), w_EOD, offs=self._ends_E)[:, :width]

    def add_weight_gradient(self, into_EDO: Tensor, rows_ND: Tensor, rows_NO: Tensor) -> None:
        num_routes = self._routes.num_routes
        if num_routes == 0:
            return
        left_DN, right_NO = _aligned(rows_ND[:num_routes]).T, _aligned(rows_NO[:num_routes])
        sums = F.grouped_mm(left_DN, right_NO, offs=self._ends_E)
        empty_E11 = (self._routes.starts_E1.diff() == 0)[:, None, None]
        into_EDO += sums.masked_fill_(empty_E11, 0)[:, : into_EDO.shape[1], : into_EDO.shape[2]]

    def _gather(self, name: str, rows_UD: Tensor, index_N: Tensor) -> Tensor:
        """Returns rows[index], N + ROW_SLACK of them, in a workspace of that name."""
        rows_UD, num_rows = _aligned(rows_UD), index_N.shape[0]
        out = workspace(name, (num_rows + ROW_SLACK, rows_UD.shape[1]), rows_UD)
        torch.index_select(rows_UD, 0, index_N, out=out[:num_rows])
        return out


def _aligned(tensor: Tensor, *, rows: bool = False) -> Tensor:
    """Returns the tensor, or a copy with zero columns up to a multiple of 16 bytes.

    `rows`: with as many zero rows as well.
    """
    step = _ALIGNMENT_BYTES // tensor.element_size()
    columns_to_fill, rows_to_fill = (
        -tensor.shape[-1] % step,
        -tensor.shape[-2] % step if rows else 0,
    )
    if columns_to_fill or rows_to_fill:
        return F.pad(tensor, (0, columns_to_fill, 0, rows_to_fill))
    if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT_BYTES:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor
