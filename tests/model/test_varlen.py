"""Documents without a mask: what torch's variable-length attention is given, and that the results are
those of the mask.

Its kernels are for GPUs alone. Here the operators get kernels for CPUs, slow loops over documents
that refuse what the real ones refuse; everything around them is torch's own.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from family import (
    LEAVING,
    gradients_of,
    make_uneven,
    own_depths,
    program,
    set_options,
    some_tokens,
    tiny_model,
)
from parts import layers
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_modes import Operations

from moebius.model import documents as documents_module
from moebius.model.attention import visible
from moebius.model.attention.visible import attend_visible
from moebius.model.documents import Documents, has_varlen_attention, mark_documents
from moebius.model.execution.compiled import compile_dense_parts
from moebius.model.loops.depth import own_depth
from moebius.model.loops.exits import ExitRule
from moebius.model.transformer import Transformer

CPU = torch.device("cpu")
ran: Counter[str] = Counter()  # which of the kernels below ran, and how often
LAYOUTS = {
    "one token each": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "whole rows": [[3, 3, 3, 3], [3, 3, 3, 3]],  # equal ids in two rows are two documents
    "padding": [[2, 2, 5, -1], [1, -1, -1, -1], [-1, -1, -1, -1]],
    "one row": [[9, 8, 8, 8, 8, 4, 4]],
}


def drawn_layout(seed: int) -> list[list[int]]:
    """One to four rows of one to 17 tokens in documents of any length, often padded at the end."""
    generator = torch.Generator().manual_seed(seed)
    size = [1 + int(torch.randint(most, (), generator=generator)) for most in (4, 17)]
    ids = torch.randint(8, size, generator=generator).sort(1).values
    return ids.where(ids < 7, -1).tolist()


ALL_LAYOUTS = LAYOUTS | {f"drawn {seed}": drawn_layout(seed) for seed in range(20)}


# Torch's operators on CPUs --------------------------------------------------------------------------------------------


def weights_of(q_HLC: Tensor, k_HLC: Tensor, scale: float, before: int) -> Tensor:
    scores_HLL = (q_HLC @ k_HLC.mT) * scale
    seen = torch.ones_like(scores_HLL[0], dtype=torch.bool).tril()
    seen = seen if before < 0 else seen.triu(-before)
    return scores_HLL.masked_fill(~seen, float("-inf")).softmax(-1)


def spans(given: tuple[Tensor, ...], offsets: Tensor, others: tuple[Any, ...]) -> Iterator[Any]:
    """Yields each run's place and heads, (H, L, C), after the checks of flash attention."""
    same, longest, also, causal, scale, window = others
    assert offsets is same or torch.equal(offsets, same)
    assert offsets.dtype == torch.int32
    assert offsets.is_contiguous()
    bounds = offsets.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(given[0])
    assert longest == also == max(end - first for first, end in pairwise(bounds))
    assert causal == (window == [-1, 0])
    assert window[1] == 0
    num_heads = given[0].shape[1]
    for each in given:
        assert each.shape[::2] == given[0].shape[::2]
        assert num_heads % each.shape[1] == 0
        assert each.shape[-1] % 8 == 0
        assert each.shape[-1] <= 256
        assert each.stride(-1) == 1 or each.shape[-1] == 1
    for first, end in pairwise(bounds):
        assert first < end
        place = slice(first, end)
        rows = (each[place].transpose(0, 1) for each in given)
        yield (
            place,
            (scale, window[0]),
            *(x.repeat_interleave(num_heads // len(x), 0) for x in rows),
        )


@varlen._varlen_attn.register_kernel("cpu")
def attend_slowly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *unused: Any,
    **also_unused: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    ran["forward"] += 1
    out = torch.empty_like(query)
    others = (cu_seq_k, max_q, max_k, is_causal, scale, window_size)
    for place, factor, q, k, v in spans((query, key, value), cu_seq_q, others):
        out[place] = (weights_of(q, k, *factor) @ v).transpose(0, 1)
    log_sums = torch.zeros(query.shape[1], len(query))  # only the real backward kernel reads them
    return out, log_sums, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def attend_slowly_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    ran["backward"] += 1
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    others = (cu_seq_k, max_q, max_k, is_causal, scale, window_size)
    given = (query, key, value, grad_out.contiguous())
    for place, factor, q, k, v, grad in spans(given, cu_seq_q, others):
        weights = weights_of(q, k, *factor)
        grad_weights = grad @ v.mT
        share = (grad_weights * weights).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - share) * factor[0]
        for gradient, value_HLC in zip(
            gradients, (grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad), strict=True
        ):
            shared_HLC = value_HLC.unflatten(0, (gradient.shape[1], -1)).sum(1)
            gradient[place] = shared_HLC.transpose(0, 1)
    return gradients


@dataclass
class Kernel:
    """Whether the device has the kernel."""

    exists: bool = True


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Lets CPUs have the kernel, in full precision too, to see small differences."""
    found = Kernel()
    ran.clear()
    monkeypatch.setattr(documents_module, "has_varlen_attention", lambda device: found.exists)
    monkeypatch.setattr(visible, "_VARLEN_DTYPES", (torch.bfloat16, torch.float32, torch.float64))
    return found


def marked(ids: list[list[int]] | Tensor, *, balance: bool = False) -> Documents:
    return mark_documents(torch.as_tensor(ids), CPU, attention=True, balance=balance)


# One attention --------------------------------------------------------------------------------------------------------


@pytest.mark.quick(150)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(
    ("channels", "of_value", "kv_heads", "window"),
    [(6, 6, 4, None), (8, 8, 4, None), (6, 6, 2, 3), (8, 5, 1, 1), (5, 9, 4, 50)],
)
def test_values_and_gradients_are_those_of_the_mask(
    layout: str,
    channels: int,
    of_value: int,
    kv_heads: int,
    window: int | None,
    kernel: Kernel,
) -> None:
    """Also where heads share keys, values have another width, and only a window is seen."""
    ids = torch.tensor(ALL_LAYOUTS[layout])
    generator = torch.Generator().manual_seed(1)
    sizes = [(4, channels), (kv_heads, channels), (kv_heads, of_value), (4, of_value)]
    given = [
        torch.randn(len(ids), heads, ids.shape[1], width, generator=generator, dtype=torch.float64)
        for heads, width in sizes
    ]
    documents = marked(ids)
    results = []
    for each in (documents, replace(documents, offsets=None)):
        q_BHSC, k_BHSC, v_BHSC = (x.clone().requires_grad_() for x in given[:3])
        y_BHSC = attend_visible(q_BHSC, k_BHSC, v_BHSC, each, window=window)
        results.append([y_BHSC, *torch.autograd.grad(y_BHSC, (q_BHSC, k_BHSC, v_BHSC), given[3])])
    assert ran == {"forward": 1, "backward": 1}
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "channels", "exists", "expected"),
    [
        (torch.bfloat16, 82, True, 1),
        (torch.float16, 256, True, 1),
        (torch.float32, 64, True, 0),
        (torch.float64, 64, True, 0),
        (torch.bfloat16, 264, True, 0),
        (torch.bfloat16, 64, False, 0),
    ],
)
def test_the_mask_remains_where_the_kernel_cannot_run(
    dtype: torch.dtype,
    channels: int,
    exists: bool,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(documents_module, "has_varlen_attention", lambda device: exists)
    documents = marked([[1, 1, 2], [3, 4, 4]])
    q_BHSC, k_BHSC, v_BHSC = torch.randn(3, 2, 2, 3, channels).to(dtype)
    ran.clear()
    attend_visible(q_BHSC, k_BHSC, v_BHSC, documents)
    assert ran["forward"] == expected
    assert ("_visible_B1SS" in vars(documents)) == (not expected)


@pytest.mark.parametrize(
    ("device", "capability", "hip", "built", "expected"),
    [
        ("cuda", (8, 0), None, True, True),
        ("cuda", (12, 0), None, True, True),
        ("cuda", (7, 5), None, True, False),
        ("cuda", (9, 4), "7.0", True, False),
        ("cuda", (9, 0), None, False, False),
        ("cpu", (9, 0), None, True, False),
        ("meta", (9, 0), None, True, False),
    ],
)
def test_the_kernel_needs_a_gpu_with_flash_attention(
    device: str,
    capability: tuple[int, int],
    hip: str | None,
    built: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    assert has_varlen_attention(torch.device(device)) == expected


def test_on_a_gpu_the_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not there; nothing is patched but what asks the driver."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    ids = torch.tensor([[1, 1, 2], [3, 4, 4]])
    with FakeTensorMode(allow_non_fake_inputs=True):
        gpu = torch.device("cuda")
        q_BHSC = torch.empty(2, 4, 3, 82, dtype=torch.bfloat16, device=gpu)
        offsets = torch.empty(5, dtype=torch.int32, device=gpu)
        place_BS = torch.empty(2, 3, dtype=torch.int64, device=gpu)
        documents = Documents(place_BS, offsets, 2, None, ids)
        assert has_varlen_attention(gpu)
        with Operations() as operations:
            y_BHSC = attend_visible(q_BHSC, q_BHSC, q_BHSC, documents)
    assert operations.names["torch_attn._varlen_attn.default"] == 1
    assert y_BHSC.shape == q_BHSC.shape
    assert y_BHSC.is_cuda


def test_no_sequences_have_no_runs(kernel: Kernel) -> None:
    """Ranks on which every sequence has left go on with none."""
    documents = marked([[1, 1, 2]]).of_sequences(torch.zeros(0, dtype=torch.int64))
    assert documents.offsets is None
    nothing = torch.empty(0, 2, 3, 8)
    assert attend_visible(nothing, nothing, nothing, documents).shape == nothing.shape


@pytest.mark.parametrize("channels", [64, 82, 256])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
        ),
    ],
)
def test_bfloat16_is_as_exact_as_with_the_mask(
    device: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients; on a GPU by torch's own kernel."""
    if device == "cpu":
        monkeypatch.setattr(documents_module, "has_varlen_attention", lambda device: True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (3, 512), generator=generator).sort(1).values
    ids[1, 450:], ids[2] = -1, 5
    documents = mark_documents(ids, torch.device(device), attention=True, balance=False)
    assert documents.offsets is not None
    shape = (4, 3, 2, 512, channels)
    given = (torch.randn(shape, generator=generator) * channels**-0.25).bfloat16().to(device)

    def results(dtype: torch.dtype, documents: Documents) -> list[Tensor]:
        *parts, gradient = given.to(dtype)
        parts = [each.requires_grad_() for each in parts]
        y_BHSC = attend_visible(*parts, documents)
        return [y_BHSC.detach(), *torch.autograd.grad(y_BHSC, parts, gradient)]

    masked = replace(documents, offsets=None)
    exact = results(torch.float64, masked)
    names = ("values", "gradient of q", "gradient of k", "gradient of v")
    errors, bounds = (
        [
            ((mine - true).norm() / true.norm()).item()
            for mine, true in zip(each, exact, strict=True)
        ]
        for each in (results(torch.bfloat16, documents), results(torch.bfloat16, masked))
    )
    for name, error, bound in zip(names, errors, bounds, strict=True):
        assert error <= 2 * bound + 1e-3, (name, error, bound)


# Whole models ---------------------------------------------------------------------------------------------------------


IDS = torch.tensor([[7, 7, 7, 7, 2, 9, 9, 9, 4], [1, 1, 1, 8, 8, 8, -1, -1, -1], [5] * 9])


def gradients(model: Transformer, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Loss and gradients of a micro-batch with documents and padding."""
    rows = some_tokens(3, 10, seed=1)
    mask = (IDS >= 0) & (rows[:, 1:] % 3 > 0)
    options = {"loss_mask_BS": mask, "global_targets": int(mask.sum())}
    return gradients_of(model, dtype, rows, documents=marked(IDS, balance=True), **options)


def with_and_without(
    make: Callable[[], Transformer], kernel: Kernel, *, tolerance: float = 1e-12
) -> tuple[int, int]:
    """Compares a model's gradients, and returns how often the kernel ran forward and backward."""
    kernel.exists = False
    expected = gradients(make(), torch.float64)
    assert not ran
    kernel.exists = True
    found = gradients(make(), torch.float64)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).norm() <= tolerance * (1 + value.norm()), key
    return ran["forward"], ran["backward"]


@pytest.mark.quick(9)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "name",
    [
        *("dense", "moeut", "switchhead", "deepseek", "sut", "sut_no_act"),
        *("qwen3_moe_small", "deepseek_v3_small", "gpt_oss_small"),
    ],
)
def test_a_model_learns_the_same(name: str, mode: Any, kernel: Kernel) -> None:
    """MoMHA keeps the mask, because its scores have a term of the distance, and so do sinks."""

    def make() -> Transformer:
        model = make_uneven(tiny_model(name, dtype=torch.float64))
        set_options(model, recompute=mode)
        return model

    depth = 0 if name.startswith(("sut", "gpt_oss")) else len(make().config.schedule)
    assert with_and_without(make, kernel) == ((1 + (mode != "none")) * depth, depth)


