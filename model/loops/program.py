"""Loop programs: what happens between the applications of the layers (model/config/loops_config.py).

    e = prelude(embedding);  s = e, 0 or noise
    R times:  s = core(condition(inject(s, e)))
    logits = read-out(norm(coda(s)))

A loop is `enter`, `begin`, the layers and `read`; what measures loops or ends them early watches
from outside (measures.py). The order of the layers is `ModelConfig.schedule_of`, and one pass
(steps.py) applies them.

Legend: B sequences, S positions, D model width, F frequencies, R loops, e the injected
input, s the state.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.model_config import ModelConfig
from ..initialise import Initializers, constant, identity, parameter, zeros
from ..layers import Linear, literal, make_norm, on_device, wide_dtype
from .depth import PassDepth
from .exits import ExitGate
from .measures import Reading
from .steps import DepthSteps

_FREQUENCIES = 8  # of r/R and of 1/R, π·2⁰ … π·2⁷
_START_DECAY = math.sqrt(1 / 5)  # of the state per loop, at the start (Parcae)
_WITHIN = math.erf(3 / math.sqrt(2))  # of a uniform number that becomes the starting noise
Norm = Callable[[Tensor], Tensor]


class Injection(nn.Module):
    """Combines the state with the injected input at the start of a loop; this one adds them.

    Work on e alone is done once per pass, in `prepare`.
    """

    def __init__(
        self, config: ModelConfig | None = None, initializers: Initializers | None = None
    ) -> None:
        super().__init__()

    def prepare(self, e_BSD: Tensor) -> Tensor | None:
        """Returns what every loop reads of e, (B, S, D); None: nothing."""
        return e_BSD

    def forward(self, s_BSD: Tensor, e_BSD: Tensor) -> Tensor:
        """Returns the state (B, S, D) that a loop starts from; e comes from `prepare`."""
        return s_BSD + e_BSD

    def finish(self, s_BSD: Tensor) -> Tensor:
        """Maps the state after the last loop to what the coda reads, (B, S, D)."""
        return s_BSD


class NoInjection(Injection):
    """Leaves the state as it is."""

    def prepare(self, e_BSD: Tensor) -> None:
        """Returns nothing, so that no loop keeps e."""

    def forward(self, s_BSD: Tensor, e_BSD: Tensor) -> Tensor:
        """Returns the state."""
        return s_BSD


class LinearInjection(Injection):
    """Applies one matrix to [s, e], as Huginn does (arXiv 2502.05171, §3.2)."""

    def __init__(self, config: ModelConfig, initializers: Initializers) -> None:
        super().__init__(config, initializers)
        d_model = config.d_model
        self.adapter = Linear(2 * d_model, d_model, init=initializers.adapter())

    def prepare(self, e_BSD: Tensor) -> Tensor:
        """Returns the matrix's right half times e."""
        weight = self.adapter.weight[:, e_BSD.shape[-1] :]
        return F.linear(e_BSD.to(weight.dtype), weight)

    def forward(self, s_BSD: Tensor, e_BSD: Tensor) -> Tensor:
        """Returns the matrix's left half times s, plus what e adds."""
        weight = self.adapter.weight[:, : s_BSD.shape[-1]]
        return (F.linear(s_BSD.to(weight.dtype), weight) + e_BSD).to(s_BSD.dtype)


class DecayInjection(Injection):
    """Lets the state decay by channel: exp(−Δ·exp(A))·s + Δ·(B·e), Δ = softplus(dt).

    The coda reads C·s. B and C start as the identity, A at 0, and Δ so that a loop keeps √(1/5) of
    the state (Parcae, arXiv 2604.12946). None of the four has weight decay.
    """

    decays = False

    def __init__(self, config: ModelConfig, initializers: Initializers) -> None:
        super().__init__(config, initializers)
        d_model, delta = config.d_model, -math.log(_START_DECAY)
        self.rate_bias = parameter(d_model, init=zeros)
        self.step_bias = parameter(d_model, init=constant(delta + math.log(-math.expm1(-delta))))
        self.input = Linear(d_model, d_model, init=identity)
        self.output = Linear(d_model, d_model, init=identity)

    def prepare(self, e_BSD: Tensor) -> Tensor:
        """Returns Δ·(B·e), which every loop adds, in float32."""
        return F.softplus(self.step_bias) * self.input(e_BSD).to(self.step_bias.dtype)

    def forward(self, s_BSD: Tensor, e_BSD: Tensor) -> Tensor:
        """Returns the decayed state plus what e adds."""
        decay_D = torch.exp(-F.softplus(self.step_bias) * torch.exp(self.rate_bias))
        return (s_BSD * decay_D + e_BSD).to(s_BSD.dtype)

    def finish(self, s_BSD: Tensor) -> Tensor:
        """Returns C·s, which the coda reads."""
        return self.output(s_BSD).to(s_BSD.dtype)


INJECTIONS = {
    "none": NoInjection,
    "add": Injection,
    "linear": LinearInjection,
    "decay": DecayInjection,
}


