"""The kernels of routers and of banks of experts, the feed-forward's and V's and O's.

Each function is a part of the list that kernel_times.py puts together. A router is five kinds of
kernels today; one that is fused is one line in `router_kernels`.

Legend: N routes, E experts (A of a head), K chosen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..model.config.attention_config import SwitchHeadConfig
from .expert_kernels import (
    ExpertCall,
    gather_product,
    gradient_lists,
    gradient_tables,
    later_chunks,
    route_tables,
    row_sums,
    rows_product,
    table_heights,
    weight_gradient,
)
from .hardware import Hardware
from .kernel import Kernel, Shape

_EXPERTS = "feed-forward experts"
_PROJECTIONS = "V and O experts"


def expert_call(shape: Shape) -> ExpertCall:
    """Returns a use of the feed-forward's bank by this rank."""
    experts = shape.model.experts
    assert experts is not None
    rows = shape.tokens
    return ExpertCall(
        rows * shape.choice.routes * shape.hottest,
        shape.choice.outputs / shape.ep,
        shape.model.d_model,
        experts.d_expert,
        rows,
        rows,
        shape.products,
        shape.spread,
        experts.activation,
    )


def feed_forward_kernels(hardware: Hardware, call: ExpertCall) -> list[Kernel]:
    """K1, K2 and Rd of a bank of perceptrons, forward and backward, without K3."""
    e, n = call.element, call.routes
    hidden, saved = n * call.narrow * e, n * call.saved_columns * e
    has_activation = call.activation != "relu"
    made = saved + (hidden if has_activation else 0)
    entry = "gather_two" if call.saved_columns > call.narrow else "gather"
    back = "gather_back_smooth" if has_activation else "gather_back"
    forward = gather_product(
        hardware,
        call,
        "gathered_activation",
        entry,
        gathered_rows=call.source_rows,
        columns=call.saved_columns,
        moved_bytes=made,
        variant=call.activation,
    )
    backward = gather_product(
        hardware,
        call,
        "gathered_hidden_gradient",
        back,
        gathered_rows=call.target_rows,
        columns=call.narrow,
        moved_bytes=2 * saved + 4 * n,
        variant=call.activation,
    )
    down = rows_product(hardware, call, source_bytes=hidden)
    up = rows_product(hardware, replace(call, narrow=call.saved_columns), source_bytes=saved)
    heights = table_heights(hardware, call, (entry, back, "rows"))
    tables = route_tables(hardware, n, heights)
    up_flops, down_flops = (
        2 * n * call.wide * columns for columns in (call.saved_columns, call.narrow)
    )
    return [
        Kernel(_EXPERTS, "K1 forward", True, forward, flops=up_flops),
        Kernel(_EXPERTS, "K2 forward", True, down, flops=down_flops),
        Kernel(_EXPERTS, "Rd forward", True, row_sums(hardware, n, call.target_rows, call.wide, e)),
        Kernel(_EXPERTS, "K1 backward", False, backward, flops=down_flops),
        Kernel(_EXPERTS, "K2 backward", False, up, flops=up_flops),
        Kernel(
            _EXPERTS, "Rd backward", False, row_sums(hardware, n, call.source_rows, call.wide, e)
        ),
        Kernel("routing", "sorted rows and tiles", True, tables),
    ]


def mlp_gradient_kernels(hardware: Hardware, call: ExpertCall, uses: int) -> list[Kernel]:
    """K3 for both matrices of a bank of perceptrons, whose rows are cut alike."""
    rows = call.routes * call.wide
    sides = [(call.wide, call.saved_columns), (call.narrow, call.wide)]
    up = weight_gradient(
        hardware,
        call,
        uses,
        tall=call.wide,
        wide=call.saved_columns,
        gathered_rows=call.source_rows,
        listed_bytes=16,
        cut_by=sides[0],
    )
    down = weight_gradient(
        hardware,
        call,
        uses,
        tall=call.narrow,
        wide=call.wide,
        gathered_rows=call.target_rows,
        has_activation=call.activation != "relu",
        cut_by=sides[0],
    )
    return [
        Kernel(_EXPERTS, "K3 up", False, up, flops=uses * 2 * rows * call.saved_columns),
        Kernel(_EXPERTS, "K3 down", False, down, flops=uses * 2 * rows * call.narrow),
        # an index for the rows of x; one and a gate for those of the gradient
        *_lists(hardware, call, uses, {"K3 up": (*sides[0], 4), "K3 down": (*sides[1], 8)}),
    ]