def count_attentions(model: Transformer) -> Counter[str]:
    """Counts from now on how often an attention of the model runs."""
    attended: Counter[str] = Counter()
    for layer in layers(model):
        layer.attention.register_forward_hook(lambda *_: attended.update(["forward"]))
    return attended


@pytest.mark.parametrize("name", LEAVING[:3])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_sequences_that_leave_learn_the_same(name: str, mode: Any, kernel: Kernel) -> None:
    attended = []

    def make() -> Transformer:
        model = program(name)
        set_options(model, recompute=mode, depth=own_depths(model, 3, 1, 2))
        attended.append(count_attentions(model))
        return model

    forward, backward = with_and_without(make, kernel, tolerance=1e-11)
    assert [forward] * 2 == [each["forward"] for each in attended]
    assert forward >= backward > 0


@torch.no_grad()
def test_sequences_that_leave_early_are_the_same(kernel: Kernel) -> None:
    model = program("norm in every loop").eval()
    depth = own_depth(model.config, 6)
    set_options(model, depth=depth, exit_rule=ExitRule.parse("state=0.3"))
    rows, found = some_tokens(3, 9, seed=1), []
    for kernel.exists in (False, True):
        attended = count_attentions(model)
        found.append(model(rows, documents=marked(IDS)))
        assert ran == (attended if kernel.exists else {})
    loops = found[0].auxiliary["loops"]
    assert loops.min() < loops.max()
    assert torch.equal(found[1].auxiliary["loops"], loops)
    torch.testing.assert_close(found[1].logits_BSV, found[0].logits_BSV, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "moeut"])
