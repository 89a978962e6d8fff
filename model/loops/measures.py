"""How much the loops of a training pass differ: in state, and in the experts that they choose.

Routing that diverges between loops is what lets a looped mixture of experts beat its unlooped
partner where a looped dense model does not (arXiv 2605.09165).

Legend: B sequences, S positions (or sub-tokens), T = B·S rows of the router, E experts, D model
width.
"""

import torch
from torch import Tensor

from ..balance import RouterReport
from ..config.model_config import DepthStep
from .exits import mean_of_real, state_change


class LoopMeasures:
    """Collects the measures of one pass in which all sequences make every loop."""

    def __init__(self, batch_size: int, real_BS: Tensor | None) -> None:
        """Takes which positions are not padding, bool; None: all."""
        self._batch_size, self._real_BS = batch_size, real_BS
        self._found: dict[str, list[Tensor]] = {}
        self._chosen: dict[int, Tensor] = {}  # by layer, bool (T, E) in its last loop

    def see_state(self, loop: int, before_BSD: Tensor, after_BSD: Tensor) -> None:
        """Measures how far a loop, counted from 0, has moved the state."""
        change_BS = state_change(before_BSD.detach(), after_BSD.detach())
        self._add(f"state_change/{loop + 1}", mean_of_real(change_BS, self._real_BS))

    def see_routes(self, step: DepthStep, report: RouterReport | None) -> None:
        """Compares a layer's choices with those of its previous loop."""
        if step.loop is None or report is None or report.chosen_TE is None:
            return
        now_TE, before_TE = report.chosen_TE, self._chosen.get(step.member)
        self._chosen[step.member] = now_TE
        if before_TE is None:
            return
        before_BSE, now_BSE = (
            each_TE.unflatten(0, (self._batch_size, -1)) for each_TE in (before_TE, now_TE)
        )
        loop, chosen_B = step.loop + 1, now_BSE.sum((1, 2)).clamp_min(1)
        self._add(f"kept_experts/{loop}", (before_BSE & now_BSE).sum((1, 2)) / chosen_B)
        divergence_B = jensen_shannon(before_BSE.sum(1), now_BSE.sum(1))
        self._add(f"routing_divergence/{loop}", divergence_B)

    def values(self) -> dict[str, Tensor]:
        """Returns every measure by loop, (B,), as a mean over the layers.

        `state_change` is ‖s_r − s_(r−1)‖ / ‖s_r‖, `kept_experts` the share of a token's routes
        whose expert it also chose in the previous loop, and `routing_divergence` the Jensen-Shannon
        divergence, in nats, between the sequence's loads of the experts in both loops.
        """
        return {name: torch.stack(values).mean(0) for name, values in self._found.items()}

    def _add(self, name: str, value_B: Tensor) -> None:
        self._found.setdefault(name, []).append(value_B)


def jensen_shannon(first_BE: Tensor, second_BE: Tensor) -> Tensor:
    """Returns the divergence of distributions that are given as counts, (B,), 0 … ln 2.

    It is 0 where one of them is empty.
    """
    first_B1, second_B1 = first_BE.sum(-1, keepdim=True), second_BE.sum(-1, keepdim=True)
    p_BE, q_BE = first_BE / first_B1.clamp_min(1), second_BE / second_B1.clamp_min(1)
    entropy = torch.special.entr
    divergence_BE = entropy((p_BE + q_BE) / 2) - (entropy(p_BE) + entropy(q_BE)) / 2
    return divergence_BE.sum(-1) * (first_B1 * second_B1 > 0).squeeze(-1)
