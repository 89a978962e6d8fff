"""The kernels of everything but routers and experts: residual stream, norms, attention, dense
feed-forward, embedding, read-out, casts of weights.

Each function is a part of the list that kernel_times.py puts together: a line for each kernel, or for
kernels that pass over memory one after the other. Bytes are per token and channel, in the precision of
the products (element e = 2 or 4) or in float32, as the model's operations read and write them.
"""

from ..kernels.activations import columns_of
from .hardware import Hardware
from .kernel import Kernel, Shape, passes_over_memory, product
from .roofline import Time, rate, stream_time


def residual_and_norm_kernels(
    hardware: Hardware, shape: Shape, *, has_experts: bool
) -> list[Kernel]:
    """Residual, norm and casts in one kernel before each map that reads a norm (model/residual.py).

    What is left are the addition after the feed-forward and, in peri-layernorm before a dense
    feed-forward, where there is no norm, the one before it.

    A kernel reads the residual and what is added, and writes their sum, its norm where routers or the
    residual read it, and a copy of each for products. Backward it reads the sum, and the gradient of
    all that it has written.
    """
    order, projections = shape.model.norm, shape.projects_by_experts
    e, low, repeats = shape.element, shape.element == 2, shape.model.num_repeats
    add = passes_over_memory(hardware, shape, "residual and norms")
    if order == "post":  # two sums, both with a norm; all read the residual
        fused = [(True, True, 1), (True, True, 0)]
        plain_sums, casts, sums = 0, 1 + projections, 1 + 3 * projections + has_experts
    else:
        # queries and values read copies, which in pre-layernorm are one
        fused = [(False, projections, 2)]
        fused += [(True, has_experts, 1)] if has_experts or order == "pre" else []
        plain_sums = 1 if len(fused) == 2 else 2
        casts = 1 if len(fused) == 1 else 0  # the feed-forward's, whose gradient is added
        sums = casts
    found = []
    for adds, normed, copies in fused:
        made = min(copies, 2 if order == "peri" else 1)
        extra = e + 4 if adds else 0
        forward = 4 + extra + 4 * normed + e * made * low + 4 * (not low and not normed)
        of_total = 4 * (order != "post")  # else nobody reads the sum itself
        backward = 4 + of_total + 4 * normed + e * copies + 4 + (e if adds and low else 0)
        what = "residual, norm and casts" if adds else "norm and casts"
        found += [
            add(what, forward),
            add(f"{what}, backward", backward, launches=2, forward=False),
        ]
    if repeats > 1:  # of a weight and a bias, for every repeat but the first
        gap = Time(hardware.kernel_gap_s, "launch")
        calls = 2 * len(fused) * (1 - 1 / repeats)
        found.append(Kernel("residual and norms", "gradients of repeats added", False, gap, calls))
    return [
        *found,
        add("add to the residual", 4 + e + 4, calls=plain_sums),
        add("cast of rows", 6, calls=casts * low),
        add("cast of gradients", 6, calls=(casts + plain_sums) * low, forward=False),
        add("sum of gradients", 12, calls=sums + projections * (order != "post"), forward=False),
        # in post-layernorm dense values read the same copy
        add(
            "sum of queries' and keys' gradients",
            3 * e,
            calls=1 + (order == "post" and not projections),
            forward=False,
        ),
    ]


def attention_kernels(hardware: Hardware, shape: Shape) -> list[Kernel]:
    """Queries and keys, with rotary positions, fused attention; V and O where they are dense."""
    attention, model, tokens = shape.model.attention, shape.model, shape.tokens
    channels, e = attention.num_heads * attention.d_head, shape.element
    dense = [] if shape.projects_by_experts else ["V", "O"]
    found: list[Kernel] = []
    for name in ("Q", "K", *dense):
        wide_in, wide_out = (channels, model.d_model) if name == "O" else (model.d_model, channels)
        found += _linear(hardware, shape, "attention", name, wide_in, wide_out)
    add = passes_over_memory(hardware, shape, "attention", width=channels)
    if attention.kind == "switchhead" and dense:  # one expert for each head, gated
        found += _linear(hardware, shape, "attention", "gates", model.d_model, attention.num_heads)
        found += [add("heads gated", 3 * e), add("heads gated, backward", 6 * e, forward=False)]
    flops = 4 * shape.seq_len * channels * tokens / 2  # a causal half
    for forward, times in ((True, 1.0), (False, 2.5)):
        seconds = times * flops / (rate(hardware, shape.products) / hardware.product_ceiling)
        seconds = seconds / hardware.attention_ceiling + hardware.kernel_gap_s
        found.append(
            Kernel(
                "attention",
                "scores and values, fused",
                forward,
                Time(seconds, "compute"),
                flops=times * flops,
            )
        )
        # queries and keys, read and written
        found.append(add("rotary positions and scales", 4 * e, forward=forward))
    return found


