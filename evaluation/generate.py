"""Text from a model: one sequence, token by token, with the key-value cache.

A model that routes sequences together gets a group context (group_context.py): given text, of which it sees
one more token whenever it writes one itself. They are rows of the same batch, with keys and values
of their own.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..model.transformer import Transformer
from .group_context import group_context_size, in_group_context

COLDEST = 1e-30  # below it logits / temperature overflows float32


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_S: Tensor,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    context_MS: Tensor | None = None,
) -> Iterator[int]:
    """Yields `num_tokens` token ids that continue the prompt.

    Args:
        prompt_S: int64, at least one token.
        temperature: of the sampling; 0 takes the most likely token each time, and so does all
            that is too small for float32 to divide by.
        context_MS: int64, as many rows as `group_context_size(model)` and at least as long as
            prompt and answer without the last token; None where there are none.

    Raises:
        ValueError: an empty prompt, a temperature that is negative or no number, a group context
            that does not fit, or a model that reads whole sequences.
    """
    if prompt_S.numel() == 0:
        raise ValueError("generation needs a prompt of at least one token, and got none")
    check_request(num_tokens, temperature)
    _check_group_context(model, context_MS, length=len(prompt_S) + num_tokens - 1)
    generator = torch.Generator(device=prompt_S.device).manual_seed(seed)
    cache, new_S, seen = model.new_cache(), prompt_S, 0
    for _ in range(num_tokens):
        beside_MS = None if context_MS is None else context_MS[:, seen : seen + len(new_S)]
        new_BS, row = in_group_context(new_S, beside_MS, key=(seed,))
        logits_V = model(new_BS, cache).logits_BSV[row, -1]
        if temperature < COLDEST:
            token = logits_V.argmax()
        else:
            token = torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)[
                0
            ]
        yield int(token.item())
        seen, new_S = seen + len(new_S), token.view(1)


def check_request(num_tokens: int, temperature: float) -> None:
    """Checks that so many tokens can be sampled at that temperature.

    Raises:
        ValueError: fewer than one token, or a temperature that is negative, infinite or no number.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: at least 1 is needed")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: a finite number from 0 on is needed")


def _check_group_context(model: Transformer, context_MS: Tensor | None, *, length: int) -> None:
    experts = model.config.experts
    if experts is not None and experts.router.reads_whole_sequences:
        raise ValueError(
            f"router.kind={experts.router.kind!r} as configured reads whole sequences, later "
            "positions included: such a model "
            "cannot write, for at each token what comes later does not exist yet"
        )
    wanted = group_context_size(model)
    given = (0, length) if context_MS is None else tuple(context_MS.shape)
    if given[0] != wanted or given[1] < length:
        raise ValueError(
            f"this model routes {wanted + 1} sequences together, so it writes beside a group "
            f"context of {wanted} sequences of at least {length} tokens; "
            f"given: {given[0]} of {given[1]} (evaluation/group_context.py draws them)"
        )
