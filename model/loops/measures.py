"""What watches the loops of a pass from outside: the depths of its sequences, and how loops differ.

A pass has one watch. `LoopWatch` only knows which sequences make a loop, `LoopMeasures` compares
loops in training, and `Exits` (exits.py) lets sequences leave in evaluation.

Measured are the state and the experts that are chosen: routing that diverges between loops is what
lets a looped mixture of experts beat its unlooped partner where a looped dense model does not (arXiv
2605.09165). A pass compares all its loops at its end, with T·E·(R + 1) bytes of marks per layer.

Legend: B sequences, S positions (or sub-tokens), T = B·S rows of the router, E experts, D model
width, R loops, L layers, N routes of a layer in all loops, X = Σ B' pairs of a loop of the pass and
a sequence that makes it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..balance import Choices, RouterReport
from ..config.model_config import DepthStep
from ..layers import on_device, wide_dtype
from .depth import PassDepth, shares_making


@dataclass(frozen=True)
class Reading:
    """Reads a state between two loops as the pass would at its end."""

    rows: Callable[[Tensor, Tensor | None], Tensor]  # of a state of sequences (B',); None: of all
    logits: Callable[[Tensor], Tensor]  # of such rows
    gate: Callable[[Tensor], Tensor] | None  # the exit gate, of such rows; None: the model has none


class LoopWatch:
    """Follows the depth of every sequence, and measures nothing."""

    marks_choices = False  # whether `see_routes` needs the experts of every route

    def __init__(self, depth: PassDepth, x_BSD: Tensor, real_BS: Tensor | None) -> None:
        """Takes which positions are not padding, bool; None: all."""
        self.depth, self.batch_size, self.real_BS = depth, len(x_BSD), real_BS

    def enter(self, loop: int) -> list[int] | None:
        """Returns the sequences that make a loop of the pass; None: all."""
        return self.depth.live(loop)

    def see_routes(self, step: DepthStep, report: RouterReport | None) -> None:
        """Sees the choices of the feed-forward's router in a depth step."""

    def leave(self, loop: int, before_BSD: Tensor, after_BSD: Tensor, reading: Reading) -> None:
        """Sees the states of the sequences that have made a loop, before and after it."""

    def values(self) -> dict[str, Tensor]:
        """Returns what the pass logs, (B,) by name."""
        return {}


