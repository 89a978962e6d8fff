"""All losses of a training pass: cross-entropy, routers, halting, exits and a user's own; its measures.

Legend: B sequences, S positions, C counted targets, D model width.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .balance import RouterReport, RunningSum, add_sums, pooled_balance, stack_sums
from .config.model_config import ModelConfig
from .execution.depth_losses import DepthStates, WeightedLoss
from .layers import on_device, wide_dtype
from .loops.exits import expected_loss
from .loops.measures import mean_of_real
from .loops.steps import DepthSteps
from .routers.router import ChoiceRouter, Loss, Router

# Statistics of one router in every depth step that its losses are over.
Repeats = list[dict[str, Tensor]]
# Transformer.read_out: (rows, Targets, each token's share or None) to the summed loss, a scalar.
ReadRows = Callable[..., Tensor]


@dataclass(frozen=True)
class Targets:
    """Holds a pass's tokens and, with targets, the token after each and which of them count."""

    tokens_BS: Tensor
    targets_BS: Tensor | None
    # bool; None: all count. Best on the CPU: finding counted positions then needs no synchronisation.
    mask_BS: Tensor | None

    @cached_property
    def counted_C(self) -> Tensor | None:
        """Returns the flat positions of the counted targets, int64; None: all."""
        if self.mask_BS is None:
            return None
        return on_device(self.mask_BS.flatten().nonzero().squeeze(1), self.tokens_BS.device)


