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
from .depth import PassDepth, shares_making
from .exits import mean_of_real, state_change


class LoopMeasures:
    """Collects the measures of one pass, by sequence and by the loops that it has made."""

    def __init__(self, depth: PassDepth, batch_size: int, real_BS: Tensor | None) -> None:
        """Takes which positions are not padding, bool; None: all."""
        self._depth, self._batch_size, self._real_BS = depth, batch_size, real_BS
        self._shares = depth.shares or shares_making(depth.of_sequence or (depth.num_loops,))
        self._sums: dict[str, Tensor] = {}  # over layers, (loop, B)
        self._chosen: dict[int, Tensor] = {}  # by layer, bool (B, S, E) in a sequence's last loop

    def see_state(self, loop: int, before_BSD: Tensor, after_BSD: Tensor) -> None:
        """Measures how far a loop of the pass, counted from 0, has moved the live sequences."""
        change_BS = state_change(before_BSD.detach(), after_BSD.detach())
        real_BS = self._real_BS if self._real_BS is None else self._real_BS[self._live(loop)]
        self._add("state_change", loop, mean_of_real(change_BS, real_BS))

    def see_routes(self, step: DepthStep, report: RouterReport | None) -> None:
        """Compares a layer's choices with those that the same sequences made in their last loop."""
        if step.loop is None or report is None or report.chosen_TE is None:
            return
        live = self._live(step.loop)
        if not live:
            return
        now_BSE = report.chosen_TE.unflatten(0, (len(live), -1))
        if step.member not in self._chosen:
            none_BSE = now_BSE.new_zeros(self._batch_size, *now_BSE.shape[1:])
            self._chosen[step.member] = none_BSE
        before_BSE = self._chosen[step.member][live]
        self._chosen[step.member][live] = now_BSE
        chosen_B = now_BSE.sum((1, 2)).clamp_min(1)
        self._add("kept_experts", step.loop, (before_BSE & now_BSE).sum((1, 2)) / chosen_B)
        divergence_B = jensen_shannon(before_BSE.sum(1), now_BSE.sum(1))
        self._add("routing_divergence", step.loop, divergence_B)

    def values(self) -> dict[str, Tensor]:
        """Returns every measure by loop, (B,), as a mean over the layers.

        `state_change` is ‖s_r − s_(r−1)‖ / ‖s_r‖, `kept_experts` the share of a token's routes
        whose expert it also chose in the previous loop, and `routing_divergence` the Jensen-Shannon
        divergence, in nats, between the sequence's loads of the experts in both loops. A sequence
        that does not make a loop has 0 there, and the others are scaled up, so that the mean over
        the step's sequences is that of the sequences that do.
        """
        found = {}
        for name, sum_RB in self._sums.items():
            of_state = name == "state_change"
            num_layers = 1 if of_state else len(self._chosen)
            for loop in range(0 if of_state else 1, len(self._shares)):
                found[f"{name}/{loop + 1}"] = sum_RB[loop] / (num_layers * self._shares[loop])
        return found

    def _live(self, loop: int) -> list[int]:
        live = self._depth.live(loop)
        return list(range(self._batch_size)) if live is None else live

    def _add(self, name: str, loop: int, value_B: Tensor) -> None:
        """Adds the values of the sequences that are live in a loop of the pass."""
        live = self._live(loop)
        none_RB = value_B.new_zeros(len(self._shares), self._batch_size)
        places = [self._depth.place(loop, sequence) for sequence in live]
        self._sums.setdefault(name, none_RB)[places, live] += value_B


def jensen_shannon(first_BE: Tensor, second_BE: Tensor) -> Tensor:
    """Returns the divergence of distributions that are given as counts, (B,), 0 … ln 2.

    It is 0 where one of them is empty.
    """
    first_B1, second_B1 = first_BE.sum(-1, keepdim=True), second_BE.sum(-1, keepdim=True)
    p_BE, q_BE = first_BE / first_B1.clamp_min(1), second_BE / second_B1.clamp_min(1)
    entropy = torch.special.entr
    divergence_BE = entropy((p_BE + q_BE) / 2) - (entropy(p_BE) + entropy(q_BE)) / 2
    return divergence_BE.sum(-1) * (first_B1 * second_B1 > 0).squeeze(-1)