class LoopMeasures(LoopWatch):
    """Collects the measures of one pass, by sequence and by the loops that it has made."""

    marks_choices = True

    def __init__(self, depth: PassDepth, x_BSD: Tensor, real_BS: Tensor | None) -> None:
        super().__init__(depth, x_BSD, real_BS)
        self._shares = depth.shares or shares_making(depth.of_sequence or (depth.num_loops,))
        self._place_X = None if depth.of_sequence is None else _places(depth, x_BSD.device)
        self._changes: list[Tensor] = []  # by loop of the pass, (B', S)
        self._choices: dict[int, list[Choices]] = {}  # by layer, then by loop of the pass

    def leave(self, loop: int, before_BSD: Tensor, after_BSD: Tensor, reading: Reading) -> None:
        """Measures how far the pass's next loop has moved the sequences that make it."""
        self._changes.append(state_change(before_BSD.detach(), after_BSD.detach()))

    def see_routes(self, step: DepthStep, report: RouterReport | None) -> None:
        """Keeps what the sequences that make the pass's next loop have chosen in a layer."""
        if step.loop is not None and report is not None and report.choices is not None:
            self._choices.setdefault(step.member, []).append(report.choices)

    def values(self) -> dict[str, Tensor]:
        """Returns every measure by loop, (B,), as a mean over the layers.

        `state_change` is ‖s_r − s_(r−1)‖ / ‖s_r‖, `kept_experts` the share of a token's routes
        whose expert it also chose in the previous loop, and `routing_divergence` the Jensen-Shannon
        divergence, in nats, between the sequence's loads of the experts in both loops. A sequence
        that does not make a loop has 0 there, and the others are scaled up, so that the mean over
        the step's sequences is that of the sequences that do.
        """
        found = self._by_loop("state_change", mean_of_real(self._change(), self.real_BS))
        if not self._choices or len(self._shares) == 1:
            return found
        pairs = [self._compared(each) for each in self._choices.values()]
        load_LRBE, kept_LRB = (torch.stack(each) for each in zip(*pairs, strict=True))
        kept_LRB = kept_LRB[:, 1:] / load_LRBE[:, 1:].sum(-1).clamp_min(1)
        divergence_LRB = jensen_shannon(load_LRBE[:, :-1], load_LRBE[:, 1:])
        found |= self._by_loop("kept_experts", kept_LRB.sum(0), len(pairs))
        return found | self._by_loop("routing_divergence", divergence_LRB.sum(0), len(pairs))

    def _change(self) -> Tensor:
        """Returns how far each own loop of a sequence has moved it, (R, B, S); 0 if it makes none."""
        change_XS, shape = torch.cat(self._changes), (len(self._shares), self.batch_size)
        if self._place_X is not None:
            none_XS = change_XS.new_zeros(shape[0] * shape[1], change_XS.shape[1])
            change_XS = none_XS.index_copy(0, self._place_X, change_XS)
        return change_XS.unflatten(0, shape)

    def _compared(self, choices: list[Choices]) -> tuple[Tensor, Tensor]:
        """Returns a layer's choices, (R, B, E), and how many of a loop the one before made too, (R, B)."""
        num_loops, num_experts = len(self._shares), choices[0].num_experts
        row_N, num_positions = self._rows(choices)
        expert_N = torch.cat([each.expert_N for each in choices])
        index_N = torch.add(expert_N, row_N, alpha=num_experts)
        size = self.batch_size * num_positions * num_experts  # of a loop; none precedes the first
        marks = expert_N.new_zeros((num_loops + 1) * size, dtype=torch.bool)
        marks[size:].index_fill_(0, index_N, True)
        kept_N, place_N = marks[index_N].long(), row_N // num_positions
        load = expert_N.new_zeros(num_loops * self.batch_size * num_experts)
        place_and_expert_N = torch.add(expert_N, place_N, alpha=num_experts)
        load.scatter_add_(0, place_and_expert_N, torch.ones_like(expert_N))
        kept = expert_N.new_zeros(num_loops * self.batch_size).scatter_add_(0, place_N, kept_N)
        return load.view(num_loops, self.batch_size, -1), kept.view(num_loops, -1)

    def _rows(self, choices: list[Choices]) -> tuple[Tensor, int]:
        """Returns the row of every route among R·B·S, and S."""
        sizes, device = [each.num_rows for each in choices], choices[0].expert_N.device
        if self._place_X is None:
            num_positions = sizes[0] // self.batch_size
            row_T = torch.arange(sum(sizes), device=device)
        else:
            num_positions = sum(sizes) // len(self._place_X)
            position_S = torch.arange(num_positions, device=device)
            row_T = (self._place_X[:, None] * num_positions + position_S).flatten()
        if all(each.row_N is None for each in choices):
            num_routes = sum(len(each.expert_N) for each in choices)
            return row_T.repeat_interleave(num_routes // len(row_T)), num_positions
        rows = [
            part_T.repeat_interleave(len(each.expert_N) // max(each.num_rows, 1))
            if each.row_N is None
            else part_T[each.row_N]
            for part_T, each in zip(row_T.split(sizes), choices, strict=True)
        ]
        return torch.cat(rows), num_positions

    def _by_loop(self, name: str, value_RB: Tensor, num_layers: int = 1) -> dict[str, Tensor]:
        """Returns a measure's means by loop; of fewer loops than R it gets those of the last ones."""
        first = len(self._shares) - len(value_RB)
        shares = self._shares[first:]
        if len(set(shares)) == 1:
            rows = (value_RB / (num_layers * shares[0])).unbind()
        else:
            rows = [
                row_B / (num_layers * share) for row_B, share in zip(value_RB, shares, strict=True)
            ]
        return {f"{name}/{loop + 1}": row_B for loop, row_B in enumerate(rows, start=first)}


def _places(depth: PassDepth, device: torch.device) -> Tensor:
    """Returns the place of each pair among R·B: of the sequence's own loop there."""
    batch_size = len(depth.of_sequence or ())
    pairs = [(loop, sequence) for loop in range(depth.num_loops) for sequence in range(batch_size)]
    found = [depth.place(*pair) * batch_size + pair[1] for pair in pairs if depth.place(*pair) >= 0]
    return on_device(torch.tensor(found), device)


def jensen_shannon(first_BE: Tensor, second_BE: Tensor) -> Tensor:
    """Returns the divergence of distributions that are given as counts, (…, B), 0 … ln 2.

    It is 0 where one of them is empty.
    """
    first_B1, second_B1 = first_BE.sum(-1, keepdim=True), second_BE.sum(-1, keepdim=True)
    p_BE, q_BE = first_BE / first_B1.clamp_min(1), second_BE / second_B1.clamp_min(1)
    entropy = torch.special.entr
    divergence_BE = entropy((p_BE + q_BE) / 2) - (entropy(p_BE) + entropy(q_BE)) / 2
    return divergence_BE.sum(-1) * (first_B1 * second_B1 > 0).squeeze(-1)


def mean_of_real(value_BS: Tensor, real_BS: Tensor | None) -> Tensor:
    """Returns each sequence's mean over the positions that are marked as real, (B,); None: all."""
    if real_BS is None:
        return value_BS.mean(-1)
    return value_BS.where(real_BS, 0).sum(-1) / real_BS.sum(-1).clamp_min(1)


def state_change(before_BSD: Tensor, after_BSD: Tensor) -> Tensor:
    """Returns ‖after − before‖ / ‖after‖ at every position, (B, S)."""
    wide = wide_dtype(after_BSD)
    change_BS = (after_BSD.to(wide) - before_BSD.to(wide)).norm(dim=-1)
    return change_BS / after_BSD.to(wide).norm(dim=-1).clamp_min(torch.finfo(wide).tiny)