class Losses:
    """Adds up a pass's losses: weighted for the gradient, and unweighted, with measures, for the log."""

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
        self.auxiliary |= steps.watch.values()
        if halting is not None and steps.halted is not None and steps.training:
            self.add("halting", halting.loss, steps.halted.loss_B)
            self.auxiliary["depth"] = steps.halted.depth_B
        if (loops_B := steps.loops_B) is not None:
            self.auxiliary["loops"] = loops_B

    def _add_routers(self, routers: Iterable[tuple[int, str, Router]], running: RunningSum) -> None:
        """Adds the losses of all routers, each over all repeats of its weights.

        With `loops.balance="each"` a layer's loss is the mean of those of its loops. MoEUT: Σ over
        group members of γ·ℓ_FF + δ·(ℓ_V + ℓ_O), per sequence (arXiv 2405.16039, §2.2), with γ and δ the
        coefficients `router.balance` and `attention.balance`, and ℓ the entropy losses.
        """
        steps, each = self._steps, self._config.loops.balance == "each"
        pools: list[tuple[ChoiceRouter, dict[str, Tensor]]] = []
        equal: dict[tuple[Hashable, int], tuple[Router, dict[str, list[Repeats]]]] = {}
        reports: dict[int, dict[int | None, list[dict[str, RouterReport]]]] = {}
        for step, report in zip(steps.done, steps.reports, strict=True):
            of_member = reports.setdefault(step.member, {})
            of_member.setdefault(step.loop if each else None, []).append(report)
        for member, kind, router in routers:
            by_loop = {
                loop: [report[kind].sums for report in found if report[kind].sums]
                for loop, found in reports[member].items()
            }
            keys = [router.alike(repeats) for repeats in by_loop.values()]
            if None not in keys:
                for key, repeats in zip(keys, by_loop.values(), strict=True):
                    _, kinds = equal.setdefault((key, len(by_loop)), (router, {}))
                    kinds.setdefault(kind, []).append(repeats)
                continue  # added below, all equal routers at once
            sums_by_loop = {loop: add_sums(repeats) for loop, repeats in by_loop.items()}
            if isinstance(router, ChoiceRouter) and router.pool:
                pools.append((router, router.counted(add_sums(list(sums_by_loop.values())))))
            for name in router.carried:
                total = add_sums(list(sums_by_loop.values()))[name]
                self.carried[f"{member}/{kind}/{name}"] = total.detach().sum(0)
            for loop, sums in sums_by_loop.items():
                key = f"{member}/{kind}" if loop is None else f"{member}/{kind}/{loop}"
                for loss in router.losses(sums, running.named(key)):
                    self._add_of_router(kind, loss, loss.value_B, len(sums_by_loop))
        for (_, num_loops), (router, kinds) in equal.items():
            self._add_equal(router, kinds, num_loops)
        if pools:
            chosen = pools[0][0].config
            sums = add_sums([sums for _, sums in pools])
            value_B = pooled_balance(sums, chosen.balance_scope, running.named("pool"))
            self.add("load_balancing", chosen.balance, value_B)

    def _add_equal(self, router: Router, kinds: dict[str, list[Repeats]], num_loops: int) -> None:
        """Adds the losses of routers of one key, whose statistics are stacked, by kind."""
        sums = stack_sums([repeats for own in kinds.values() for repeats in own])
        for loss in router.losses(sums, RunningSum()):
            parts = loss.value_B.split([len(own) for own in kinds.values()])
            for kind, value_RB in zip(kinds, parts, strict=True):
                self._add_of_router(kind, loss, value_RB.sum(0), num_loops)

    def _add_of_router(self, kind: str, loss: Loss, value_B: Tensor, num_loops: int) -> None:
        # a mean over the group's sparse layers, and over loops that are balanced apart
        share = 1 / len(self._config.sparse_members) if loss.mean_over_layers else 1.0
        label = loss.name if kind == "feed_forward" else f"{kind}_{loss.name}"
        self.add(label, loss.coefficient, value_B, share=share / num_loops)

    def add_own(
        self,
        losses: Sequence[WeightedLoss],
        given: Targets,
        read_state: Callable[[Tensor, Targets | None], Tensor],
    ) -> None:
        """Adds a user's own losses; `read_state` reads logits, or with targets a loss, out of a state."""

        def logits(state_BSD: Tensor) -> Tensor:
            found = read_state(state_BSD, None)
            return found.to(wide_dtype(found))

        def mean_loss(state_BSD: Tensor) -> Tensor:
            # the summed loss of counted targets ÷ all positions, the same for every sequence
            batch, length = given.tokens_BS.shape
            return (read_state(state_BSD, given) / (batch * length)).expand(batch)

        if losses:
            assert given.targets_BS is not None
            found = self._steps.states
            seen = DepthStates(
                states_L=tuple(found[index] for index in sorted(found)),
                tokens_BS=given.tokens_BS,
                targets_BS=given.targets_BS,
                loss_mask_BS=given.mask_BS,
                cross_entropy=mean_loss,
                logits=logits,
                routing=tuple(zip(self._steps.done, self._steps.reports, strict=True)),
            )
            for loss in losses:
                self.add(loss.name, loss.weight, loss.value(seen))

    def cross_entropy(
        self,
        rows: Sequence[Tensor],
        gates: Sequence[Tensor],
        given: Targets,
        read_out: ReadRows,
    ) -> Tensor:
        """Returns the cross-entropy of the loops that the loss reads, a sum over tokens.

        With an exit gate it is the expected cross-entropy over exits, and exit_entropy times the exits'
        entropy is subtracted from the regularisation.
        """
        if not gates:
            losses = [read_out(rows_BSD, given) for rows_BSD in rows]
            return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

        def loss_of(rows_BSD: Tensor, share_BS: Tensor) -> Tensor:
            return read_out(rows_BSD, given, share_BS)

        counted_BS = self._steps.real_BS if given.mask_BS is None else given.mask_BS
        if counted_BS is not None:
            counted_BS = on_device(counted_BS, given.tokens_BS.device)
        loss, entropy_BS, loops_BS = expected_loss(gates, rows, loss_of)
        weight = -(self._config.loops.exit_entropy or 0.0)
        self.add("exit_entropy", weight, mean_of_real(entropy_BS, counted_BS))
        self.auxiliary["loops"] = mean_of_real(loops_BS, counted_BS)
        return loss