def test_compiled_parts_take_any_layout_in_few_graphs(name: str, kernel: Kernel) -> None:
    """With a backend that makes no code."""
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = (make_uneven(tiny_model(name)).eval() for _ in range(2))
    compile_dense_parts(compiled, backend="aot_eager")
    graphs = []
    for seed in range(5):
        lengths = torch.randint(1, 6, (9,), generator=torch.Generator().manual_seed(seed))
        row = torch.arange(9).repeat_interleave(lengths)[:9]
        documents = marked(torch.stack([row, row.clamp_max(1)]))
        rows, results = some_tokens(2, 10, seed=seed), []
        for model in (eager, compiled):
            model.zero_grad()
            results.append(gradients_of(model, torch.float32, rows, documents=documents))
        assert ran["forward"] == 2 * (seed + 1) * len(compiled.config.schedule)
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[2]
    assert not counters["graph_break"]


# Memory ---------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operator returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.size = max([self.size, *(each.untyped_storage().nbytes() for each in tensors)])
        return result


def largest(length: int) -> int:
    """Returns the bytes of the largest tensor of a whole training pass in bfloat16."""
    model, rows = tiny_model("dense"), some_tokens(2, length + 1, seed=1)
    ids = (torch.arange(length) // 16).expand(2, length)
    with Largest() as found:
        documents = marked(ids)
        gradients_of(model, torch.bfloat16, rows, documents=documents)
    return found.size


@pytest.mark.slow
def test_memory_is_linear_in_the_length_of_a_row(kernel: Kernel) -> None:
    short, long = largest(1024), largest(4096)
    assert long == 4 * short
    assert long < 4096 * 4096
    kernel.exists = False
    assert largest(1024) >= 2 * 1024 * 1024
