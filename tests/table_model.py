"""A language model that is a table of log P(next token | this token), so that scores can be checked
by hand.

It is still a Transformer: the embedding is the identity, layers add nothing, and the head holds the
table.
"""

import torch
from torch import Tensor

from moebius.model.config.model_config import ModelConfig
from moebius.model.transformer import Transformer


def random_table(vocab_size: int, *, seed: int = 0) -> Tensor:
    """Returns log-probabilities of the next token (column) after each (row)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


def table_model(table_VV: Tensor) -> Transformer:
    """Builds a table's model, float64, in evaluation mode."""
    vocab_size = len(table_VV)
    config = ModelConfig.from_dotted(
        {
            "vocab_size": vocab_size,
            "d_model": vocab_size,
            "num_layers": 1,
            "layers_per_group": 1,
            "norm": "pre",
            "final_norm": False,
            "attention.kind": "dense",
            "attention.num_heads": 1,
            "attention.d_head": 2,
            "feed_forward.kind": "dense",
            "feed_forward.d_feed_forward": 1,
        }
    )
    model = Transformer(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.copy_(torch.eye(vocab_size))
        model.head.weight.copy_(table_VV.T)
    return model


def summed(table_VV: Tensor, before: str, scored: str, *, end: int = 256) -> float:
    """Sums the log-probability of bytes after others; after nothing: after an end of document."""
    last = before.encode()[-1] if before else end
    total = 0.0
    for byte in scored.encode():
        total += table_VV[last, byte].item()
        last = byte
    return total
