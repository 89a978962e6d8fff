"""Adds a router from one file: as many experts as a token needs, not K (arXiv 2403.07652).

    cd examples && python add_a_router.py        # two runs on 2 ranks, and add_a_router.png

A token takes its likeliest experts until their probabilities add up to p.
"""

import matplotlib.pyplot as plt
from pydantic import Field
from torch import Tensor

import moebius
from moebius.model.execution.recompute import gather_unique, save_decision
from moebius.model.initialise import Initializer, parameter
from moebius.model.layers import router_logits
from moebius.model.routers.router import ChoiceConfig, ChoiceRouter, Promises
from moebius.model.routing import Routing, token_routes


class TopPConfig(ChoiceConfig):
    """Describes the keys of `model.feed_forward.router`; ChoiceConfig adds balance and z_loss."""

    p: float = Field(default=0.4, gt=0, le=1)

    @property
    def promises(self) -> Promises:
        return Promises(causal=True, batch_invariant=True, dropless=True, balanced=False)

    def active_experts(self, num_experts: int, sequence_rows: int) -> float:
        return num_experts  # at worst: only the data knows how many it will be

    @property
    def may_serve_fewer(self) -> bool:
        return True


class TopPRouter(ChoiceRouter):
    """Takes the likeliest experts until those ahead have p together."""

    Config = TopPConfig
    config: TopPConfig

    def __init__(self, config: TopPConfig, d_row: int, num_experts: int, *, init: Initializer):
        super().__init__(config, d_row, num_experts, init=init)
        self.weight = parameter(num_experts, d_row, init=init)

    def forward(self, x_TD: Tensor, *, batch_size: int, real_T: Tensor | None = None) -> Routing:
        logits_TE = router_logits(x_TD, self.weight)  # float32, whatever the experts compute in
        p_TE = logits_TE.softmax(-1)
        order_TE = save_decision(lambda: p_TE.detach().argsort(dim=-1, descending=True))
        sorted_TE = gather_unique(p_TE, order_TE)
        ahead_TE = sorted_TE.cumsum(-1) - sorted_TE
        routes = token_routes(order_TE, sorted_TE, num_experts=self.num_experts)
        return Routing(routes.kept((ahead_TE < self.config.p).flatten()), logits_TE[:, None])


def main() -> None:
    """Trains with the built-in router and with this one, and draws loss and routes."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for router in ("token_choice", "add_a_router:TopPRouter"):
        name = router.rpartition(":")[2]
        config = moebius.recipe("small.toml", f"model.feed_forward.router.kind={router}")
        moebius.fit(config, f"runs/{name}")
        steps = [r for r in moebius.history(f"runs/{name}").records() if r["kind"] == "train"]
        loads = [sum(x["rows_one_per_route"] for x in r["exchange"].values()) for r in steps]
        per_token = [load / (16 * 128 * 4) for load in loads]  # 16 rows of 128, 4 depth steps
        print(f"{name}: loss {steps[-1]['loss']:.3f}, {per_token[-1]:.2f} experts per token")
        left.plot([r["step"] for r in steps], [r["loss"] for r in steps], label=name, alpha=0.6)
        right.plot([r["step"] for r in steps], per_token)
    left.set(xlabel="step", ylabel="loss, nats per byte")
    left.legend()
    right.set(xlabel="step", ylabel="experts per token")
    figure.savefig("add_a_router.png", dpi=120)


if __name__ == "__main__":
    main()
