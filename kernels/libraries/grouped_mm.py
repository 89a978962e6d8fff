"""The `grouped_mm` backend: `torch.nn.functional.grouped_mm`, on CUDA and CPU, nothing to install.

grouped_products.py holds the algorithm. On CUDA in bfloat16 the operator is one kernel for all
experts (from capability 9.0; below, a loop that reads the counts), and nothing here waits for the
device. On CPUs it is a loop over the experts inside torch, useful for comparison, not for speed.

The operator's constraints:
  * it needs rows and columns aligned to 16 bytes. Other widths (412 or 82 columns of bfloat16) are
    zero-padded in copies of rows and weights; the weights' copy costs a pass over them per product;
  * on CUDA it needs bfloat16 and fewer than 1,024 experts; it never supports float64;
  * it leaves rows past the last expert's, and weight gradients of experts without rows,
    uninitialised (pytorch issue 172439); they are never read.

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
    """Implements the operations on torch's `grouped_mm`."""

    def operators(self, routes: SortedRoutes) -> Operators:
        return _GroupedMM(routes)


class _GroupedMM:
    """Implements `grouped_products.Operators` on torch's `grouped_mm`."""

    def __init__(self, routes: SortedRoutes) -> None:
        """Stores the routes.

        Raises:
            ValueError: there are more experts than the operator supports.
        """
        self._routes = routes
        self._ends_E = routes.starts_E1[1:]
        if self._ends_E.is_cuda and self._ends_E.shape[0] > _MAX_GROUPS_ON_CUDA:
            raise ValueError(
                f"kernels.backend='grouped_mm' supports at most {_MAX_GROUPS_ON_CUDA} experts on CUDA, got "
                f"{self._ends_E.shape[0]}: choose segments or triton, or spread them over more ranks"
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
        """Gathers rows[index], N + ROW_SLACK of them, into the workspace `name`."""
        rows_UD, num_rows = _aligned(rows_UD), index_N.shape[0]
        out = workspace(name, (num_rows + ROW_SLACK, rows_UD.shape[1]), rows_UD)
        torch.index_select(rows_UD, 0, index_N, out=out[:num_rows])
        return out


def _aligned(tensor: Tensor, *, rows: bool = False) -> Tensor:
    """Returns the tensor, or a copy whose columns (and `rows`) are zero-padded to 16 bytes."""
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
