"""Models before and after an operator of growth, with drawn weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moebius.distributed.checkpoint.grown import Take
from moebius.distributed.local_shard import block_of
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.train.families.table import shapes_of
from moebius.train.growth.growth import Given, Growth

State = Mapping[str, Tensor]
TOKENS = torch.arange(3 * 9).view(3, 9) * 7 % 31
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}


def drawn(model: ModelConfig, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Returns weights that are large enough to matter, biases, norms and buffers included."""
    module = Transformer(model)
    initialise(module, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        value.add_(noise, alpha=0.02 if name.endswith("selection_bias") else 0.1)
    return {name: value.to(dtype) for name, value in module.state_dict().items()}


def given(state: State, seed: int = 0) -> Given:
    return Given(seed, state.__getitem__)


def grown(state: State, growth: Growth) -> dict[str, Tensor]:
    """Returns the weights of a grown model; each element must come from one take."""
    found = {}
    for name, shape in shapes_of(growth.model).items():
        takes = [take for take in growth.takes if take.name == name]
        if not takes:
            assert tuple(state[name].shape) == shape, f"{name} has no take and another shape"
            found[name] = state[name]
            continue
        whole = torch.zeros(shape, dtype=state["embedding"].dtype)
        times = torch.zeros(shape)
        for take in takes:
            block_of(whole, take.start, take.sizes).copy_(_values(state, take))
            block_of(times, take.start, take.sizes).add_(1)
        assert bool((times == 1).all()), f"{name} is not covered once"
        found[name] = whole
    return found


def _values(state: State, take: Take) -> Tensor:
    values = torch.zeros(take.sizes, dtype=torch.float64)
    if take.source:
        block = block_of(state[take.source], take.at, [take.sizes[axis] for axis in take.axes])
        order = sorted(range(block.ndim), key=take.axes.__getitem__)
        values = take.factor * block.permute(order).reshape(take.sizes)
    if take.eye:
        values = values + take.eye * torch.eye(take.sizes[0])
    generator = torch.Generator().manual_seed(hash((take.seed, take.name)) % 2**31)
    return values + take.plus + take.std * torch.randn(take.sizes, generator=generator)


def logits_of(model: ModelConfig, state: State, tokens: Tensor = TOKENS, **options: Any) -> Tensor:
    """Returns the logits of weights, in their dtype."""
    module = Transformer(model).to(state["embedding"].dtype)
    module.load_state_dict(state)
    with torch.no_grad():
        return module.eval()(tokens, **options).logits_BSV


def near(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    """Compares logits, by default as exactly as their dtype can be promised."""
    tolerance = TOLERANCE[found.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0, check_dtype=False)
