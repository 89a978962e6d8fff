"""Generates text from a model, one sequence, token by token, with the key-value cache.

A model that routes sequences together also needs a group context (group_context.py): rows of
training text in the same batch, which advance by one token with every generated token.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..model.transformer import Transformer
from .group_context import group_context_size, in_group_context
from .scoring import NotFiniteError

COLDEST = 1e-30  # a lower temperature would overflow float32 logits


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_S: Tensor,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    context_MS: Tensor | None = None,
    cache_loops: int | None = None,
) -> Iterator[int]:
    """Yields `num_tokens` token ids that continue the prompt.

    Args:
        prompt_S: int64, at least one token.
        temperature: of sampling; 0, or a value too small for float32, takes the most likely token.
        top_p: samples among the likeliest tokens that together have this probability, after the
            temperature; 1: among all.
        context_MS: int64, `group_context_size(model)` rows, each at least as long as prompt and
            output without the last token; None if the model needs none.
        cache_loops: loops of a layer whose keys and values are kept; later loops share with earlier
            ones (`Transformer.new_cache`). None: all.

    Raises:
        ValueError: the prompt is empty, the temperature or the group context is invalid, the model
            reads whole sequences, or its weights hold inf or nan.
    """
    if prompt_S.numel() == 0:
        raise ValueError("the prompt is empty; generation needs at least one token")
    check_request(num_tokens, temperature, top_p)
    _check_group_context(model, context_MS, length=len(prompt_S) + num_tokens - 1)
    generator = torch.Generator(device=prompt_S.device).manual_seed(seed % 2**64)
    cache, new_S, seen = model.new_cache(cache_loops), prompt_S, 0
    for _ in range(num_tokens):
        beside_MS = None if context_MS is None else context_MS[:, seen : seen + len(new_S)]
        new_BS, row = in_group_context(new_S, beside_MS, key=(seed,))
        logits_V = model(new_BS, cache).logits_BSV[row, -1]
        if not logits_V.max().isfinite():  # nan is the greatest
            raise NotFiniteError
        if temperature < COLDEST:
            token = logits_V.argmax()
        else:
            likely_V = _nucleus((logits_V / temperature).softmax(-1), top_p)
            token = torch.multinomial(likely_V, 1, generator=generator)[0]
        yield int(token.item())
        seen, new_S = seen + len(new_S), token.view(1)


def _nucleus(probabilities_V: Tensor, top_p: float) -> Tensor:
    """Zeroes all but the fewest likeliest tokens with at least `top_p` together; 1 keeps all."""
    if top_p == 1.0:
        return probabilities_V
    sorted_V, tokens_V = probabilities_V.sort(descending=True)
    before_V = sorted_V.cumsum(-1) - sorted_V
    kept_V = sorted_V.where(before_V < top_p, 0.0)
    return torch.zeros_like(probabilities_V).scatter(0, tokens_V, kept_V)


def check_request(num_tokens: int, temperature: float, top_p: float = 1.0) -> None:
    """Checks the number of tokens, the temperature and the probability of sampling.

    Raises:
        ValueError: fewer than one token, a temperature that is negative or not finite, or `top_p`
            outside (0, 1].
    """
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    if num_tokens < 1:
        raise ValueError(f"cannot generate {num_tokens} tokens: ask for at least 1")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be finite and at least 0")


def _check_group_context(model: Transformer, context_MS: Tensor | None, *, length: int) -> None:
    experts = model.config.experts
    if experts is not None and experts.router.reads_whole_sequences:
        raise ValueError(
            f"router.kind={experts.router.kind!r} as configured reads whole sequences, including "
            "later positions, so the model cannot generate text"
        )
    wanted = group_context_size(model)
    given = (0, length) if context_MS is None else tuple(context_MS.shape)
    if given[0] != wanted or given[1] < length:
        raise ValueError(
            f"the model routes {wanted + 1} sequences together, so it needs a group context of "
            f"{wanted} sequences of at least {length} tokens, got {given[0]} of {given[1]} "
            "(evaluation/group_context.py draws them)"
        )
