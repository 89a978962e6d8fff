"""Recorded models of published families through the Triton kernels: logits and gradients."""

import pytest
import torch
from published_case import RECORDED, arrays_of, unbalanced_model


@pytest.mark.slow
@pytest.mark.needs_shared
@pytest.mark.parametrize("name", RECORDED)
def test_logits_and_gradients_of_experts_are_the_recorded_ones(name: str) -> None:
    recorded = arrays_of(name)
    model = unbalanced_model(name, backend="triton")
    out = model(recorded["ids"])
    # The router's kernel adds three bfloat16 products, about 2^-17 of a logit; without it 2e-5 holds.
    torch.testing.assert_close(out.logits_BSV.detach(), recorded["logits"], atol=1e-4, rtol=0)
    for layer in model.group:
        for router in layer.routers().values():  # pyright: ignore[reportCallIssue]
            router.backend = "reference"
    out = model(recorded["ids"])
    torch.testing.assert_close(out.logits_BSV.detach(), recorded["logits"], atol=2e-5, rtol=0)
    plain = unbalanced_model(name, backend="reference")
    for each, logits in ((model, out.logits_BSV), (plain, plain(recorded["ids"]).logits_BSV)):
        assert not each.training
        logits.square().mean().backward()
    wanted = dict(plain.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[key].grad, atol=5e-6, rtol=1e-4)
