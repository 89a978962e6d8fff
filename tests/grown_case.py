"""Models before and after they grow, with drawn weights."""

from collections.abc import Callable, Mapping, Sequence
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
from moebius.train.growth.table import OPERATORS, parse

State = Mapping[str, Tensor]
Changes = dict[str, Any]
TOKENS = torch.arange(3 * 9).view(3, 9) * 7 % 31
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}


def _under(section: str) -> Callable[..., Changes]:
    """Returns a function that names the keys of a section."""
    return lambda **values: {f"{section}.{key}": value for key, value in values.items()}


attends, feeds, routes = map(_under, ("attention", "feed_forward", "feed_forward.router"))
BIASES = feeds(expert_bias=True, activation="swiglu")
SOFTMAX = {"norm": "pre"} | routes(kind="token_choice", top_k=3)
V3 = {"norm": "pre"} | routes(kind="deepseek", top_k=3)
GROUPS = routes(num_groups=4, kept_groups=2)
WINDOWS = {"norm": "pre"} | attends(kind="dense", window=3, window_layers=(1, 4))
LEARNED = _under("attention.positions")(kind="learned", max_positions=16)
ONCE = {"num_layers": 6, "layers_per_group": 6}
LLAMA: Changes = {"norm": "pre", "norm_layer": "rmsnorm", "initialisation.kind": "normal"}
LLAMA |= {"num_layers": 3, "layers_per_group": 3} | attends(kind="dense")
LLAMA |= feeds(kind="dense", activation="swiglu", d_feed_forward=24, dense_bias=False)
MIXTURES: dict[str, Changes] = {
    "MoEUT": {},
    "one of σ": routes(top_k=1),
    "σ-MoE": {"layers_per_group": 4} | attends(kind="dense"),
    "σ, gated, biases": BIASES,
    "softmax": SOFTMAX,
    "softmax of K, biases": SOFTMAX | BIASES | routes(renormalise=True, bias=True),
    "V3": V3 | routes(route_scale=1.5),
    "V3, groups": V3 | BIASES | GROUPS | routes(group_score="max") | feeds(num_shared_experts=1),
    "V3, not renormalised": V3 | BIASES | routes(renormalise=False),
    "V2": V3 | routes(scores="softmax", renormalise=False),
}
LAYERS: dict[str, Changes] = {  # which run once
    "SwitchHead": ONCE,
    "first layers dense": ONCE | V3 | feeds(sparse_layers=2) | attends(kind="dense"),
    "windows": ONCE | WINDOWS | feeds(sparse_layers="every_second"),
    "dense layers": ONCE | LLAMA | ONCE,
    "learned positions, aabb": ONCE | LEARNED | {"order": "aabb", "tied_head": True},
}
DENSE: dict[str, Changes] = {
    "llama": LLAMA,
    "biases and relu": LLAMA | feeds(dense_bias=True, activation="relu"),
    "biased gates": LLAMA | feeds(dense_bias=True, activation="clamped_swiglu"),
    "peri": LLAMA | {"norm": "peri", "norm_layer": "layernorm"} | feeds(activation="gelu"),
    "post": LLAMA | {"norm": "post", "norm_layer": "layernorm"},
    "repeated": LLAMA | {"num_layers": 6},
    "switchhead": LLAMA | attends(kind="switchhead"),
}


def model_of(kind: str, changes: Changes | None = None) -> ModelConfig:
    """Returns a small model of one of the tables."""
    size = {"vocab_size": 31, "d_model": 24, "num_layers": 4, "layers_per_group": 2}
    size |= feeds(d_feed_forward=24, num_experts=8, d_expert=12) | routes(top_k=3)
    base = ModelConfig.from_dotted(size | attends(d_head=6))
    return base.changed((MIXTURES | LAYERS | DENSE)[kind] | (changes or {}))


def drawn(model: ModelConfig, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Returns weights that are large enough to matter, biases, norms and buffers included."""
    module = Transformer(model)
    initialise(module, 0)
    generator = torch.Generator().manual_seed(0)
    for name, value in module.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        value.add_(noise, alpha=0.02 if name.endswith("selection_bias") else 0.1)
    return {name: value.to(dtype) for name, value in module.state_dict().items()}


class InMemory(BlockReader):
    """Reads tensors that are there, under their names in a checkpoint or as parameters."""

    def __init__(self, state: State) -> None:
        self.state = {
            name if name.startswith("optimizer.") else f"model.{name}": value
            for name, value in state.items()
        }
        super().__init__({name: tuple(value.shape) for name, value in self.state.items()})

    def fill(self, block: Tensor, name: str, offsets: Sequence[int]) -> None:
        block.copy_(block_of(self.state[name], offsets, block.shape))


def whole(reader: BlockReader, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a whole tensor under its name in a checkpoint."""
    shape = reader.shape(name) or ()
    block = torch.full(shape, torch.nan, dtype=dtype)
    reader.fill(block, name, (0,) * len(shape))
    return block


def grow(
    model: ModelConfig, state: State, words: str, seed: int = 0
) -> tuple[ModelConfig, dict[str, Tensor], list[Growth]]:
    """Returns what a model, its weights and the optimizer's state grow into, and by what."""
    growths, others = [], [name for name in state if name.startswith("optimizer.")]
    for name, own in parse([words]):
        growth = OPERATORS[name].grow(model, own, Given(seed, InMemory(state).weight))
        reader, dtype = GrownReader(InMemory(state), growth.takes), state["embedding"].dtype
        model, shapes = growth.model, shapes_of(growth.model)
        state = {name: whole(reader, f"model.{name}", dtype) for name in shapes}
        assert {name: tuple(value.shape) for name, value in state.items()} == shapes
        state |= {name: whole(reader, name, dtype) for name in others}
        growths.append(growth)
    return model, dict(state), growths


def logits_of(model: ModelConfig, state: State, tokens: Tensor = TOKENS) -> Tensor:
    """Returns the logits of weights, in their dtype."""
    module = Transformer(model).to(state["embedding"].dtype)
    module.load_state_dict(state)
    with torch.no_grad():
        return module.eval()(tokens).logits_BSV


def near(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    """Compares logits, by default as exactly as their dtype can be promised."""
    tolerance = TOLERANCE[found.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0, check_dtype=False)
