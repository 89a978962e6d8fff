"""The kernels of a router: what chooses a token's experts, and what a balancing loss wants to know.

Logits, top-k and gates are one kernel (kernels/triton/router.py), which this module prices like the
experts' products, with what its plain instructions choose by added to it; backward there are three
(kernels/triton/router_gradients.py). A router that drops experts in training, or has more of them than
the kernel knows, goes torch's steps.

Legend: T tokens, D their width, E experts (A of a head), H heads, K chosen of each head, G: E and
padding.
"""

from collections.abc import Iterator
from math import ceil

from ..kernels.fused.router import MOST_EXPERTS
from ..kernels.triton import tiles
from .expert_kernels import route_sorting
from .hardware import Hardware
from .kernel import Choice, Kernel, Shape, passes_over_memory, product
from .occupancy import block_key, compiled_programs
from .roofline import CACHED, Grid, TileShape, Time, grid_time, matrix_bytes, stream_time

# Passes of torch's top-k over its rows: a radix selection, four digits of 8 bits, then a gather.
TOP_K_PASSES = 5
_PART = "routers"
_LOGITS = "logits, exact float32"
# Of a logit each time that one is chosen of its row: compared, its place compared, taken out.
_INSTRUCTIONS = 6
_LANES = 128  # instructions of a multiprocessor in a clock


def router_kernels(hardware: Hardware, shape: Shape, choice: Choice) -> list[Kernel]:
    """Returns a router's kernels in one use, forward and backward."""
    tokens, width, e = shape.tokens, shape.model.d_model, choice.outputs
    k, repeats = choice.routes, shape.model.num_repeats
    add = passes_over_memory(hardware, shape, _PART)
    found = [
        *(
            _in_one(hardware, shape, choice)
            if _is_one(choice)
            else _in_steps(hardware, shape, choice)
        ),
        # softmax, its sum over each sequence; the gates' sum; rows of a sequence
        add("statistics", 8 * e + 4 * e + 4 * k, rows=True, launches=4),
        Kernel("routing", "sort by expert", True, route_sorting(hardware, tokens * k)),
    ]
    if repeats > 1:
        sums = stream_time(hardware, 12 * e * width)
        found.append(Kernel(_PART, "gradients of repeats added", False, sums, 1 - 1 / repeats))
    return found


def _is_one(choice: Choice) -> bool:
    return not choice.drops and choice.experts <= MOST_EXPERTS


def _in_one(hardware: Hardware, shape: Shape, choice: Choice) -> list[Kernel]:
    tokens, width, e = shape.tokens, shape.model.d_model, choice.outputs
    add = passes_over_memory(hardware, shape, _PART)
    return [
        Kernel(_PART, "split of the weights", True, stream_time(hardware, 8 * e * width)),
        Kernel(
            _PART,
            "logits, top-k and gates",
            True,
            route_time(hardware, tokens, width, choice),
            flops=2 * tokens * e * width,
        ),
        # sums over sequences spread out, softmax
        add("statistics, backward", (8 + 12) * e, rows=True, launches=3, forward=False),
        *_gradients(hardware, tokens, width, choice),
    ]


def _gradients(hardware: Hardware, tokens: float, width: int, choice: Choice) -> Iterator[Kernel]:
    """Yields the kernels of the logits' gradient and of its two products."""
    target, e = tiles.target_of(hardware.capability), choice.outputs
    flops = 2 * tokens * e * width
    of_rows, of_weights = tiles.router_gradient_tiles(target, tokens, e, width)
    padded = tiles.round_up(e, of_rows.depth)
    # gradients of logits, of gates, the gates, their experts; of a softmax the logits, too
    read = tokens * (4 * e * (2 if choice.by_softmax else 1) + (4 + 4 + 8) * choice.routes)
    split = 4 * e * width + 4 * padded * tiles.round_up(width, of_rows.columns)
    of_logits = stream_time(hardware, read + 4 * tokens * padded + split)
    yield Kernel(_PART, "gradient of logits", False, of_logits)
    time = _row_gradient_time(hardware, tokens, width, padded, of_rows)
    yield Kernel(_PART, "gradient of rows", False, time, flops=flops)
    each = tiles.rows_of_part(tokens, e, width, of_weights)
    parts = ceil(tokens / each)
    time = _weight_gradient_time(hardware, (tokens, width, e, padded), of_weights, each)
    yield Kernel(_PART, "gradient of weights", False, time, flops=flops)
    if parts > 1:
        added = stream_time(hardware, 4 * (parts + 1) * e * width)
        yield Kernel(_PART, "gradient of weights, parts added", False, added)


def _row_gradient_time(
    hardware: Hardware, tokens: float, width: int, padded: int, tile: tiles.Tile
) -> Time:
    """Returns what g W takes, whose operands are bfloat16, twice, before it starts."""
    programs, steps = ceil(tokens / tile.rows) * ceil(width / tile.columns), padded // tile.depth
    step_bytes = (tile.rows + tile.columns) * tile.depth * 4
    shape = TileShape(tile.rows, tile.columns, tile.depth, tile.warps, tile.stages)
    grid = Grid(
        programs,
        3 * 2 * tile.rows * tile.columns * padded,
        steps,
        step_bytes,
        3 * matrix_bytes(hardware, shape, padded, 2),
        tile.stages,
        _at_once(hardware, "row_gradient", tile),
    )
    return grid_time(
        hardware,
        grid,
        "bf16",
        hbm_bytes=4 * tokens * (padded + width) + 4 * padded * width,
        l2_bytes=programs * steps * step_bytes,
    )


