"""The whole model: embed, repeat the group of layers, read out.

    x = Emb[tokens]
    for step in config.schedule:  # repeats of the group: A B A B …, or A A B B …
        x = group[step.member](x)
    logits = W_out · LN(x) + b    # untied from the embedding

MoEUT (arXiv 2405.16039) has nothing that depends on the step: no layer embedding, no halting, no
residual scaling. SUT halts, and model/halting.py runs its depth steps. With G = L nothing is shared
and this is an ordinary Transformer; with G = 1 and a dense feed-forward a plain Universal
Transformer. The residual stream has the embedding's dtype: float32, except under
train.precision="bfloat16_only" (model/execution/precision.py).

Cost of MoEUT per token and depth step, in multiply-accumulates: attention (2 k_A + 2)·D·H·C plus
the scores, feed-forward 2·K·F·D, routers (E + 2·H·N_A)·D.

Legend: B sequences, S positions, D model width, V vocabulary, L depth steps, G layers in a group, R
= L/G repeats.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.gradients import accumulate_weight_gradients
from .attention.base import DepthContext, LayerCache
from .balance import DepthLoad, RouterReport, RunningSum, add_sums, collect_loads
from .block import Layer
from .config.model_config import DepthStep, ModelConfig, ScaledInitialisationConfig
from .documents import Documents
from .execution.depth_losses import DepthStates, WeightedLoss
from .execution.draws import Draws, fresh_draws
from .execution.recompute import Recompute
from .experts import ExpertLinears, ExpertMLPs
from .halting import Halted, Halting, Unhalted
from .head_loss import ReadOut
from .initialise import Initializers, parameter
from .layers import NORM, LayerNorm, RotaryTable, rotary_table, wide_dtype
from .loops.depth import PassDepth
from .loops.exits import ExitRule, Exits, expected_loss, mean_of_real
from .loops.measures import LoopMeasures
from .loops.program import Loops
from .routers.router import Router


@dataclass(frozen=True)
class ModelOutput:
    """Holds the result of one forward pass: logits or a loss, and the routers' losses and loads."""

    # (B, S, V) float32: the next token's logits. With targets a scalar: their cross-entropy in nats,
    # summed over all counted positions without materialising the logits (model/head_loss.py).
    read_out: Tensor
    # float32, per sequence: all auxiliary losses with their coefficients; zero in evaluation mode
    regularisation_B: Tensor
    # detached, per sequence: every auxiliary loss without its coefficient, and halting's depth
    auxiliary: dict[str, Tensor]
    # by router kind: feed_forward, value and output (SwitchHead), attention (MoMHA)
    loads: dict[str, DepthLoad]
    # detached: sums for `after_step`, once added up over the whole step
    carried: dict[str, Tensor]

    @property
    def logits_BSV(self) -> Tensor:
        """Returns the next token's logits at every position, of a pass without targets."""
        assert self.read_out.ndim == 3, "a pass with targets has a loss and no logits"
        return self.read_out

    @property
    def cross_entropy(self) -> Tensor:
        """Returns the summed cross-entropy of a pass with targets, a scalar in nats."""
        assert self.read_out.ndim == 0, "only a pass with targets has a loss"
        return self.read_out


