"""One forward pass: what is asked of it, and the layers that it applies.

Legend: B sequences, S positions, D model width.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...kernels.gradients import accumulate_weight_gradients
from ..attention.base import DepthContext, LayerCache, past_length
from ..balance import RouterReport
from ..config.model_config import DepthStep, ModelConfig
from ..documents import Documents
from ..execution.depth_losses import WeightedLoss
from ..execution.draws import Draws, fresh_draws
from ..execution.recompute import Recompute
from ..layers import on_device, rotary_of
from .depth import PassDepth, own_depth
from .exits import ExitRule, Exits
from .halting import Halted, Unhalted
from .measures import LoopMeasures, LoopWatch


@dataclass(frozen=True)
class PassOptions:
    """Says how one forward pass runs; the default is the model as configured."""

    depth: PassDepth | None = None  # how many loops each sequence makes; None: `num_repeats`
    # In evaluation: when a sequence stops looping; None: at the end
    exit_rule: ExitRule | None = None
    # For training; evaluation ignores draws, measures_loops and depth_losses:
    draws: Draws | None = None  # random numbers; None: keyed by torch's default generator
    measures_loops: bool = False  # whether loops are compared (measures.py)
    depth_losses: tuple[WeightedLoss, ...] = ()  # a user's own losses (train.losses)
    recompute: Recompute = "none"  # what the backward pass keeps; a cache is never recomputed
    # Whether all ranks of an EP group give every sparse layer equally many rows, none of them
    # padding: dispatchers can then skip the exchange of sizes.
    equal_rows: bool = False


class DepthSteps:
    """Applies the layers of one pass, and collects what they report."""

    def __init__(
        self,
        config: ModelConfig,
        layers: nn.ModuleList,
        options: PassOptions,
        x_BSD: Tensor,
        cache: list[LayerCache] | None,
        documents: Documents | None,
        *,
        training: bool,
    ) -> None:
        """Takes the members of the group, and the embedded tokens.

        Raises:
            ValueError: a cache of another number of loops, or with documents or an exit rule.
        """
        self.depth = options.depth or own_depth(config)
        self.schedule = config.schedule_of(self.depth.num_loops)
        self.prelude, self.loops, self.coda = _parts(config, self.schedule, self.depth.num_loops)
        last = (self.depth.num_loops - 1,)
        self.read_loops = config.loops.read_loops(self.depth.num_loops) if training else last
        self.past, self.num_sequences = past_length(cache), len(x_BSD)
        self.positions_BS = None if documents is None else documents.positions_BS
        self.real_BS = None if documents is None else documents.real_BS
        self.training, self.draws = training, None
        if training:
            self.draws = options.draws or fresh_draws(len(x_BSD), x_BSD.device)
        self.watch = self._watch(config, options, x_BSD)
        self.done: list[DepthStep] = []
        self.reports: list[dict[str, RouterReport]] = []  # of `done`
        self.halted: Halted | None = None
        # (B, S, D) by depth step; a coda that runs again replaces its own; only a user's losses read them
        self.states: dict[int, Tensor] = {}
        self._keeps_states = training and bool(options.depth_losses)
        self._config, self._layers, self._cache = config, layers, cache
        factor, core = config.loops.residual_scale, config.core_layers
        num_core_steps = core * self.depth.num_loops  # λ/(R·√C), arXiv 2606.18524
        self._core_scale = 1.0 if factor is None else factor * core**0.5 / num_core_steps
        self._check_cache(options, documents)
        self._context = DepthContext(
            rotary_of(config.attention, x_BSD, self.past, self.positions_BS),
            documents=documents,
            marks_choices=self.watch.marks_choices,
            recompute=options.recompute,
            equal_rows=options.equal_rows,
        )

    @property
    def members(self) -> list[int] | None:
        """Returns each step's layer, by which loads are then summed; None: the steps are `load_steps`."""
        members = [step.member for step in self.done]
        return None if members == [step.member for step in self._config.load_steps] else members

    @property
    def loops_B(self) -> Tensor | None:
        """Returns how many loops every sequence makes in training, float32; None: as configured."""
        if self.draws is None or self._config.loops.depth.kind == "fixed":
            return None
        device, of_sequence = self.draws.numbers_B.device, self.depth.of_sequence
        if of_sequence is None:
            return torch.full((self.num_sequences,), float(self.depth.num_loops), device=device)
        return on_device(torch.tensor(of_sequence, dtype=torch.float32), device)

    def open(self) -> AbstractContextManager[None]:
        """Opens the forward pass (kernels/pass_scope.py): repeats of a layer share gradient sums."""
        return accumulate_weight_gradients()

    def apply_unhalted(self, step: DepthStep, x_BSD: Tensor, unhalted: Unhalted) -> Tensor:
        """Applies one layer to the tokens that have not halted."""
        return self._apply(step, x_BSD, replace(self._context, unhalted=unhalted), None)

    def apply(self, step: DepthStep, x_BSD: Tensor, live: Tensor | None = None) -> Tensor:
        """Applies one layer to x, which has only the sequences `live`, (B',) int64; None: all."""
        context = self._context if live is None else self._context.of_sequences(live)
        return self._apply(step, x_BSD, context, live)

    def _apply(
        self, step: DepthStep, x_BSD: Tensor, context: DepthContext, live: Tensor | None
    ) -> Tensor:
        cache = None if self._cache is None else self._cache[step.index]
        if cache is not None:
            cache.forget_from(self.past)  # what an earlier loop has left in a shared entry
        scale = self._config.residual_multiplier
        if step.loop is not None:
            scale *= self._core_scale
        draws = self._draws_of(step, live)
        context = replace(context, step=step, cache=cache, residual_scale=scale, draws=draws)
        x_BSD, report = self._layers[step.member](x_BSD, context)
        self.watch.see_routes(step, report.get("feed_forward"))
        self.done.append(step)
        self.reports.append(report if live is None else _of_batch(report, live, self.num_sequences))
        if self._keeps_states:
            self.states[step.index] = x_BSD
        return x_BSD

    def _watch(self, config: ModelConfig, options: PassOptions, x_BSD: Tensor) -> LoopWatch:
        if options.exit_rule is not None and not self.training:
            return Exits(self.depth, x_BSD, self.real_BS, options.exit_rule)
        has_comparable_loops = (
            config.order == "abab" and config.halting is None and config.num_repeats > 1
        )
        measures = options.measures_loops and self.training and has_comparable_loops
        return (LoopMeasures if measures else LoopWatch)(self.depth, x_BSD, self.real_BS)

    def _draws_of(self, step: DepthStep, live: Tensor | None) -> Draws | None:
        """Returns the layer's random numbers, keyed by each sequence's own loop; −1 outside the core."""
        if self.draws is None:
            return None
        loops = -1 if step.loop is None else step.loop
        if step.loop is not None and self.depth.of_sequence is not None:
            of_pass = self.depth.live(step.loop)
            places = range(self.num_sequences) if of_pass is None else of_pass
            loops = [self.depth.place(step.loop, sequence) for sequence in places]
        return self.draws.at(f"layer {step.member}", loops, live)

    def _check_cache(self, options: PassOptions, documents: Documents | None) -> None:
        if self._cache is None:
            return
        if documents is not None:
            raise ValueError(
                "a pass with a cache continues one document per row: leave documents out"
            )
        if options.exit_rule is not None:
            raise ValueError(
                "a pass with a cache makes every loop of every sequence: leave exit_rule out"
            )
        if len(self._cache) != len(self.schedule):
            raise ValueError(
                f"the cache has {len(self._cache)} depth steps, and a pass of {self.depth.num_loops} "
                f"loops has {len(self.schedule)}: make a new one with model.new_cache()"
            )


Steps = Sequence[DepthStep]


def _parts(
    config: ModelConfig, schedule: Steps, num_loops: int
) -> tuple[Steps, dict[int, Steps], Steps]:
    """Splits a schedule into prelude, loops by number from 0, and coda.

    With order="aabb" no layers form a loop: all of them together are the last one.
    """
    first, end = config.loops.prelude, len(schedule) - config.loops.coda
    count = num_loops if config.order == "abab" else 1
    size = (end - first) // count
    loops = {
        num_loops - count + index: schedule[first + index * size :][:size] for index in range(count)
    }
    return schedule[:first], loops, schedule[end:]


def _of_batch(
    report: dict[str, RouterReport], live: Tensor, num_sequences: int
) -> dict[str, RouterReport]:
    """Returns a report of the live sequences as one of all, with zeros for the others."""

    def spread(value: Tensor) -> Tensor:
        zeros = value.new_zeros(num_sequences, *value.shape[1:])
        return zeros.index_copy(0, live, value)

    return {
        kind: replace(each, sums={name: spread(value) for name, value in each.sums.items()})
        for kind, each in report.items()
    }
