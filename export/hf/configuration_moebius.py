"""Configures a moebius model for transformers, read from config.json.

`model` is the model's own resolved configuration, with every key that modeling_moebius.py reads,
under moebius' names. `schedule` and `sparse_members` are derived from it. The usual names repeat
some values for tools that look for them. Needs only transformers.
"""

from typing import Any

from transformers import PreTrainedConfig


class MoebiusConfig(PreTrainedConfig):
    """Describes one model of the family: MoEUT (arXiv 2405.16039), its baselines and relatives.

    A shared layer is applied several times, so `num_hidden_layers` counts depth steps, and a cache
    has as many entries. `schedule` says which of the `model["layers_per_group"]` distinct layers
    each depth step applies, and `sparse_members` which of them have experts in the feed-forward.
    """

    model_type = "moebius"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        max_position_embeddings: int = 1024,
        use_cache: bool = True,
        schedule: list[int] | None = None,
        sparse_members: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.model = _DEFAULT if model is None else model
        attention = self.model["attention"]
        self.vocab_size = self.model["vocab_size"] if vocab_size is None else vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self.schedule = [0, 1, 2, 3] if schedule is None else schedule
        self.sparse_members = sparse_members or []
        for name, value in {
            "hidden_size": self.model["d_model"],
            "num_hidden_layers": self.model["num_layers"],
            "num_attention_heads": attention["num_heads"],
            "head_dim": attention["d_head"],
        }.items():
            kwargs.pop(name, None)
            setattr(self, name, value)
        super().__init__(**{"tie_word_embeddings": False, **kwargs})


# transformers builds every configuration without arguments too, to save only the differences.
_DEFAULT: dict[str, Any] = {
    "vocab_size": 8000,
    "d_model": 128,
    "num_layers": 4,
    "layers_per_group": 4,
    "norm": "pre",
    "attention": {
        "kind": "dense",
        "num_heads": 4,
        "d_head": 32,
        "positions": {"kind": "rotary", "width": None, "base": 10000.0},
    },
    "feed_forward": {
        "kind": "dense",
        "activation": "relu",
        "d_feed_forward": 512,
        "dense_bias": True,
    },
    "halting": None,
    "final_norm": True,
    "head_bias": True,
}