class Condition(nn.Module):
    """Tells a loop its place r of R, by a vector or by a scale and a shift (LoopFormer).

    It reads r/R and 1/R as sines and cosines, so the same weights serve any R. At the start it
    changes nothing.
    """

    def __init__(self, d_model: int, *, scales: bool) -> None:
        super().__init__()
        self.scales = scales
        self.place = Linear(4 * _FREQUENCIES, (1 + scales) * d_model, init=zeros)

    def forward(self, s_BSD: Tensor, loops: list[int], num_loops: list[int]) -> Tensor:
        """Returns the state as each sequence reads it in its loop, counted from 0, of so many.

        One number stands for all sequences.
        """
        wide = wide_dtype(s_BSD)
        pairs = zip(loops, num_loops, strict=True)
        times = tuple(time for loop, total in pairs for time in (loop / total, 1 / total))
        if len(loops) == 1:
            times_X = literal(times, wide, s_BSD.device)
        else:
            times_X = on_device(torch.tensor(times, dtype=wide), s_BSD.device)
        times_B2 = times_X.view(-1, 2)
        frequencies = math.pi * 2.0 ** torch.arange(_FREQUENCIES, dtype=wide, device=s_BSD.device)
        angles_B2F = times_B2[..., None] * frequencies
        features_B1F = torch.cat((angles_B2F.sin(), angles_B2F.cos()), -1).flatten(1)[:, None]
        shift, *scale = self.place(features_B1F).to(wide).chunk(1 + self.scales, -1)
        if scale:
            s_BSD = s_BSD * (1 + scale[0])
        return (s_BSD + shift).to(s_BSD.dtype)


def _unchanged(x_BSD: Tensor) -> Tensor:
    return x_BSD


@dataclass(frozen=True)
class FinalNorms:
    """Holds what normalises a state at each place where the final norm may stand."""

    of_loop: Norm = _unchanged  # at the end of every loop
    of_core: Norm = _unchanged  # between core and coda
    of_rows: Norm = _unchanged  # before the read-out


