"""Configures a moebius model for transformers, read from config.json.

`model` is the model's own resolved configuration, with every key that modeling_moebius.py reads,
under moebius' names. `sparse_members` are derived from it. The usual names repeat
some values for tools that look for them. Needs only transformers.
"""

from typing import Any

from transformers import PreTrainedConfig


class MoebiusConfig(PreTrainedConfig):
    """Describes one model of the family: MoEUT (arXiv 2405.16039), its baselines and relatives.

    A shared layer is applied several times, so `num_hidden_layers` counts depth steps, and a cache
    has as many entries. `sparse_members` are the layers with experts in the feed-forward.
    """

    model_type = "moebius"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        max_position_embeddings: int = 1024,
        use_cache: bool = True,
        sparse_members: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        # transformers builds every configuration without arguments too, to save only the differences
        self.model = model or {}
        attention = self.model.get("attention", {})
        self.vocab_size: Any = vocab_size or self.model.get("vocab_size")
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self.sparse_members = sparse_members or []
        for name, value in {
            "hidden_size": self.model.get("d_model"),
            "num_hidden_layers": self.model.get("num_layers"),
            "num_attention_heads": attention.get("num_heads"),
            "head_dim": attention.get("d_head"),
        }.items():
            kwargs.pop(name, None)
            setattr(self, name, value)
        super().__init__(**{"tie_word_embeddings": False, **kwargs})

    @property
    def loops(self) -> dict[str, Any]:
        """Returns what happens between the repeats of the layers."""
        return self.model["loops"]

    def schedule(self, num_loops: int | None = None) -> list[tuple[int, int | None]]:
        """Returns the layer of every depth step, and its loop, counted from 0; None: none.

        Args:
            num_loops: repeats of the layers that repeat; None: as trained.

        Raises:
            ValueError: it is below 1, or the model repeats no layer or halts by itself.
        """
        first, total = self.loops["prelude"], self.model["layers_per_group"]
        last = total - self.loops["coda"]
        trained = (self.model["num_layers"] - first - self.loops["coda"]) // (last - first)
        number = trained if num_loops is None else num_loops
        if number < 1:
            raise ValueError(f"num_loops={num_loops} must be at least 1")
        has_loops = trained > 1 or last - first < total or self.loops["inject"] != "none"
        if number != trained and (self.model["halting"] is not None or not has_loops):
            fault = "halts by itself" if has_loops else "repeats no layer"
            raise ValueError(f"num_loops={num_loops}: the model {fault}; leave num_loops out")
        core = [(member, loop) for loop in range(number) for member in range(first, last)]
        if self.model["order"] == "aabb":
            core.sort()
        before = [(member, None) for member in range(first)]
        return [*before, *core, *((member, None) for member in range(last, total))]
