"""torch.compile for a layer's dense parts: norms, attention between its experts, dense
feed-forwards, the read-out.

Routing is not compiled: dispatchers talk to other ranks and read counts on the host, experts are
hand-written custom ops, routers decide. Each part is compiled separately and whole (`fullgraph`),
so a part that cannot be compiled is an error. Weights are read at every call, so low-precision
copies and gathered weights work.

Parts of one class and shape share a graph, one for training and one for evaluation, whatever the
depth. Another batch size compiles each once more; that graph then fits all further sizes.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from ...kernels.cpu.build import lacking
from ..attention.attention import DenseAttention, SwitchHead
from ..attention.mla import LatentAttention
from ..attention.momha import MoMHA
from ..layers import DenseMLP, LayerNorm, RMSNorm
from ..loops.halting import Halting
from ..transformer import Transformer

_METHODS = {
    LayerNorm: "forward",
    RMSNorm: "forward",
    DenseMLP: "forward",
    DenseAttention: "forward",
    LatentAttention: "forward",
    SwitchHead: "attend",
    MoMHA: "attend",
    Halting: "gate",
}


def compile_dense_parts(model: Transformer, *, backend: str = "inductor") -> None:
    """Makes every dense part compile itself on its first call, which takes seconds per kind of
    part.

    Args:
        model: changed in place.
        backend: torch's compiler backend; "aot_eager" runs the graph's operations without code
            generation.

    Raises:
        ValueError: this machine lacks a compiler.
    """
    if backend == "inductor":
        check_compiler(model.embedding.device)
    for owner, name in _parts(model):
        setattr(owner, name, torch.compile(getattr(owner, name), fullgraph=True, backend=backend))


def check_compiler(device: torch.device) -> None:
    """Raises ValueError unless code for that device can be compiled here."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ValueError(
            "train.compile=true needs Triton on GPUs: pip install triton, or set "
            "train.compile=false"
        )
    if lack := lacking(device.type):
        raise ValueError(
            f"train.compile=true needs {lack.need}, and {lack.advice}, or set train.compile=false"
        )


def _parts(model: Transformer) -> Iterator[tuple[Any, str]]:
    for module in model.modules():
        if type(module) in _METHODS:
            yield module, _METHODS[type(module)]
    yield model.head, "forward"