def _weight_gradient_time(
    hardware: Hardware, sides: tuple[float, int, int, int], tile: tiles.Tile, each: int
) -> Time:
    """Returns what xᵀ g takes, `each` rows to a program; sides: T, D, E and G.

    Every program of one part reads about the same rows at the same time: they come from memory once.
    """
    tokens, width, e, padded = sides
    across, down = ceil(e / tile.columns), ceil(width / tile.rows)
    programs, steps = across * down * ceil(tokens / each), each // tile.depth
    grid = Grid(
        programs,
        3 * 2 * tile.rows * tile.columns * each,
        steps,
        (tile.rows + tile.columns) * tile.depth * 4,
        # rows once into registers, and there into every product; g by every four warps
        each * (4 * tile.rows + 3 * 2 * tile.columns * tile.warps / 4),
        tile.stages,
        _at_once(hardware, "weight_gradient", tile),
    )
    return grid_time(
        hardware,
        grid,
        "bf16",
        hbm_bytes=4 * tokens * (padded + width) + 4 * ceil(tokens / each) * e * width,
        l2_bytes=4 * tokens * (across * width + down * padded),
    )


def _at_once(hardware: Hardware, kernel: str, tile: tiles.Tile) -> int:
    compiled = compiled_programs(tiles.target_of(hardware.capability))
    return max(1, compiled.get(block_key(kernel, tile.rows, tile.columns), 1))


def _in_steps(hardware: Hardware, shape: Shape, choice: Choice) -> list[Kernel]:
    """Returns a product in exact float32, top-k, gates, and the way back through them."""
    tokens, width, e, k = shape.tokens, shape.model.d_model, choice.outputs, choice.routes
    add = passes_over_memory(hardware, shape, _PART)
    # drawn, compared, masked
    dropped = (
        [add("dropped by chance", (4 + 5 + 9) * e, rows=True, launches=3)] if choice.drops else []
    )
    return [
        product(hardware, _PART, _LOGITS, (tokens, e, width), "fp32"),
        *dropped,
        add("top-k", 4 * TOP_K_PASSES * e + 12 * k, rows=True, launches=2),
        add("gates", 8 * k, rows=True),
        # sums over sequences spread out, softmax, gates, scattered into zeros, both added
        add(
            "backward of the choice",
            (8 + 12 + 4 + 8 + 12) * e + (12 + 12) * k,
            rows=True,
            launches=7,
            forward=False,
        ),
        product(
            hardware,
            _PART,
            "gradient of rows, exact float32",
            (tokens, width, e),
            "fp32",
            forward=False,
        ),
        product(
            hardware,
            _PART,
            "gradient of weights, exact float32",
            (e, width, tokens),
            "fp32",
            forward=False,
        ),
    ]


def route_time(hardware: Hardware, tokens: float, width: int, choice: Choice) -> Time:
    """Returns what the kernel takes: three products of bfloat16, then a choice out of whole rows.

    Rows stay in float32 until they are in registers, and are read once for every tile of experts: from
    memory where those of all programs that run do not stay in the cache. No tensor core works while a
    program chooses.
    """
    target, e = tiles.target_of(hardware.capability), choice.outputs
    tile = tiles.router_tile(target, tokens, e)
    at_once = _at_once(hardware, "route", tile)
    programs, across = ceil(tokens / tile.rows), ceil(e / tile.columns)
    columns, steps = across * tile.columns, across * ceil(width / tile.depth)
    running = min(programs, at_once * hardware.multiprocessors)
    held = min(1.0, CACHED * hardware.l2_bytes / (running * tile.rows * width * 4))
    row_bytes = tokens * width * 4
    written = tokens * (4 * e + 12 * choice.routes)
    step_bytes = (tile.rows + tile.columns) * tile.depth * 4  # float32; h and l
    grid = Grid(
        programs,
        3 * 2 * tile.rows * columns * ceil(width / tile.depth) * tile.depth,
        steps,
        step_bytes,
        # rows once into registers, and there into every product; weights by every four warps
        width * 4 * (across * tile.rows + 3 / 2 * columns * tile.warps / 4),
        tile.stages,
        at_once,
    )
    time = grid_time(
        hardware,
        grid,
        "bf16",
        hbm_bytes=row_bytes * (1 + (across - 1) * (1 - held)) + 4 * e * width + written,
        l2_bytes=programs * steps * step_bytes + 4 * tokens * e,
    )
    bins = max(16, 1 << (choice.experts - 1).bit_length())
    of_one = tile.rows * choice.heads * bins * choice.top_k * _INSTRUCTIONS
    choosing = ceil(programs / hardware.multiprocessors) * of_one / (_LANES * hardware.clock_hz)
    bound = time.bound if time.seconds > choosing else "instructions"
    return Time(time.seconds + choosing, bound)
