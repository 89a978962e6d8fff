"""The kernels of a training step, one by one, with the time that roofline.py gives each: what
`moebius plan` takes for a rank's computation, and shows with `--kernels`.

The list says what this code launches, part by part. Whoever changes what a part launches changes its
function here: each is a few lines, one for each kernel or row of kernels that pass over memory.
Launches are counted too, and are within 5 % of a traced step's (benchmarks/gpu/launches.py).
Bytes are per token and channel, in the precision of the products (element e = 2 or 4) or in float32,
as the model's operations read and write them, forward and backward.

Not in the list are models whose attention or routers it does not know (`why_unknown` says so): they
keep the flat efficiency of cost_model.py. Expert parallelism's own kernels are priced with the
exchanges (communication.py).

Legend: T tokens, D width, H·C heads' channels, E experts (A of a head), K chosen, N routes, V
vocabulary.
"""

from dataclasses import replace
from functools import lru_cache

from ..model.config.attention_config import MoMHAConfig
from ..model.config.model_config import ModelConfig
from ..model.routers.sigmoid import SigmoidConfig
from ..model.routers.token_choice import TokenChoiceConfig
from .dense_kernels import (
    attention_kernels,
    cast_kernels,
    dense_feed_forward_kernels,
    embedding_kernels,
    head_kernels,
    residual_and_norm_kernels,
)
from .hardware import Hardware
from .kernel import Kernel, Shape
from .router_kernels import router_kernels
from .sparse_kernels import (
    deferred_kernels,
    expert_call,
    feed_forward_kernels,
    mlp_gradient_kernels,
    projection_kernels,
)


def why_unknown(model: ModelConfig) -> str | None:
    """Says why there is no list of this model's kernels; None where there is."""
    if isinstance(model.attention, MoMHAConfig):
        return "attention of kind momha"
    if model.halting is not None:
        return "halting"
    experts = model.experts
    if experts is None:
        return None
    if isinstance(experts.router, TokenChoiceConfig) and experts.router.capacity_factor is not None:
        return "routers with a capacity"
    if experts.sub_tokens > 1 or experts.num_shared_experts or experts.expert_bias:
        return "sub-tokens, shared experts or experts with biases"
    if not isinstance(experts.router, SigmoidConfig | TokenChoiceConfig):
        return f"routers of kind {experts.router.kind}"
    return None


@lru_cache(maxsize=512)
def step_kernels(hardware: Hardware, shape: Shape) -> tuple[Kernel, ...]:
    """Returns all kernels of one forward and backward pass of a rank, without the optimizer.

    Raises:
        ValueError: the list does not know the model.
    """
    model = shape.model
    if reason := why_unknown(model):
        raise ValueError(f"the list of kernels does not know {reason}")
    found = [
        *embedding_kernels(hardware, shape),
        *head_kernels(hardware, shape),
        *cast_kernels(hardware, shape),
    ]
    sparse = sum(model.has_experts(member) for member in model.schedule)
    for has_experts, layers in ((True, sparse), (False, model.num_layers - sparse)):
        if layers:
            layer = layer_kernels(hardware, shape, has_experts=has_experts)
            found += [replace(kernel, calls=layers * kernel.calls) for kernel in layer]
    if shape.deferred:
        found += deferred_kernels(hardware, shape)
    return tuple(found)


def layer_kernels(hardware: Hardware, shape: Shape, *, has_experts: bool) -> list[Kernel]:
    """Returns the kernels of one layer, forward and backward; K3 only if it does not wait."""
    found = residual_and_norm_kernels(hardware, shape, has_experts=has_experts)
    found += attention_kernels(hardware, shape)
    if shape.projects_by_experts:
        for bank in ("V", "O"):
            found += router_kernels(hardware, shape, shape.head_choice)
            found += projection_kernels(hardware, shape, bank)
    if has_experts:
        found += router_kernels(hardware, shape, shape.choice)
        found += feed_forward_kernels(hardware, expert_call(shape))
        if not shape.deferred:
            found += mlp_gradient_kernels(hardware, expert_call(shape), 1)
    else:
        found += dense_feed_forward_kernels(hardware, shape)
    return found
