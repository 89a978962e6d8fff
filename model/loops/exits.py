"""When a sequence may leave the loops: Ouro's gate, trained, and the exit rules of evaluation.

A gate gives g_r after every loop; λ_r = σ(g_r) is the probability of leaving there. A token leaves
at loop r with p_r = λ_r·Π_{j<r}(1 − λ_j), and the last loop takes the rest (arXiv 2510.25741, §3.2).
Everything is computed from ln λ and ln(1 − λ) in float32 at least: a saturated gate then never
rounds the chance to go on to exactly 0.

Legend: R loops, B sequences, S positions, D model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.model_config import ModelConfig
from ..initialise import parameter, zeros
from ..layers import wide_dtype
from .depth import PassDepth
from .measures import LoopWatch, Reading, mean_of_real, state_change

Kind = Literal["kl", "state", "gate"]
_FORM = (
    "is no exit rule: write kl=X or state=X with X above 0, or gate=Q with Q from 0 to 1; at gate=1 "
    "no sequence leaves early"
)


class ExitGate(nn.Module):
    """Computes g from the rows that the read-out reads; before training λ is ½ everywhere."""

    keeps_float32: ClassVar = ("weight", "bias")

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = parameter(1, d_model, init=zeros)
        self.bias = parameter(1, init=zeros)

    def forward(self, rows_BSD: Tensor) -> Tensor:
        """Returns g, (B, S), in float32 or float64."""
        wide = wide_dtype(rows_BSD)
        return F.linear(rows_BSD.to(wide), self.weight.to(wide), self.bias.to(wide)).squeeze(-1)


def exit_log_probabilities(gates_R: Sequence[Tensor]) -> Tensor:
    """Returns ln p of leaving at each loop, (R, B, S); the last loop's gate is not read."""
    left_RBS = _log_left(gates_R[:-1], like=gates_R[-1])
    leave = [F.logsigmoid(gate_BS) for gate_BS in gates_R[:-1]]
    return left_RBS + torch.stack([*leave, torch.zeros_like(gates_R[-1])])