class Loops(nn.Module):
    """Applies the layers in the order of a schedule, with what a loop program does between them.

    A plain program, as MoEUT's, has no parameters and only applies the layers.
    """

    def __init__(self, config: ModelConfig, initializers: Initializers) -> None:
        super().__init__()
        program = self.config = config.loops
        self.state_std = initializers.state_std
        self.injection = INJECTIONS[program.inject](config, initializers)
        self.input_norm = (
            make_norm(config.norm_layer, config.norm_eps, config.d_model)
            if program.input_norm
            else nn.Identity()
        )
        self.condition = None
        if program.condition != "none":
            scales = program.condition == "scale_shift"
            self.condition = Condition(config.d_model, scales=scales)
        self.exit_gate = None if program.exit_entropy is None else ExitGate(config.d_model)

    def forward(
        self,
        steps: DepthSteps,
        x_BSD: Tensor,
        *,
        final_norm: Norm,
        predict: Callable[[Tensor], Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Applies a layer at every depth step of a pass.

        Args:
            steps: the pass, which applies the layers.
            x_BSD: the embedded tokens.
            final_norm: the model's.
            predict: the model's read-out, which returns the logits of rows; exits may read it.

        Returns:
            The rows that the read-out reads, (B, S, D): of the last loop, in training also of the
            others that the loss reads, in their order; and g of the exit gate for each, (B, S).
        """
        norms = self._norms(final_norm)
        reading = Reading(partial(self.read, steps, norms), predict, self.exit_gate)
        for step in steps.prelude:
            x_BSD = steps.apply(step, x_BSD)
        states = self.enter(x_BSD, steps)
        rows: list[Tensor] = []
        for loop, layers in steps.loops.items():
            states.keep(steps.watch.enter(loop))  # outside `no_grad`: those that wait keep theirs
            before_BSD = states.x_BSD
            has_gradient = torch.is_grad_enabled() and loop >= steps.depth.no_gradient
            with torch.set_grad_enabled(has_gradient):
                states.x_BSD = self.begin(states, loop, steps.depth)
                for step in layers:
                    states.x_BSD = steps.apply(step, states.x_BSD, states.live)
                states.x_BSD = norms.of_loop(states.x_BSD)
                steps.watch.leave(loop, before_BSD, states.x_BSD, reading)
            if loop in steps.read_loops:
                rows.append(reading.rows(states.of_all(), None))
        return rows, self._gates(rows)

    def enter(self, x_BSD: Tensor, steps: DepthSteps) -> "LoopStates":
        """Returns the states before the first loop, and what the loops read of the prelude's output."""
        e_BSD = self.injection.prepare(self.input_norm(x_BSD))
        return LoopStates(self.start_state(x_BSD, steps), e_BSD)

    def begin(self, states: "LoopStates", loop: int, depth: PassDepth) -> Tensor:
        """Returns the states that a loop's first layer reads."""
        s_BSD = self.injection(states.x_BSD, states.e_BSD)
        if self.condition is None:
            return s_BSD
        return self.condition(s_BSD, *depth.places(loop, states.places))

    def read(
        self, steps: DepthSteps, norms: "FinalNorms", s_BSD: Tensor, live: Tensor | None
    ) -> Tensor:
        """Returns the rows that the read-out reads of a state of the sequences `live`; None: all."""
        s_BSD = norms.of_core(self.injection.finish(s_BSD))
        for step in steps.coda:
            s_BSD = steps.apply(step, s_BSD, live)
        return norms.of_rows(s_BSD)

    def _norms(self, norm: Norm) -> "FinalNorms":
        """Puts the final norm in its places."""
        match self.config.final_norm:
            case "once":
                return FinalNorms(of_rows=norm)
            case "around_coda":
                return FinalNorms(of_core=norm, of_rows=norm)
            case "every_loop":  # which is also the one before the read-out if no coda follows
                return FinalNorms(of_loop=norm, of_rows=norm if self.config.coda else _unchanged)

    def _gates(self, rows: Sequence[Tensor]) -> list[Tensor]:
        if self.exit_gate is None or not self.training:
            return []
        return [self.exit_gate(each) for each in rows]

    def start_state(self, e_BSD: Tensor, steps: DepthSteps) -> Tensor:
        """Returns the state before the first loop, (B, S, D).

        Drawn in training by the pass's draws; in evaluation by position alone, so that no other row
        and no cache changes it.
        """
        if self.config.start == "embedding":
            return e_BSD
        if self.config.start == "zero":
            return torch.zeros_like(e_BSD)
        if steps.draws is not None:
            drawn_BSD = steps.draws.at("start", 0, None).uniform(e_BSD.shape)
            signed_BSD = 2 * drawn_BSD.to(wide_dtype(e_BSD)) - 1
            return self._noise(signed_BSD * _WITHIN).to(e_BSD)
        generator, num_positions = torch.Generator().manual_seed(0), steps.past + e_BSD.shape[1]
        table_SD = torch.empty(num_positions, e_BSD.shape[-1])
        table_SD = self._noise(table_SD.uniform_(-_WITHIN, _WITHIN, generator=generator))
        if steps.positions_BS is None:
            return on_device(table_SD[steps.past :].to(e_BSD.dtype), e_BSD.device).expand_as(e_BSD)
        return on_device(table_SD.to(e_BSD.dtype), e_BSD.device)[steps.positions_BS]

    def _noise(self, uniform: Tensor) -> Tensor:
        """Makes numbers from −erf(3/√2) to erf(3/√2) normal, cut at 3 standard deviations.

        By its inverse: torch's truncated normal rejects values, so a longer table would begin
        otherwise, and a GPU would wait.
        """
        return uniform.erfinv_().mul_(math.sqrt(2) * self.state_std)


class LoopStates:
    """Holds the states of the sequences that loop, and of those that have left or wait."""

    def __init__(self, x_BSD: Tensor, e_BSD: Tensor | None) -> None:
        self.x_BSD, self.e_BSD = x_BSD, e_BSD  # of the live sequences, e for the injection
        self.places = [*range(len(x_BSD))]  # these sequences
        self.live: Tensor | None = None  # the same, (B',) int64; None: all
        self._dtype, self._all_e_BSD, self._size = x_BSD.dtype, e_BSD, len(x_BSD)
        self._away: list[tuple[list[int], Tensor]] = []

    def keep(self, places: list[int] | None) -> None:
        """Goes on with these sequences; None: all. Costs nothing while they stay the same."""
        places = [*range(self._size)] if places is None else places
        if places == self.places:
            return
        if not set(places) <= set(self.places):  # some that were away come back
            self.x_BSD, self.e_BSD = self.of_all(), self._all_e_BSD
            self.places, self._away = [*range(self._size)], []
        kept = set(places)
        stay = [row for row, place in enumerate(self.places) if place in kept]
        leave = [row for row, place in enumerate(self.places) if place not in kept]
        if leave:
            index = self._index(leave)
            self._away.append(([self.places[row] for row in leave], self.x_BSD[index]))
            index = self._index(stay)
            self.x_BSD = self.x_BSD[index]
            self.e_BSD = None if self.e_BSD is None else self.e_BSD[index]
        self.places = places
        self.live = self._index(places) if self._away else None

    def of_all(self) -> Tensor:
        """Returns the states of all sequences, (B, S, D)."""
        if not self._away:
            return self.x_BSD
        parts = [*self._away, (self.places, self.x_BSD)]
        order = [place for places, _ in parts for place in places]
        rows = sorted(range(self._size), key=order.__getitem__)
        return torch.cat([x_BSD.to(self._dtype) for _, x_BSD in parts])[self._index(rows)]

    def _index(self, rows: list[int]) -> Tensor:
        return on_device(torch.tensor(rows, dtype=torch.int64), self.x_BSD.device)