class Transformer(nn.Module):
    """Builds MoEUT or a relative from its configuration.

    Parameters have no values until `initialise` (model/initialise.py) or a checkpoint fills them.
    """

    def __init__(self, config: ModelConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.running = RunningSum()
        self.depth_losses: tuple[WeightedLoss, ...] = ()  # in training; set from outside
        # Whether a pass in lower precision casts weights; sharded ones are cast when gathered.
        self.casts_weights = True
        initializers = _initializers(config)
        self.embedding = parameter(config.vocab_size, config.d_model, init=initializers.embedding())
        self.position_embedding = None
        if config.attention.max_positions is not None:
            self.position_embedding = parameter(
                config.attention.max_positions, config.d_model, init=initializers.embedding()
            )
        self.embedding_norm = (
            LayerNorm(config.d_model, affine=False) if config.norm == "post" else None
        )
        self.group = nn.ModuleList(
            Layer(config, initializers, member, backend=backend)
            for member in range(config.layers_per_group)
        )
        self.loops = Loops(config, initializers)
        self.num_loops = config.num_repeats  # of a pass in evaluation; may be set
        self.training_depth: PassDepth | None = None  # of the next pass in training; None: as there
        self.training_draws: Draws | None = (
            None  # of the same; None: from torch's default generator
        )
        self.exit_rule: ExitRule | None = None  # of evaluation; may be set
        self.measures_loops = False  # whether training passes compare their loops; may be set
        self.halting = None if config.halting is None else Halting(config.halting, config.d_model)
        has_final_norm = config.final_norm and config.norm != "post"
        self.final_norm = NORM.get(config.norm_layer)(config.d_model) if has_final_norm else None
        self.head = ReadOut(
            config.d_model,
            config.vocab_size,
            init=initializers.head(),
            bias=config.head_bias,
            bias_init=initializers.head_bias(),
            tied=config.tied_head,
        )

    def forward(
        self,
        tokens_BS: Tensor,
        cache: list[LayerCache] | None = None,
        *,
        targets_BS: Tensor | None = None,
        loss_mask_BS: Tensor | None = None,
        documents: Documents | None = None,
    ) -> ModelOutput:
        """Computes the next token's logits at every position; with targets their cross-entropy.

        Args:
            tokens_BS: int64, 0 … V−1. With a cache, only the new positions.
            cache: one entry per depth step (`new_cache`), extended in place.
            targets_BS: int64, 0 … V−1: the token after every position.
            loss_mask_BS: bool: which targets count; None: all. A mask on the host does not wait for
                the device.
            documents: of the tokens (`mark_documents`); None: every row is one document.

        Raises:
            ValueError: documents together with a cache, a cache of another number of loops, or
                more positions than the model has learned.
        """
        self._check_cache(cache, documents)
        counted_C = None
        if loss_mask_BS is not None:
            counted_C = loss_mask_BS.flatten().nonzero().squeeze(1).to(tokens_BS.device)
        past = 0 if cache is None else cache[0].length
        positions_BS = None if documents is None else documents.positions_BS
        x_BSD = self._embed(tokens_BS, past, positions_BS)
        draws = None
        if self.training:
            draws = self.training_draws or fresh_draws(len(tokens_BS), tokens_BS.device)
        context = DepthContext(
            self._rotary(x_BSD, past, positions_BS), documents=documents, draws=draws
        )
        depth = self.depth
        steps = _DepthSteps(self, depth, context, cache, len(tokens_BS))
        schedule, real_BS = steps.schedule, None if documents is None else documents.real_BS
        halted, exits, gates = None, None, []
        if self.exit_rule is not None and not self.training:
            gate = self.loops.exit_gate
            exits = Exits(
                self.exit_rule, len(tokens_BS), documents, predict=self.read_out, gate=gate
            )
        with accumulate_weight_gradients():
            if self.halting is not None:
                halted = self.halting(steps.apply, x_BSD, schedule, real_BS=real_BS)
                x_BSD = halted.answer_BSD
                rows = [x_BSD if self.final_norm is None else self.final_norm(x_BSD)]
            else:
                rows, gates = self.loops(
                    steps.apply_to_live,
                    x_BSD,
                    schedule,
                    depth,
                    final_norm=self.final_norm,
                    positions_BS=positions_BS,
                    past=past,
                    draws=draws,
                    exits=exits,
                    measures=steps.measures,
                )
        regularisation_B, auxiliary, carried = self._losses(steps, halted, tokens_BS)
        if self.training and self.config.loops.depth.kind != "fixed":
            loops = depth.of_sequence or (depth.num_loops,) * len(tokens_BS)
            auxiliary["loops"] = torch.tensor(loops, dtype=torch.float32, device=tokens_BS.device)
        if exits is not None and exits.loops_B is not None:
            auxiliary["loops"] = exits.loops_B
        if self.training and targets_BS is not None:
            counted_BS = real_BS if loss_mask_BS is None else loss_mask_BS
            read_out, added = self._loss(rows, gates, targets_BS, counted_C, counted_BS)
            if self.depth_losses:
                read = partial(self._read_state, targets_BS=targets_BS, counted_C=counted_C)
                states = tuple(steps.states[index] for index in sorted(steps.states))
                logits = partial(self._read_state, targets_BS=None, counted_C=None)
                seen = DepthStates(states, tokens_BS, targets_BS, loss_mask_BS, read, logits)
                added |= {loss.name: (loss.weight, loss.value(seen)) for loss in self.depth_losses}
            for name, (weight, value_B) in added.items():
                auxiliary[name] = value_B.detach()
                regularisation_B = regularisation_B + weight * value_B
        else:
            read_out = self.read_out(rows[-1], targets_BS, counted_C)
        members: list[int] | None = [step.member for step in steps.done]
        if members == [step.member for step in self.config.load_steps]:
            members = None
        return ModelOutput(
            read_out=read_out.to(wide_dtype(read_out)),
            regularisation_B=regularisation_B,
            auxiliary=auxiliary,
            loads=collect_loads(steps.reports, members=members),
            carried=carried,
        )

    def new_cache(self, shared_loops: int | None = None) -> list[LayerCache]:
        """Returns an empty cache with one entry per depth step: a shared layer has new keys at
        every repeat.

        With `shared_loops` m, loop r of a layer shares its entry with loop r mod m, and the later
        one's keys stay: 1 keeps those of the last loop (Huginn, arXiv 2502.05171, §6).

        Raises:
            ValueError: `shared_loops` is below 1.
        """
        if shared_loops is not None and shared_loops < 1:
            raise ValueError(f"shared_loops={shared_loops} must be at least 1")
        entries: dict[tuple[int, int | None], LayerCache] = {}
        for step in self.schedule:
            entries.setdefault(_slot(step, shared_loops), LayerCache())
        return [entries[_slot(step, shared_loops)] for step in self.schedule]

    @property
    def depth(self) -> PassDepth:
        """Returns how many loops the next pass makes."""
        drawn, loops = self.training_depth if self.training else None, self.num_loops
        return drawn or PassDepth(loops, self.config.loops.depth.first_with_gradient(loops))

    @property
    def schedule(self) -> tuple[DepthStep, ...]:
        """Returns the depth steps of the next pass."""
        return self.config.schedule_of(self.depth.num_loops)

    def routers(self) -> Iterator[tuple[int, str, Router]]:
        """Yields (group member, kind, router) for every router."""
        for member, layer in enumerate(self.group):
            for kind, router in cast(Layer, layer).routers().items():
                yield member, kind, router

    def recompute_layers(self, mode: Recompute) -> None:
        """Sets what the backward pass keeps of every depth step (model/execution/recompute.py)."""
        for layer in self.group:
            cast(Layer, layer).recompute = mode
        for bank in self.modules():
            if isinstance(bank, ExpertMLPs | ExpertLinears):
                bank.defer = mode == "none"  # deferring would keep what recomputation frees

    def before_step(self, step: int) -> None:
        """Tells every router how many optimizer steps are done, and clears the running sums."""
        self.running.reset()
        for _, _, router in self.routers():
            router.before_step(step)

    def after_step(self, step: int, totals: dict[str, Tensor]) -> None:
        """Gives every router its share of `carried`, summed over micro-batches and ranks."""
        for member, kind, router in self.routers():
            own = {name: totals[f"{member}/{kind}/{name}"] for name in router.carried}
            if own:
                router.after_step(step, own)

    def _check_cache(self, cache: list[LayerCache] | None, documents: Documents | None) -> None:
        if cache is not None and documents is not None:
            raise ValueError(
                "a pass with a cache continues one document per row: leave documents out"
            )
        if cache is not None and self.exit_rule is not None:
            raise ValueError(
                "a pass with a cache makes every loop of every sequence: set exit_rule to None"
            )
        if cache is not None and len(cache) != len(self.schedule):
            raise ValueError(
                f"the cache has {len(cache)} depth steps, and a pass of {self.depth.num_loops} loops "
                f"has {len(self.schedule)}: make a new one with model.new_cache()"
            )

    def _embed(self, tokens_BS: Tensor, past: int, positions_BS: Tensor | None) -> Tensor:
        x_BSD = F.embedding(tokens_BS, self.embedding)
        if self.position_embedding is not None:
            last = past + tokens_BS.shape[1]
            if last > len(self.position_embedding):
                raise ValueError(
                    f"{last} positions exceed max_positions={len(self.position_embedding)} "
                    "learned by this model: shorten the text"
                )
            if positions_BS is None:
                x_BSD = x_BSD + self.position_embedding[past:last]
            else:
                x_BSD = x_BSD + F.embedding(positions_BS, self.position_embedding)
        if self.config.scale_embedding:
            x_BSD = x_BSD * self.config.d_model**0.5
        if self.embedding_norm is not None:
            n_BSD = self.embedding_norm(x_BSD * self.config.d_model**0.5)
            x_BSD = n_BSD.to(x_BSD.dtype)  # the norm has no weight to set its dtype
        return x_BSD

    def _rotary(
        self, x_BSD: Tensor, past: int, positions_BS: Tensor | None = None
    ) -> RotaryTable | None:
        """Builds the rotary table of the new positions, once for all depth steps."""
        attention = self.config.attention
        if attention.kind == "momha":
            return None
        if positions_BS is None:
            positions = torch.arange(past, past + x_BSD.shape[1], device=x_BSD.device)
        else:
            positions = positions_BS[:, None]
        positions = positions.to(wide_dtype(x_BSD))
        return rotary_table(positions, attention.rotary_channels, attention.rotary_base)

    def read_out(
        self,
        x_BSD: Tensor,
        targets_BS: Tensor | None = None,
        counted_C: Tensor | None = None,
        share_BS: Tensor | None = None,
    ) -> Tensor:
        """Returns the logits of rows that were normalised, (…, V); with targets their loss.

        See `ReadOut.forward`.
        """
        tied = None
        if self.config.tied_head:
            tied = self.embedding.to(cast(Layer, self.group[0]).attention.dtype)
        return self.head(x_BSD, targets_BS, counted_C, tied, share_BS)

    def _loss(
        self,
        rows: list[Tensor],
        gates: list[Tensor],
        targets_BS: Tensor,
        counted_C: Tensor | None,
        counted_BS: Tensor | None,
    ) -> tuple[Tensor, dict[str, tuple[float, Tensor]]]:
        """Returns the cross-entropy of the loops that the loss reads, and what is added to it.

        An addition has a weight and a value per sequence, (B,).
        """
        if not gates:
            losses = [self.read_out(rows_BSD, targets_BS, counted_C) for rows_BSD in rows]
            return torch.stack(losses).mean(), {}

        def loss_of(rows_BSD: Tensor, share_BS: Tensor) -> Tensor:
            return self.read_out(rows_BSD, targets_BS, counted_C, share_BS)

        if counted_BS is not None:
            counted_BS = counted_BS.to(targets_BS.device)
        loss, entropy_BS, loops_BS = expected_loss(gates, rows, loss_of)
        weight = -(self.config.loops.exit_entropy or 0.0)
        return loss, {
            "exit_entropy": (weight, mean_of_real(entropy_BS, counted_BS)),
            "loops": (0.0, mean_of_real(loops_BS, counted_BS)),  # only for the log
        }

    def _read_state(
        self, state_BSD: Tensor, *, targets_BS: Tensor | None, counted_C: Tensor | None
    ) -> Tensor:
        """Returns what is read out of any state: the mean cross-entropy for each sequence, (B,).

        Without targets, the logits, (B, S, V).
        """
        n_BSD = state_BSD if self.final_norm is None else self.final_norm(state_BSD)
        total = self.read_out(n_BSD, targets_BS, counted_C)
        if targets_BS is None:
            return total.to(wide_dtype(total))
        return (total / targets_BS.numel()).expand(len(targets_BS))

    def _losses(
        self, steps: "_DepthSteps", halted: Halted | None, tokens_BS: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Sums the auxiliary losses of all routers, each over all repeats of its weights, and of
        halting.

        With `loops.balance="each"` a layer's loss is the mean of those of its loops.

        Evaluation mode has none. MoEUT: Σ over group members of γ·ℓ_FF + δ·(ℓ_V + ℓ_O), per
        sequence (arXiv 2405.16039, §2.2).
        """
        config = self.config
        regularisation_B = torch.zeros(tokens_BS.shape[0], device=tokens_BS.device)
        auxiliary: dict[str, Tensor] = {}
        carried: dict[str, Tensor] = {}
        if not self.training:
            return regularisation_B, auxiliary, carried
        each = config.loops.balance == "each"
        reports: dict[int, dict[int | None, list[dict[str, RouterReport]]]] = {}
        for step, report in zip(steps.done, steps.reports, strict=True):
            scopes = reports.setdefault(step.member, {})
            scopes.setdefault(step.loop if each else None, []).append(report)
        for member, kind, router in self.routers():
            scopes = {
                loop: add_sums([report[kind].sums for report in found])
                for loop, found in reports[member].items()
            }
            for name in router.carried:
                total = add_sums(list(scopes.values()))[name]
                carried[f"{member}/{kind}/{name}"] = total.detach().sum(0)
            for loop, sums in scopes.items():
                scope = f"{member}/{kind}" if loop is None else f"{member}/{kind}/{loop}"
                for loss in router.losses(sums, self.running.named(scope)):
                    share = 1 / len(config.sparse_members) if loss.mean_over_layers else 1.0
                    share /= len(scopes)
                    regularisation_B = regularisation_B + loss.coefficient * share * loss.value_B
                    label = loss.name if kind == "feed_forward" else f"{kind}_{loss.name}"
                    value_B = loss.value_B.detach()
                    value_B = value_B if share == 1 else share * value_B
                    auxiliary[label] = auxiliary[label] + value_B if label in auxiliary else value_B
        if steps.measures is not None:
            auxiliary |= steps.measures.values()
        if self.halting is not None and halted is not None:
            regularisation_B = regularisation_B + self.halting.config.loss * halted.loss_B
            auxiliary |= {"halting": halted.loss_B.detach(), "depth": halted.depth_B}
        return regularisation_B, auxiliary, carried


class _DepthSteps:
    """Applies the layers of one pass, and collects what they report."""

    def __init__(
        self,
        model: Transformer,
        depth: PassDepth,
        context: DepthContext,
        cache: list[LayerCache] | None,
        batch_size: int,
    ) -> None:
        self._model, self._context, self._cache = model, context, cache
        self._depth, self._batch_size = depth, batch_size
        self.schedule = model.config.schedule_of(depth.num_loops)
        self._past = 0 if cache is None else cache[0].length
        self._keeps_states = model.training and bool(model.depth_losses)
        self.done: list[DepthStep] = []
        self.reports: list[dict[str, RouterReport]] = []  # of `done`
        compares = model.measures_loops and model.training and model.config.order == "abab"
        self.measures = None
        if compares and model.halting is None and model.config.num_repeats > 1:
            documents = context.documents
            real_BS = None if documents is None else documents.real_BS
            self.measures = LoopMeasures(depth, batch_size, real_BS)
        # by depth step, of its last run; only losses on depth steps need them
        self.states: dict[int, Tensor] = {}

    def apply(self, step: DepthStep, x_BSD: Tensor, unhalted: Unhalted | None = None) -> Tensor:
        """Applies one layer to all sequences."""
        return self._apply(step, x_BSD, replace(self._context, unhalted=unhalted), None)

    def apply_to_live(self, step: DepthStep, x_BSD: Tensor, live: Tensor | None) -> Tensor:
        """Applies one layer to the sequences `live`, which x has; None: all."""
        context = self._context if live is None else self._context.of_sequences(live)
        return self._apply(step, x_BSD, context, live)

    def _apply(
        self, step: DepthStep, x_BSD: Tensor, context: DepthContext, live: Tensor | None
    ) -> Tensor:
        cache = None if self._cache is None else self._cache[step.index]
        if cache is not None:
            cache.forget_from(self._past)  # what an earlier loop has left in a shared entry
        scale = self._model.loops.residual_scale(step, self.schedule)
        marks = self.measures is not None
        context = replace(
            context,
            cache=cache,
            residual_scale=scale,
            draws=self._draws(step, live),
            marks_choices=marks,
        )
        x_BSD, report = self._model.group[step.member](x_BSD, context)
        if self.measures is not None:
            self.measures.see_routes(step, report.get("feed_forward"))
        self.done.append(step)
        self.reports.append(report if live is None else _of_batch(report, live, self._batch_size))
        if self._keeps_states:
            self.states[step.index] = x_BSD
        return x_BSD

    def _draws(self, step: DepthStep, live: Tensor | None) -> Draws | None:
        """Returns the layer's draws in the loops that its sequences make there."""
        draws, depth, loops = (
            self._context.draws,
            self._depth,
            -1 if step.loop is None else step.loop,
        )
        if draws is None:
            return None
        if step.loop is not None and depth.of_sequence is not None:
            of_pass = depth.live(step.loop)
            places = range(self._batch_size) if of_pass is None else of_pass
            loops = [depth.place(step.loop, sequence) for sequence in places]
        return draws.at(f"layer {step.member}", loops, live)


def _slot(step: DepthStep, shared_loops: int | None) -> tuple[int, int | None]:
    """Returns the layer of a depth step, and which of its cache's entries it uses."""
    if step.loop is None or shared_loops is None:
        return step.member, step.loop
    return step.member, step.loop % shared_loops


def _of_batch(
    report: dict[str, RouterReport], live: Tensor, batch_size: int
) -> dict[str, RouterReport]:
    """Returns a report of the live sequences as one of all, with zeros for the others."""

    def spread(value: Tensor) -> Tensor:
        zeros = value.new_zeros(batch_size, *value.shape[1:])
        return zeros.index_copy(0, live, value)

    return {
        kind: replace(each, sums={name: spread(value) for name, value in each.sums.items()})
        for kind, each in report.items()
    }


def _initializers(config: ModelConfig) -> Initializers:
    """Builds the initializers; post-norm layers start at full size, because their norm bounds the
    residual.
    """
    depth = 2 if config.norm == "post" else config.num_layers
    rule = config.initialisation
    scaled = isinstance(rule, ScaledInitialisationConfig)
    return Initializers(
        rule.kind,
        config.d_model,
        depth,
        rule.scale if scaled else None,
        rule.expert_axis_norm,
        scaled_head=scaled and rule.head == "scaled",
        scaled_embedding=config.scale_embedding,
    )