def dense_feed_forward_kernels(hardware: Hardware, shape: Shape) -> list[Kernel]:
    """Two products, with an activation between them as kernels of its own."""
    model, part = shape.model, "dense feed-forward"
    hidden, e = model.feed_forward.d_feed_forward, shape.element
    columns = columns_of(hidden, model.feed_forward.activation)
    add = passes_over_memory(hardware, shape, part, width=1)
    found = [
        *_linear(hardware, shape, part, "up", model.d_model, columns),
        *_linear(hardware, shape, part, "down", hidden, model.d_model),
        add("activation", (columns + hidden) * e),
        add("activation's backward pass", (2 * columns + hidden) * e, forward=False),
    ]
    if model.feed_forward.dense_bias:
        found.append(
            add("gradients of biases", (columns + model.d_model) * e, launches=2, forward=False)
        )
    return found


def _linear(
    hardware: Hardware, shape: Shape, part: str, name: str, wide_in: int, wide_out: int
) -> list[Kernel]:
    """A matrix: its product forward, the gradients of rows and weights backward."""
    tokens = shape.tokens

    def of(what: str, sides: tuple[float, float, float], *, forward: bool = False) -> Kernel:
        words = f"{name} {what}"
        return product(hardware, part, words, sides, shape.products, forward=forward)

    return [
        of("product", (tokens, wide_out, wide_in), forward=True),
        of("gradient of rows", (tokens, wide_in, wide_out)),
        of("gradient of weights", (wide_out, wide_in, tokens)),
    ]


def embedding_kernels(hardware: Hardware, shape: Shape) -> list[Kernel]:
    add = passes_over_memory(hardware, shape, "embedding")
    table = 4 * shape.model.vocab_size * shape.model.d_model
    found = [
        add("rows of the table", 8 + 8),
        # zeros of the whole table, and rows added to it, sorted by token
        Kernel(
            "embedding",
            "gradient of the table",
            False,
            stream_time(hardware, table + 12 * shape.tokens * shape.model.d_model, launches=6),
        ),
    ]
    if shape.model.final_norm:
        found += [
            add("last norm", 8),
            add("last norm's backward pass", 20, launches=3, forward=False),
        ]
    return found


def head_kernels(hardware: Hardware, shape: Shape) -> list[Kernel]:
    """Read-out and loss, chunk by chunk; gradients are made in the forward pass."""
    model, e, tokens, vocab = shape.model, shape.element, shape.tokens, shape.model.vocab_size
    rows = max(256, 2**25 // vocab // 128 * 128)  # model/head_loss.py
    chunks = max(1.0, tokens / rows)
    rows = tokens / chunks
    part, width = "head and loss", model.d_model
    low = e == 2
    # log-softmax, exponential in place, cast for the products, a bias's sum
    logits = (e + 4 + 8 + 6 * low + 4 * model.head_bias) * vocab + (8 + 6 + 6) * width
    weight = (e + 8) * vocab * width
    passes = stream_time(hardware, rows * logits + weight, launches=12)
    scaled = stream_time(hardware, 8 * tokens * width + 14 * vocab * width, launches=6)

    def of(name: str, sides: tuple[float, float, float]) -> Kernel:
        return product(hardware, part, name, sides, shape.products, calls=chunks)

    return [
        of("logits", (rows, vocab, width)),
        of("gradient of rows", (rows, width, vocab)),
        of("gradient of weights", (vocab, width, rows)),
        Kernel(part, "softmax and sums", True, passes, chunks),
        Kernel(part, "gradients scaled", False, scaled),
    ]


def cast_kernels(hardware: Hardware, shape: Shape) -> list[Kernel]:
    """Weights cast for the products, once for all repeats, and their gradients cast back.

    Each use of a dense matrix but the first adds its gradient to the sum.
    """
    model = shape.model
    if shape.element != 2:
        return []
    dense, banks = _product_weights(shape)
    sums = 3 * 2 * dense * (model.num_repeats - 1)
    matrices = 4 * model.layers_per_group
    return [
        Kernel(
            "weights",
            "cast",
            True,
            stream_time(hardware, 6 * (dense + banks), launches=2 * matrices),
        ),
        Kernel(
            "weights",
            "gradients cast",
            False,
            stream_time(hardware, 6 * (dense + banks), launches=2 * matrices),
        ),
        Kernel(
            "weights",
            "gradients of repeats added",
            False,
            stream_time(hardware, sums, launches=matrices * (model.num_repeats - 1)),
        ),
    ]


def _product_weights(shape: Shape) -> tuple[float, float]:
    """Counts the weights of dense matrices in layers, and of this rank's banks."""
    model = shape.model
    attention, width, members = model.attention, model.d_model, model.layers_per_group
    channels = attention.num_heads * attention.d_head
    dense = members * (2 if shape.projects_by_experts else 4) * width * channels
    banks = 0.0
    if shape.projects_by_experts:
        banks += members * 2 * shape.head_choice.outputs / shape.ep * width * attention.d_head
    for member in range(members):
        if model.has_experts(member):
            experts = model.experts
            assert experts is not None
            columns = columns_of(experts.d_expert, experts.activation)
            banks += shape.choice.outputs / shape.ep * width * (columns + experts.d_expert)
        else:
            hidden = model.feed_forward.d_feed_forward
            dense += width * (columns_of(hidden, model.feed_forward.activation) + hidden)
    return dense, banks
