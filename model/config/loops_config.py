"""Which layers a model repeats, and what a loop reads: the section `model.loops`.

    prelude → core of C layers, R times → coda

MoEUT (arXiv 2405.16039), Universal Transformers and SUT have only the core, without injection.
Huginn (arXiv 2502.05171), Parcae (arXiv 2604.12946) and Ouro (arXiv 2510.25741) are others.
"""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from .sections import Keys


class DepthConfig(Keys):
    """Describes how many loops a training step makes; evaluation makes R, as `num_layers` says."""

    kind: Literal["fixed", "growing", "lognormal_poisson", "poisson", "uniform", "list"] = "fixed"
    """R loops; or as many as the stage says ("growing"); or drawn, from the seed and the step: as
    Huginn does, with mean R + 1 ("lognormal_poisson"), as Parcae does, with mean R ("poisson"), or
    among `values`."""

    values: tuple[PositiveInt, ...] = Field(default=(), examples=[[2, 8]])
    """Numbers of loops: least and most of "uniform", the choices of "list", the stages of
    "growing"."""

    stage_steps: PositiveInt = 1000
    """Steps of each stage of "growing"."""

    per: Literal["step", "sequence"] = "step"
    """Whether all sequences of a step share a draw, or each has its own. A sequence that is done
    leaves the later loops, and costs nothing there."""

    gradient_loops: PositiveInt | None = None
    """Loops, counted from the last, that gradients pass through; none: all. Earlier ones keep
    nothing for the backward pass (Huginn)."""

    @property
    def reached(self) -> Sequence[int]:
        """Returns the numbers of loops that `values` describes."""
        least_and_most = self.kind == "uniform"
        return range(self.values[0], self.values[1] + 1) if least_and_most else self.values

    def first_with_gradient(self, num_loops: int) -> int:
        """Returns the first of `num_loops` loops that gradients pass through, counted from 0."""
        return 0 if self.gradient_loops is None else max(0, num_loops - self.gradient_loops)

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        wanted = {"uniform": "two, the least and the most", "list": "at least one"}
        wanted["growing"] = "at least one, the loops of every stage"
        given = list(self.values)
        fits = (
            len(given) == 2 and given[0] <= given[1] if self.kind == "uniform" else bool(given)
        ) == (self.kind in wanted)
        if not fits:
            advice = f"it takes {wanted.get(self.kind, 'none')}"
            if self.kind == "uniform" and len(given) == 2:
                advice = f"the least first: {sorted(given)}"
            raise ValueError(f'loops.depth.values={given} with kind="{self.kind}": {advice}')
        if self.per == "sequence" and self.kind in ("fixed", "growing"):
            raise ValueError(
                f'loops.depth.per="sequence" with kind="{self.kind}": nothing is drawn, so all '
                'sequences have the same depth; set per="step"'
            )
        return self


class LoopsConfig(Keys):
    """Describes the repeated core of a model and the layers around it."""

    prelude: NonNegativeInt = 0
    """Layers of the group that run once, before the core."""

    coda: NonNegativeInt = 0
    """Layers of the group that run once, after the core."""

    start: Literal["embedding", "zero", "drawn"] = "embedding"
    """State before the first loop: the prelude's output, zeros, or normal noise drawn for every pass
    (Huginn, Parcae). In evaluation the noise depends only on the position."""

    inject: Literal["none", "add", "linear", "decay"] = "none"
    """How a loop reads the prelude's output e: not at all, s + e, a matrix on [s, e] (Huginn), or
    a·s + Δ·B·e with learned decays a (Parcae)."""

    input_norm: bool = False
    """Normalizes the injected input (Parcae)."""

    condition: Literal["none", "embedding", "scale_shift"] = "none"
    """How a loop knows its place: not at all, by a vector that is added to the state, or by a scale
    and a shift of it. Both are linear in sines and cosines of r/R and 1/R, and start at zero."""

    residual_scale: PositiveFloat | None = None
    """λ: the core's updates are multiplied by λ/(R·√C) (arXiv 2606.18524); none: by 1."""

    final_norm: Literal["once", "around_coda", "every_loop"] = "once"
    """Where the final norm stands: before the read-out; also between core and coda (Huginn); or
    also at the end of every loop (Ouro)."""

    read_out: tuple[PositiveInt, ...] = ()
    """Loops, counted from 1, that the training loss reads besides the last; the loss is their mean."""

    exit_entropy: NonNegativeFloat | None = None
    """β of Ouro's loss, which learns when to leave: the cross-entropy expected over the exits that a
    gate gives, minus β times their entropy. None: no gate."""

    balance: Literal["all", "each"] = "all"
    """Whether a router's auxiliary losses are of all loops of a layer together, or means over its
    loops, each balanced by itself."""

    depth: DepthConfig = DepthConfig()

    @property
    def is_plain(self) -> bool:
        """Returns whether a pass only repeats the group, as MoEUT's does."""
        return self.model_copy(update={"depth": DepthConfig()}) == LoopsConfig()

    def read_loops(self, num_loops: int) -> tuple[int, ...]:
        """Returns which of `num_loops` loops enter the loss of a training pass, counted from 0."""
        if self.exit_entropy is not None:
            return tuple(range(num_loops))
        chosen = {loop - 1 for loop in self.read_out if loop < num_loops}
        return (*sorted(chosen), num_loops - 1)

    @model_validator(mode="after")
    def _check_program(self) -> Self:
        if self.inject == "none" and self.start != "embedding":
            raise ValueError(
                f'start="{self.start}" with inject="none": the core would never read the tokens; '
                'set inject to "add", "linear" or "decay"'
            )
        if self.inject == "none" and self.input_norm:
            raise ValueError(
                'input_norm=true with inject="none": nothing is injected; leave it out'
            )
        if self.depth.gradient_loops is not None and self.inject == "none":
            raise ValueError(
                f'depth.gradient_loops={self.depth.gradient_loops} with inject="none": gradients reach the '
                "prelude and the embedding through the injection alone; set inject, or leave it out"
            )
        if self.exit_entropy is not None and self.read_out:
            raise ValueError(
                f"exit_entropy={self.exit_entropy} with read_out={list(self.read_out)}: the expected "
                "loss reads every loop; leave one of them out"
            )
        reads = self.exit_entropy is not None or bool(self.read_out)
        if reads and self.depth.gradient_loops is not None:
            raise ValueError(
                f"read_out or exit_entropy with depth.gradient_loops={self.depth.gradient_loops}: the "
                "loops that are read need a gradient; leave gradient_loops out"
            )
        if self.depth.per == "sequence" and (reads or self.balance == "each"):
            raise ValueError(
                'depth.per="sequence" with read_out, exit_entropy or balance="each": a loop that only '
                'some sequences make has no loss of its own; set depth.per="step"'
            )
        if self.final_norm == "around_coda" and not self.coda:
            raise ValueError(
                'final_norm="around_coda" with coda=0: there is no coda; set final_norm="once"'
            )
        return self
