"""Adds a router that knows its depth step: a learned temperature for each loop of one shared layer.

cd examples && python add_a_router_per_loop.py        # two runs on 2 ranks, and the temperatures
"""

import torch
from pydantic import PositiveInt
from torch import Tensor

import moebius
from moebius.model.config.model_config import DepthStep
from moebius.model.execution.recompute import save_topk
from moebius.model.initialise import Initializer, parameter, zeros
from moebius.model.layers import router_logits
from moebius.model.routers.router import ChoiceConfig, ChoiceRouter, Promises, TopKConfig
from moebius.model.routing import Routing, token_routes


class PerLoopConfig(TopKConfig, ChoiceConfig):
    """Describes the keys of `model.feed_forward.router`; deeper steps have the last temperature."""

    num_steps: PositiveInt = 4

    @property
    def promises(self) -> Promises:
        return Promises(causal=True, batch_invariant=True, dropless=True, balanced=False)


class PerLoopRouter(ChoiceRouter):
    """Chooses the K largest logits, weighted by a softmax of the depth step's temperature."""

    Config = PerLoopConfig
    config: PerLoopConfig
    reads_step = (
        True  # `forward` gets `step`: a part counts no calls, since recomputation repeats them
    )
    keeps_float32 = ("log_temperature",)

    def __init__(
        self, config: PerLoopConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        self.weight = parameter(num_experts, d_row, init=init)
        self.log_temperature = parameter(config.num_steps, init=zeros)

    def forward(
        self,
        x_TD: Tensor,
        *,
        batch_size: int,
        real_T: Tensor | None = None,
        step: DepthStep | None = None,
    ) -> Routing:
        assert step is not None  # moebius gives it to routers that read it
        temperature = self.log_temperature[min(step.index, self.config.num_steps - 1)].exp()
        logits_TE = router_logits(x_TD, self.weight) / temperature
        chosen_TK, experts_TK = save_topk(logits_TE, self.config.top_k)
        routes = token_routes(experts_TK, chosen_TK.softmax(-1), num_experts=self.num_experts)
        return Routing(routes, logits_TE[:, None])


def main() -> None:
    """Trains one shared layer with the built-in router and with this one."""
    for router in ("token_choice", "add_a_router_per_loop:PerLoopRouter"):
        config = moebius.recipe(
            "small.toml", "model.layers_per_group=1", f"model.feed_forward.router.kind={router}"
        )
        run_dir = f"runs/{router.rpartition(':')[2]}"
        moebius.fit(config, run_dir)
        steps = [r for r in moebius.history(run_dir).records() if r["kind"] == "train"]
        print(f"{run_dir}: loss {steps[-1]['loss']:.3f}")
    weights = dict(moebius.load(run_dir).model.named_parameters())
    [log_temperature] = [weight for name, weight in weights.items() if "log_temperature" in name]
    print("temperatures by depth step:", torch.exp(log_temperature.detach()).tolist())


if __name__ == "__main__":
    main()
