"""Models before and after an operator of growth, with drawn weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moebius.distributed.checkpoint.grown import BlockReader, GrownReader
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


class InMemory(BlockReader):
    """Reads tensors that are there, under their names in a checkpoint or as parameters."""

    def __init__(self, state: State) -> None:
        self.state = {
            name if name.startswith(("model.", "optimizer.")) else f"model.{name}": value
            for name, value in state.items()
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.state[name].shape) if name in self.state else None

    def fill(self, block: Tensor, name: str, offsets: Sequence[int]) -> None:
        block.copy_(block_of(self.state[name], offsets, block.shape))


def whole(reader: BlockReader, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a whole tensor under its name in a checkpoint."""
    shape = reader.shape(name) or ()
    block = torch.full(shape, torch.nan, dtype=dtype)
    reader.fill(block, name, (0,) * len(shape))
    return block


def grown(state: State, growth: Growth) -> dict[str, Tensor]:
    """Returns the weights of a grown model."""
    reader, dtype = GrownReader(InMemory(state), growth.takes), state["embedding"].dtype
    found = {name: whole(reader, f"model.{name}", dtype) for name in shapes_of(growth.model)}
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes_of(growth.model)
    return found


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
