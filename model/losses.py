"""The losses of a pass in training beside its cross-entropy: of routers, halting, exits, and a user's own.

Legend: B sequences, S positions, D model width.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .balance import RouterReport, RunningSum, add_sums
from .config.model_config import ModelConfig
from .execution.depth_losses import DepthStates, WeightedLoss
from .layers import wide_dtype
from .loops.exits import expected_loss, mean_of_real
from .loops.steps import DepthSteps
from .routers.router import Router

# Of rows, targets, their counted positions and each token's share: Transformer.read_out.
ReadOut = Callable[..., Tensor]


@dataclass(frozen=True)
class Targets:
    """Holds a pass's tokens and, with targets, the token after each and which of them count."""

    tokens_BS: Tensor
    targets_BS: Tensor | None
    mask_BS: Tensor | None  # bool; None: all count. On the host it does not wait for the device.

    @cached_property
    def counted_C(self) -> Tensor | None:
        """Returns the flat positions of the counted targets, int64; None: all."""
        if self.mask_BS is None:
            return None
        return self.mask_BS.flatten().nonzero().squeeze(1).to(self.tokens_BS.device)


class Losses:
    """Adds up a pass's losses: for the gradient with their coefficients, for the log without."""

    def __init__(self, config: ModelConfig, steps: DepthSteps, device: torch.device) -> None:
        self._config, self._steps = config, steps
        self.regularisation_B = torch.zeros(steps.num_sequences, device=device)  # float32
        self.auxiliary: dict[str, Tensor] = {}  # detached, (B,)
        self.carried: dict[str, Tensor] = {}  # detached: sums for `Router.after_step`

    def add(self, name: str, coefficient: float, value_B: Tensor, *, share: float = 1) -> None:
        """Adds a share of a loss per sequence; losses of one name are logged as their sum."""
        self.regularisation_B = self.regularisation_B + coefficient * share * value_B
        logged_B = value_B.detach() if share == 1 else share * value_B.detach()
        before_B = self.auxiliary.get(name)
        self.auxiliary[name] = logged_B if before_B is None else before_B + logged_B

    def add_steps(self, routers: Iterable[tuple[int, str, Router]], running: RunningSum) -> None:
        """Adds the losses of routers and halting in training, and what the depth steps measured."""
        steps, halting = self._steps, self._config.halting
        if steps.training:
            self._add_routers(routers, running)
        if steps.measures is not None:
            self.auxiliary |= steps.measures.values()
        if halting is not None and steps.halted is not None and steps.training:
            self.add("halting", halting.loss, steps.halted.loss_B)
            self.auxiliary["depth"] = steps.halted.depth_B
        if (loops_B := steps.loops_B) is not None:
            self.auxiliary["loops"] = loops_B

    def _add_routers(self, routers: Iterable[tuple[int, str, Router]], running: RunningSum) -> None:
        """Adds the losses of all routers, each over all repeats of its weights.

        With `loops.balance="each"` a layer's loss is the mean of those of its loops. MoEUT: Σ over
        group members of γ·ℓ_FF + δ·(ℓ_V + ℓ_O), per sequence (arXiv 2405.16039, §2.2).
        """
        config, steps = self._config, self._steps
        each = config.loops.balance == "each"
        reports: dict[int, dict[int | None, list[dict[str, RouterReport]]]] = {}
        for step, report in zip(steps.done, steps.reports, strict=True):
            scopes = reports.setdefault(step.member, {})
            scopes.setdefault(step.loop if each else None, []).append(report)
        for member, kind, router in routers:
            scopes = {
                loop: add_sums([report[kind].sums for report in found])
                for loop, found in reports[member].items()
            }
            for name in router.carried:
                total = add_sums(list(scopes.values()))[name]
                self.carried[f"{member}/{kind}/{name}"] = total.detach().sum(0)
            for loop, sums in scopes.items():
                scope = f"{member}/{kind}" if loop is None else f"{member}/{kind}/{loop}"
                for loss in router.losses(sums, running.named(scope)):
                    share = 1 / len(config.sparse_members) if loss.mean_over_layers else 1.0
                    share /= len(scopes)
                    label = loss.name if kind == "feed_forward" else f"{kind}_{loss.name}"
                    self.add(label, loss.coefficient, loss.value_B, share=share)

    def add_own(
        self,
        losses: Sequence[WeightedLoss],
        given: Targets,
        read_state: Callable[[Tensor, Targets | None], Tensor],
    ) -> None:
        """Adds a user's own losses; `read_state` reads logits or a loss out of any state."""

        def logits(state_BSD: Tensor) -> Tensor:
            found = read_state(state_BSD, None)
            return found.to(wide_dtype(found))

        def mean_loss(state_BSD: Tensor) -> Tensor:
            batch, length = given.tokens_BS.shape
            return (read_state(state_BSD, given) / (batch * length)).expand(batch)

        if losses:
            assert given.targets_BS is not None
            found = self._steps.states
            states = tuple(found[index] for index in sorted(found))
            seen = DepthStates(
                states, given.tokens_BS, given.targets_BS, given.mask_BS, mean_loss, logits
            )
            for loss in losses:
                self.add(loss.name, loss.weight, loss.value(seen))

    def cross_entropy(
        self,
        rows: Sequence[Tensor],
        gates: Sequence[Tensor],
        given: Targets,
        read_out: ReadOut,
    ) -> Tensor:
        """Returns the cross-entropy of the loops that the loss reads, a sum over tokens.

        With an exit gate it is the one expected over exits, whose entropy is added.
        """
        if not gates:
            losses = [read_out(rows_BSD, given) for rows_BSD in rows]
            return torch.stack(losses).mean()

        def loss_of(rows_BSD: Tensor, share_BS: Tensor) -> Tensor:
            return read_out(rows_BSD, given, share_BS)

        counted_BS = self._steps.real_BS if given.mask_BS is None else given.mask_BS
        if counted_BS is not None:
            counted_BS = counted_BS.to(given.tokens_BS.device)
        loss, entropy_BS, loops_BS = expected_loss(gates, rows, loss_of)
        weight = -(self._config.loops.exit_entropy or 0.0)
        self.add("exit_entropy", weight, mean_of_real(entropy_BS, counted_BS))
        self.auxiliary["loops"] = mean_of_real(loops_BS, counted_BS)
        return loss