def _log_left(gates_R: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Returns ln of the share that has not left before each loop, and after the last one given."""
    stay = [F.logsigmoid(-gate_BS) for gate_BS in gates_R]
    return torch.stack([torch.zeros_like(like), *stay]).cumsum(0)


def expected_loss(
    gates_R: Sequence[Tensor],
    rows_R: Sequence[Tensor],
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the cross-entropy expected over exits, H(p), and the expected loops.

    Args:
        gates_R: g of every loop, (B, S).
        rows_R: what the read-out reads of every loop, (B, S, D).
        loss_of: of such rows and each token's share (B, S), the weighted sum of cross-entropies.

    Returns:
        The loss as a sum over tokens, and the others by token, (B, S).
    """
    log_p_RBS = exit_log_probabilities(gates_R)
    p_RBS = log_p_RBS.exp()
    losses = [loss_of(rows_BSD, p_BS) for rows_BSD, p_BS in zip(rows_R, p_RBS, strict=True)]
    loops_R = torch.arange(1, len(losses) + 1, device=p_RBS.device)
    return (
        torch.stack(losses).sum(),
        -(p_RBS * log_p_RBS).sum(0),
        (loops_R.view(-1, 1, 1) * p_RBS.detach()).sum(0),
    )


@dataclass(frozen=True)
class ExitRule:
    """Says when a sequence leaves the loops in evaluation: a measure's mean over its positions.

    kl      KL divergence of a loop's prediction from the previous one's, nats: below the threshold
    state   ‖s_r − s_(r−1)‖ / ‖s_r‖: below the threshold
    gate    the probability to have left, by the trained gate: above the threshold

    The mean reads the whole sequence, also behind a position, so a loss with early exits is that of
    a scored text, not of one that is being written. A threshold out of range is a ValueError.
    """

    kind: Kind
    threshold: float

    def __post_init__(self) -> None:
        most = 1.0 if self.kind == "gate" else float("inf")
        if self.kind not in get_args(Kind) or not 0 < self.threshold <= most:
            raise ValueError(f"{self.kind}={self.threshold} {_FORM}")

    @staticmethod
    def parse(text: str) -> "ExitRule":
        """Reads a rule like `kl=0.01`.

        Raises:
            ValueError: the measure is unknown, or the threshold out of range.
        """
        kind, _, number = text.partition("=")
        try:
            return ExitRule(kind, float(number))  # pyright: ignore[reportArgumentType]
        except ValueError:
            raise ValueError(f"{text!r} {_FORM}") from None

    def check(self, config: ModelConfig) -> None:
        """Checks that sequences of a model can leave by this rule.

        Raises:
            ValueError: it has no loops to leave, no gate, or a router that reads other sequences.
        """
        fault, kept = "", config.evaluation_promises
        if config.num_repeats == 1 or config.order == "aabb" or config.halting is not None:
            fault = "the model makes no loops that a sequence could leave"
        elif not (kept.causal and kept.batch_invariant):
            fault = "the router reads other sequences, which would miss those that have left"
        elif self.kind == "gate" and config.loops.exit_entropy is None:
            fault = "the model has no gate: use kl or state, or train with model.loops.exit_entropy"
        if fault:
            raise ValueError(
                f"the exit rule {self.kind}={self.threshold:g} cannot be used: {fault}"
            )


class Exits(LoopWatch):
    """Lets sequences leave by a rule, and counts their loops."""

    def __init__(
        self, depth: PassDepth, x_BSD: Tensor, real_BS: Tensor | None, rule: ExitRule
    ) -> None:
        super().__init__(depth, x_BSD, real_BS)
        self._rule = rule
        self._live: Tensor | None = None  # (B',) int64; None: all
        self._loops_B = torch.zeros(len(x_BSD), device=x_BSD.device)
        self._log_p_BSV: Tensor | None = None  # of the previous loop
        self._gates: list[Tensor] = []  # of the live sequences

    def enter(self, loop: int) -> list[int] | None:
        """Counts a loop of the sequences that are left, and returns them; None: all."""
        self._loops_B[slice(None) if self._live is None else self._live] += 1
        return None if self._live is None else self._live.tolist()

    def leave(self, loop: int, before_BSD: Tensor, after_BSD: Tensor, reading: Reading) -> None:
        """Removes the sequences that leave after a loop."""
        if loop == self.depth.num_loops - 1:
            return
        measure_BS = self._measure(before_BSD, after_BSD, reading)
        if measure_BS is None:
            return
        real_BS = self.real_BS
        if real_BS is not None and self._live is not None:
            real_BS = real_BS[self._live]
        is_gate, threshold = self._rule.kind == "gate", self._rule.threshold
        # NaN is below nothing: such a sequence makes all loops, and its loss tells of it.
        measure_B = mean_of_real(measure_BS, real_BS)
        stays_B = ~(measure_B < (1 - threshold if is_gate else threshold))
        self._live = stays_B.nonzero().squeeze(1) if self._live is None else self._live[stays_B]
        self._gates = [gate_BS[stays_B] for gate_BS in self._gates]
        if self._log_p_BSV is not None:
            self._log_p_BSV = self._log_p_BSV[stays_B]

    def values(self) -> dict[str, Tensor]:
        """Returns how many loops every sequence has made."""
        return {"loops": self._loops_B}

    def _measure(self, before_BSD: Tensor, s_BSD: Tensor, reading: Reading) -> Tensor | None:
        """Returns the rule's measure of a loop, (B', S); None: it has nothing to compare with."""
        if self._rule.kind == "state":
            return state_change(before_BSD, s_BSD)
        rows_BSD = reading.rows(s_BSD, self._live)
        if self._rule.kind == "gate":
            assert reading.gate is not None, "ExitRule.check refuses it"
            self._gates.append(reading.gate(rows_BSD))
            return _log_left(self._gates, like=self._gates[-1])[-1].exp()
        before, now = self._log_p_BSV, reading.logits(rows_BSD)
        now = self._log_p_BSV = now.log_softmax(-1, dtype=wide_dtype(rows_BSD))
        return None if before is None else (before.exp() * (before - now)).sum(-1)
