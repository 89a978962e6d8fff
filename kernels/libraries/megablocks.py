"""The `megablocks` backend: MegaBlocks' permutation kernels and grouped products (arXiv 2211.15841) on CUDA.

MegaBlocks is not a dependency, because its release pins an older torch. If it is installed
(docs/kernels.md says how, and what was tested), this backend uses
    megablocks.ops.gather      gathers rows in expert order
    megablocks.ops.scatter     sums them back
    grouped_gemm.backend.gmm   the products; trans_b for rows' gradients, trans_a for the weights'
Its own "grouped" layer consists of the same operators; its block-sparse layer does not work with
current Triton releases. The algorithm is in grouped_products.py, and the sort is
`permute.sort_routes`, which forward and backward share.

Cost: products take their row counts from the host, so every call waits for the device once, unless
the routes have `per_expert`. The released library makes one cuBLAS call per expert and product.
bfloat16 only.

Legend: U source rows, T targets, N routes, E experts, D input width, O output width.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from ..calls import ROW_SLACK, SortedRoutes
from ..permute import add_rows
from .grouped_products import GroupedProducts, Operators

# Without pip's cache, which could install a wheel that was compiled against another torch.
INSTALL_LINE = (
    "pip install --no-cache-dir --no-deps --no-build-isolation "
    "stanford-stk==0.7.1 grouped_gemm==0.3.0 megablocks==0.10.0"
)


@dataclass(frozen=True)
class Library:
    """The operators that the backend uses, by their names in MegaBlocks."""

    gather: Callable[..., Tensor]
    scatter: Callable[..., Tensor]
    gmm: Callable[..., Tensor]


@functools.cache
def load_library() -> Library:
    """Imports MegaBlocks' operators.

    Raises:
        ImportError: a package is missing, or was compiled against another torch.
    """
    ops, products = import_module("megablocks.ops"), import_module("grouped_gemm.backend")
    return Library(ops.gather, ops.scatter, products.gmm)


def reason_against(device_type: str, dtype: torch.dtype) -> str | None:
    """Returns why MegaBlocks cannot run on a device in a dtype, or None if it can."""
    if device_type == "meta":
        return None
    if device_type != "cuda" or dtype is not torch.bfloat16:
        return f"MegaBlocks supports bfloat16 on CUDA, and the weights are {dtype} on {device_type}: choose segments"
    try:
        load_library()
    except ImportError as error:
        return (
            f"MegaBlocks cannot be imported ({error}): compile it against the installed torch with "
            f"`{INSTALL_LINE}`; docs/kernels.md lists what that needs"
        )
    return None


class MegaBlocks(GroupedProducts):
    """Implements the operations on MegaBlocks' operators."""

    def operators(self, routes: SortedRoutes) -> Operators:
        return _MegaBlocks(routes)


class _MegaBlocks:
    """Implements `grouped_products.Operators` on MegaBlocks' operators.

    MegaBlocks calls a place's expert its "bin id" and the end of the expert's rows its "bin".
    `indices` are the routes in sorted order, and a route belongs to row index // top_k. Routes
    without such a rule are passed as rows of their own.
    """

    def __init__(self, routes: SortedRoutes) -> None:
        self._library, self._routes = load_library(), routes
        num_routes, device = routes.num_routes, routes.starts_E1.device
        places_N = torch.arange(num_routes, device=device, dtype=torch.int32)
        self._bins_E = routes.starts_E1[1:]
        self._bin_ids_N = torch.searchsorted(self._bins_E, places_N, right=True, out_int32=True)
        self._indices_N = places_N if routes.order_N is None else routes.order_N
        self._counts_E = _counts_on_host(routes)

    def gather_sources(self, x_UD: Tensor) -> Tensor:
        return self._gather(x_UD, self._routes.source_N, self._routes.per_source)

    def gather_targets(self, grad_TO: Tensor) -> Tensor:
        return self._gather(grad_TO, self._routes.target_N, self._routes.per_target)

    def add_to_targets(self, rows_NO: Tensor) -> Tensor:
        routes = self._routes
        return self._add(rows_NO, routes.target_N, routes.num_targets, routes.per_target)

    def add_to_sources(self, rows_ND: Tensor, num_sources: int) -> Tensor:
        return self._add(rows_ND, self._routes.source_N, num_sources, self._routes.per_source)

    def product(self, rows_ND: Tensor, w_EDO: Tensor) -> Tensor:
        rows_NO = rows_ND.new_empty(self._routes.num_routes + ROW_SLACK, w_EDO.shape[2])
        return self._gmm(rows_ND, w_EDO, rows_NO, trans_b=False)

    def product_transposed(self, rows_NO: Tensor, w_EDO: Tensor) -> Tensor:
        rows_ND = rows_NO.new_empty(self._routes.num_routes + ROW_SLACK, w_EDO.shape[1])
        return self._gmm(rows_NO, w_EDO, rows_ND, trans_b=True)

    def add_weight_gradient(self, into_EDO: Tensor, rows_ND: Tensor, rows_NO: Tensor) -> None:
        num_routes = self._routes.num_routes
        if num_routes == 0:
            return
        left_ND, right_NO = rows_ND[:num_routes].contiguous(), rows_NO[:num_routes].contiguous()
        into_EDO += self._library.gmm(left_ND, right_NO, self._counts_E, trans_a=True)

    def _gmm(self, rows: Tensor, w_EDO: Tensor, out: Tensor, *, trans_b: bool) -> Tensor:
        num_routes = self._routes.num_routes
        if num_routes:
            rows, w_EDO = rows[:num_routes].contiguous(), w_EDO.contiguous()
            self._library.gmm(rows, w_EDO, self._counts_E, trans_b=trans_b, c=out[:num_routes])
        return out

    def _gather(self, rows_UD: Tensor, index_N: Tensor | None, per_row: int) -> Tensor:
        num_routes = self._routes.num_routes
        if num_routes == 0:
            return rows_UD.new_empty(0, rows_UD.shape[1])
        if index_N is not None:
            rows_UD, per_row = rows_UD.index_select(0, index_N), 1
        # MegaBlocks rejects rows that no route reads
        rows_UD = rows_UD[: num_routes // per_row].contiguous()
        return self._library.gather(
            rows_UD, self._indices_N, self._bin_ids_N, self._bins_E, per_row
        )

    def _add(self, rows_ND: Tensor, index_N: Tensor | None, num_rows: int, per_row: int) -> Tensor:
        if self._routes.num_routes == 0:
            return rows_ND.new_zeros(num_rows, rows_ND.shape[1])
        top_k = 1 if index_N is not None else per_row
        rows_ND = rows_ND.contiguous()
        summed = self._library.scatter(
            rows_ND, self._indices_N, self._bin_ids_N, None, self._bins_E, top_k
        )
        return summed if index_N is None else add_rows(summed, None, index_N, num_rows, 0)


def _counts_on_host(routes: SortedRoutes) -> Tensor:
    """Returns the routes of each expert, (E,) int64 on the CPU: the call's only synchronisation."""
    if routes.per_expert:
        return torch.full((routes.starts_E1.shape[0] - 1,), routes.per_expert, dtype=torch.int64)
    return routes.starts_E1.diff().to("cpu", torch.int64)
