"""Text from a model: one sequence, token by token, with the key-value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..model.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer, prompt_S: Tensor, *, num_tokens: int, temperature: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Yields `num_tokens` token ids that continue the prompt.

    Args:
        prompt_S: int64, at least one token.
        temperature: of the sampling; 0 takes the most likely token each time.

    Raises:
        ValueError: an empty prompt or a negative temperature.
    """
    if prompt_S.numel() == 0 or temperature < 0:
        raise ValueError(
            f"generation needs a prompt of at least one token ({prompt_S.numel()}) and {temperature=} >= 0"
        )
    generator = torch.Generator(device=prompt_S.device).manual_seed(seed)
    cache, new_BS = model.new_cache(), prompt_S[None]
    for _ in range(num_tokens):
        logits_V = model(new_BS, cache).logits_BSV[0, -1]
        if temperature == 0:
            token = logits_V.argmax()
        else:
            token = torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)[0]
        yield int(token.item())
        new_BS = token.view(1, 1)
