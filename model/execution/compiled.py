"""torch.compile for the dense parts of a layer: norms, attention between its experts, dense
feed-forwards, the read-out.

What routes stays as it is: dispatchers talk to other ranks and read counts on the host, experts run
hand-written kernels are custom ops, routers decide. So every part is compiled by itself and as
a whole (`fullgraph`): a part that cannot be is an error, and never runs half compiled. Weights are
read at every call, so copies in low precision and gathered ones work.

Parts of one class and shape share a graph: a model of any depth has as many as it has kinds of
parts, once for training and once for evaluation. Another batch size costs one more of each, which
then fits all further ones.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from ...kernels.cpu.build import lacking
from ..attention.attention import DenseAttention, SwitchHead
from ..attention.momha import MoMHA
from ..halting import Halting
from ..layers import DenseMLP, LayerNorm
from ..transformer import Transformer

_METHODS = {
    LayerNorm: "forward",
    DenseMLP: "forward",
    DenseAttention: "forward",
    SwitchHead: "attend",
    MoMHA: "attend",
    Halting: "gate",
}


def compile_dense_parts(model: Transformer, *, backend: str = "inductor") -> None:
    """Lets every dense part compile itself when it is first called.

    That takes seconds for each kind of part, once per process.

    Args:
        backend: torch's name of what makes code of a graph; "aot_eager" makes none, and runs the
            operations of the graph.

    Raises:
        ValueError: this machine has not what a compiler needs.
    """
    if backend == "inductor":
        check_compiler(model.embedding.device)
    for owner, name in _parts(model):
        setattr(owner, name, torch.compile(getattr(owner, name), fullgraph=True, backend=backend))


def check_compiler(device: torch.device) -> None:
    """Checks that code for that device can be compiled here; else ValueError."""
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
