"""A router of one's own: as many experts as a token needs, instead of K (arXiv 2403.07652).
docs/extend.md explains it.

    python examples/add_a_router.py

trains a small model with it on the prose that Python carries, and prints the loss, how many experts
a token gets and how evenly they are used. Every token takes its likeliest experts until their
probabilities add up to p: one where the router is sure, many where it is not. Two losses keep it
honest: the usual balancing loss, and the entropy of the router, without which a token could have
all experts by being unsure.

Legend: B sequences, T rows (B·S), E experts, N routes.
"""

from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from moebius.data_pipeline.sources.embedded import embedded_documents
from moebius.model.balance import RunningSum, sum_per_sequence
from moebius.model.config.attention_config import DenseAttentionConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.execution.recompute import gather_unique, save_decision
from moebius.model.initialise import Initializer, initialise, parameter
from moebius.model.layers import router_logits
from moebius.model.routers.router import ChoiceConfig, ChoiceRouter, Loss, Promises
from moebius.model.routers.table import ROUTERS
from moebius.model.routing import Routing, token_routes
from moebius.model.transformer import Transformer
from moebius.train.loss import micro_batch_loss

# The router -----------------------------------------------------------------------------------------------------------


class TopPConfig(ChoiceConfig):
    """The keys of `model.feed_forward.router` for this kind.

    balance, balance_scope and z_loss come with ChoiceConfig.
    """

    kind: Literal["top_p"] = "top_p"
    p: float = Field(default=0.4, gt=0, le=1)
    entropy: NonNegativeFloat = 1e-4

    @property
    def promises(self) -> Promises:
        return Promises(causal=True, batch_invariant=True, dropless=True, balanced=False)

    def active_experts(self, num_experts: int, sequence_rows: int) -> float:
        """All of them at worst: how many it will be, only the data knows."""
        return num_experts

    @property
    def may_serve_fewer(self) -> bool:
        return True


class TopPRouter(ChoiceRouter):
    """Takes the likeliest experts until those ahead have p together; weighted by probability."""

    Config = TopPConfig
    config: TopPConfig

    def __init__(
        self, config: TopPConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        self.weight = parameter(num_experts, d_row, init=init)

    def forward(self, x_TD: Tensor, *, batch_size: int, real_T: Tensor | None = None) -> Routing:
        # float32 whatever the experts compute in: a choice must not flip with it
        logits_TE = router_logits(x_TD, self.weight)
        any_order_TE = logits_TE.softmax(-1)
        expert_TE = save_decision(
            lambda: any_order_TE.detach().argsort(dim=-1, descending=True, stable=True)
        )
        probability_TE = gather_unique(any_order_TE, expert_TE)
        ahead_TE = probability_TE.cumsum(-1) - probability_TE
        all_routes = token_routes(expert_TE, probability_TE, num_experts=self.num_experts)
        routes = all_routes.kept((ahead_TE < self.config.p).flatten())
        return Routing(routes, logits_TE[:, None])

    def statistics(self, routing: Routing, batch_size: int) -> dict[str, Tensor]:
        log_p_TE = routing.logits_THA.squeeze(1).log_softmax(-1)
        entropy_T = -(log_p_TE.exp() * log_p_TE).sum(-1)
        return super().statistics(routing, batch_size) | {
            "entropy": sum_per_sequence(entropy_T, routing, batch_size)
        }

    def losses(self, sums: dict[str, Tensor], running: RunningSum) -> list[Loss]:
        entropy_B = sums["entropy"] / sums["rows"].clamp_min(1)
        unsure = Loss("routing_entropy", entropy_B, self.config.entropy, mean_over_layers=True)
        return [*super().losses(sums, running), unsure]


ROUTERS["top_p"] = TopPRouter

# Trying it ------------------------------------------------------------------------------------------------------------


def main(steps: int = 40) -> None:
    """Trains on bytes, eight sequences at a time."""
    config = ModelConfig(
        vocab_size=256,
        d_model=64,
        num_layers=2,
        layers_per_group=2,
        norm="pre",
        attention=DenseAttentionConfig(num_heads=4, d_head=16),
        feed_forward=ExpertsConfig(num_experts=8, d_expert=64, router=TopPConfig(p=0.4)),
    )
    model = Transformer(config)
    initialise(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(
        bytearray("\n".join(embedded_documents()).encode()), dtype=torch.uint8
    ).long()
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        first_B = torch.randint(len(text) - 65, (8,), generator=generator)
        rows_BS1 = text[first_B[:, None] + torch.arange(65)]
        model.before_step(step - 1)
        result = micro_batch_loss(model, rows_BS1, global_sequences=8)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        if step % 10 == 0:
            load_E = result.loads["feed_forward"].load_LN.sum(0).double()
            per_token = load_E.sum() / (2 * 8 * 64)
            print(
                f"step {step}  loss {result.cross_entropy:.3f}  experts per token {per_token:.2f}  "
                f"load max/mean {load_E.max() / load_E.mean():.2f}"
            )


if __name__ == "__main__":
    main()