def _lists(
    hardware: Hardware, call: ExpertCall, uses: int, matrices: Mapping[str, tuple[int, int, int]]
) -> list[Kernel]:
    """Returns how rows are cut, once for a bank, and listed, once for each of its matrices.

    `matrices`: sides of each, the first one's tiles say how rows are cut; bytes of a route that are
    read to list it.
    """
    tables = gradient_tables(hardware, call, uses, len(matrices))
    found = [Kernel("routing", "chunks of K3", False, tables)]
    for name, (tall, wide, read) in matrices.items():
        listed = gradient_lists(hardware, call, uses, read)
        first = next(iter(matrices.values()))[:2]
        added = later_chunks(hardware, call, uses, tall=tall, wide=wide, cut_by=first)
        found.append(Kernel("routing", f"{name} addresses", False, listed))
        if added.launches:
            found.append(Kernel("routing", f"{name} later chunks", False, added))
    return found


def _projection_call(shape: Shape) -> ExpertCall:
    attention = shape.model.attention
    assert isinstance(attention, SwitchHeadConfig)
    choice, tokens = shape.head_choice, shape.tokens
    return ExpertCall(
        tokens * choice.routes * shape.hottest_projection,
        choice.outputs / shape.ep,
        shape.model.d_model,
        attention.d_head,
        tokens,
        tokens * attention.num_heads,
        shape.products,
        shape.spread,
    )


def projection_kernels(hardware: Hardware, shape: Shape, bank: str) -> list[Kernel]:
    """Returns the kernels of V or O as banks of experts; K3 only if it does not wait."""
    call = _projection_call(shape)
    found = linear_kernels(hardware, call, bank)
    return found if shape.deferred else [*found, *linear_gradient_kernels(hardware, call, bank, 1)]


def linear_kernels(hardware: Hardware, call: ExpertCall, bank: str) -> list[Kernel]:
    """V: K1 with the gate forward, K2 backward. O: K2 forward, K1 backward."""
    e, n, tokens, heads = call.element, call.routes, call.source_rows, call.target_rows
    narrow = n * call.narrow * e
    is_value = bank == "V"
    kernel, entry = (
        ("gathered_gate", "gather") if is_value else ("gathered_input_gradient", "gather_back")
    )
    # V writes its outputs twice, gated and not; O's backward reads inputs and writes their gradient
    k1 = gather_product(
        hardware,
        call,
        kernel,
        entry,
        gathered_rows=tokens,
        columns=call.narrow,
        moved_bytes=2 * narrow,
    )
    k2 = rows_product(
        hardware, call, source_bytes=narrow, again_bytes=2 * narrow if is_value else 0.0
    )
    to_heads = row_sums(hardware, n, heads, call.narrow, e)
    to_tokens = row_sums(hardware, n, tokens, call.wide, e)
    heights = table_heights(hardware, call, (entry, "rows"))
    tables = route_tables(hardware, n, heights)
    flops = 2 * n * call.wide * call.narrow
    gathers, stores = ("forward", "backward") if is_value else ("backward", "forward")
    return [
        Kernel(_PROJECTIONS, f"{bank} K1 {gathers}", is_value, k1, flops=flops),
        Kernel(_PROJECTIONS, f"{bank} Rd {gathers}", is_value, to_heads),
        Kernel(_PROJECTIONS, f"{bank} K2 {stores}", not is_value, k2, flops=flops),
        Kernel(_PROJECTIONS, f"{bank} Rd {stores}", not is_value, to_tokens),
        Kernel("routing", "sorted rows and tiles", True, tables),
    ]


def linear_gradient_kernels(
    hardware: Hardware, call: ExpertCall, bank: str, uses: int
) -> list[Kernel]:
    tall, wide = (call.wide, call.narrow) if bank == "V" else (call.narrow, call.wide)
    time = weight_gradient(
        hardware, call, uses, tall=tall, wide=wide, gathered_rows=call.source_rows
    )
    flops = uses * 2 * call.routes * tall * wide
    return [
        Kernel(_PROJECTIONS, f"{bank} K3", False, time, flops=flops),
        # an index for either, and a gate
        *_lists(hardware, call, uses, {f"{bank} K3": (tall, wide, 12)}),
    ]


def deferred_kernels(hardware: Hardware, shape: Shape) -> list[Kernel]:
    """K3 of every bank, once for all repeats."""
    model, found = shape.model, []
    members, repeats = model.layers_per_group, model.num_repeats
    if shape.projects_by_experts:
        for bank in ("V", "O"):
            found += _times(
                linear_gradient_kernels(hardware, _projection_call(shape), bank, repeats), members
            )
    sparse = sum(model.has_experts(member) for member in range(members))
    if sparse:
        found += _times(mlp_gradient_kernels(hardware, expert_call(shape), repeats), sparse)
    return found


def _times(kernels: Iterable[Kernel], factor: float) -> list[Kernel]:
    return [replace(kernel, calls=factor * kernel.calls) for kernel in kernels]
