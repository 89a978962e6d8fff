"""The whole model: embed, repeat the group of layers, read out.

    x = Emb[tokens]
    for step in config.schedule:  # repeats of the group: A B A B …, or A A B B …
        x = group[step.member](x)
    logits = W_out · LN(x) + b    # untied from the embedding

MoEUT (arXiv 2405.16039) has nothing that depends on the depth step: no layer embedding, no halting, no
residual scaling. SUT halts, and model/loops/halting.py runs its depth steps. With G = L nothing is
shared and this is an ordinary Transformer; with G = 1 and a dense feed-forward a plain Universal
Transformer. How one pass applies the layers is in model/loops/steps.py. The residual stream has the
embedding's dtype: float32, except under train.precision="bfloat16_only"
(model/execution/precision.py).

Cost of MoEUT per token and depth step, in multiply-accumulates: attention (2 k_A + 2)·D·H·C plus
the scores, feed-forward 2·K·F·D, routers (E + 2·H·N_A)·D, with H heads of C channels, k_A of N_A
experts per head, and K of E experts of width F.

Legend: B sequences, S positions, D model width, V vocabulary, L depth steps, G layers in a group, R
= L/G repeats.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention.base import LayerCache, past_length
from .balance import DepthLoad, RunningSum, collect_loads
from .block import Layer
from .config.model_config import DepthStep, ModelConfig
from .documents import Documents
from .execution.roles import deciding
from .head_loss import ReadOut
from .initialise import Initializers, parameter
from .layers import LayerNorm, make_norm, wide_dtype
from .loops.halting import Halting
from .loops.program import Loops
from .loops.steps import DepthSteps, PassOptions
from .losses import Losses, Targets
from .routers.router import Router

_AS_CONFIGURED = PassOptions()


@dataclass(frozen=True)
class ModelOutput:
    """Holds the result of one forward pass: logits or a loss, and the routers' losses and loads."""

    # (B, S, V) float32: the next token's logits. With targets a scalar: their cross-entropy in nats,
    # summed over all counted positions without materialising the logits (model/head_loss.py).
    logits_or_loss: Tensor
    # float32, per sequence: all auxiliary losses with their coefficients; zero in evaluation mode
    regularisation_B: Tensor
    # detached, (B,) by name: auxiliary losses without coefficients, and measures (depth, loops, …)
    auxiliary: dict[str, Tensor]
    # by router kind: feed_forward, value and output (SwitchHead), attention (MoMHA)
    loads: dict[str, DepthLoad]
    # detached: this pass's part of the totals that `Router.after_step` gets
    carried: dict[str, Tensor]

    @staticmethod
    def of(logits_or_loss: Tensor, losses: Losses, steps: DepthSteps) -> "ModelOutput":
        """Returns what a pass has computed and collected."""
        return ModelOutput(
            logits_or_loss=logits_or_loss.to(wide_dtype(logits_or_loss)),
            regularisation_B=losses.regularisation_B,
            auxiliary=losses.auxiliary,
            loads=collect_loads(steps.reports, members=steps.members),
            carried=losses.carried,
        )

    @property
    def logits_BSV(self) -> Tensor:
        """Returns the next token's logits at every position, of a pass without targets."""
        assert self.logits_or_loss.ndim == 3, "a pass with targets has a loss and no logits"
        return self.logits_or_loss

    @property
    def cross_entropy(self) -> Tensor:
        """Returns the summed cross-entropy of a pass with targets, a scalar in nats."""
        assert self.logits_or_loss.ndim == 0, "only a pass with targets has a loss"
        return self.logits_or_loss

    @property
    def read_out(self) -> Tensor:
        """Returns `logits_or_loss`, by its former name."""
        return self.logits_or_loss


class Transformer(nn.Module):
    """Builds MoEUT or a relative from its configuration.

    Parameters have no values until `initialise` (model/initialise.py) or a checkpoint fills them.
    """

    roles: ClassVar = {"embedding": "table", "position_embedding": "table"}

    def __init__(self, config: ModelConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.running = RunningSum()
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
        self.halting = None if config.halting is None else Halting(config.halting, config.d_model)
        self.final_norm = None
        if config.final_norm and config.norm != "post":
            self.final_norm = make_norm(config.norm_layer, config.norm_eps, config.d_model)
        self.head = ReadOut(
            config.d_model,
            config.vocab_size,
            init=initializers.head(),
            bias=config.head_bias,
            bias_init=initializers.head_bias(),
            tied=config.tied_head,
            scaling=config.logits_scaling,
        )

    def forward(
        self,
        tokens_BS: Tensor,
        cache: list[LayerCache] | None = None,
        *,
        targets_BS: Tensor | None = None,
        loss_mask_BS: Tensor | None = None,
        documents: Documents | None = None,
        options: PassOptions = _AS_CONFIGURED,
    ) -> ModelOutput:
        """Computes the next token's logits at every position; with targets their cross-entropy.

        Args:
            tokens_BS: int64, 0 … V−1. With a cache, only the new positions.
            cache: one entry per depth step (`new_cache`), extended in place.
            targets_BS: int64, 0 … V−1: the token after every position.
            loss_mask_BS: bool: which targets count; None: all. Best on the CPU, which needs no synchronisation.
            documents: of the tokens (`mark_documents`); None: every row is one document.
            options: loops, exits and draws of this pass, and what it measures and keeps.

        Raises:
            ValueError: documents together with a cache, a cache of another number of loops, or
                more positions than the model has learned.
        """
        x_BSD = self._embed(tokens_BS, past_length(cache), documents)
        steps = DepthSteps(
            self.config, self.group, options, x_BSD, cache, documents, training=self.training
        )
        with steps.open():
            rows, gates = self._run_layers(steps, x_BSD)
        losses = Losses(self.config, steps, tokens_BS.device)
        losses.add_steps(self.routers(), self.running)
        targets = Targets(tokens_BS, targets_BS, loss_mask_BS)
        if self.training and targets_BS is not None:
            found = losses.cross_entropy(rows, gates, targets, self.read_out)
            losses.add_own(options.depth_losses, targets, self._read_state)
        else:
            found = self.read_out(rows[-1], targets)
        return ModelOutput.of(found, losses, steps)

    def new_cache(
        self, shared_loops: int | None = None, *, num_loops: int | None = None
    ) -> list[LayerCache]:
        """Returns an empty cache with one entry per depth step: a shared layer has new keys at
        every repeat.

        With `shared_loops` m, loops r and r mod m share an entry, and the later loop overwrites
        it: 1 keeps those of the last loop (Huginn, arXiv 2502.05171, §6). `num_loops`
        is that of the passes; None: the model's own.

        Raises:
            ValueError: `shared_loops` is below 1.
        """
        if shared_loops is not None and shared_loops < 1:
            raise ValueError(f"shared_loops={shared_loops} must be at least 1")
        schedule = self.config.schedule_of(num_loops or self.config.num_repeats)
        entries: dict[tuple[int, int | None], LayerCache] = {}
        return [
            entries.setdefault(_cache_key(step, shared_loops), LayerCache()) for step in schedule
        ]

    def routers(self) -> Iterator[tuple[int, str, Router]]:
        """Yields (group member, kind, router) for every router."""
        for member, layer in enumerate(self.group):
            for kind, router in cast(Layer, layer).routers().items():
                yield member, kind, router

    def before_step(self, step: int) -> None:
        """Tells every router how many optimizer steps are done, and clears the running sums."""
        self.running.reset()
        for _, _, router in self.routers():
            router.before_step(step)

    def after_step(self, step: int, totals: dict[str, Tensor]) -> None:
        """Gives every router its own sums out of `carried`, summed over micro-batches and ranks.

        `step`: optimizer steps done before this one, as `before_step` got it.
        """
        for member, kind, router in self.routers():
            own = {name: totals[f"{member}/{kind}/{name}"] for name in router.carried}
            if own:
                router.after_step(step, own)

    def read_out(
        self, x_BSD: Tensor, given: Targets | None = None, share_BS: Tensor | None = None
    ) -> Tensor:
        """Returns the logits of rows that were normalised, (…, V); with targets their loss.

        See `ReadOut.forward`.
        """
        tied = None
        if self.config.tied_head:
            tied = self.embedding.to(cast(Layer, self.group[0]).attention.dtype)  # of products
        if given is None or given.targets_BS is None:
            return self.head(x_BSD, tied_VD=tied)
        return self.head(x_BSD, given.targets_BS, given.counted_C, tied, share_BS)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Casts or moves the model, for `to` and the like; parameters that decide stay in float32."""
        before = [getattr(module, name).detach() for _, module, name in deciding(self)]
        super()._apply(fn, recurse)
        for old, (_, module, name) in zip(before, deciding(self), strict=True):
            now = getattr(module, name)
            if now.is_floating_point() and now.dtype.itemsize < torch.float32.itemsize:
                now.data = old.to(now.device, torch.float32)
        return self

    def _embed(self, tokens_BS: Tensor, past: int, documents: Documents | None) -> Tensor:
        x_BSD = F.embedding(tokens_BS, self.embedding)
        if self.position_embedding is not None:
            last = past + tokens_BS.shape[1]
            if last > len(self.position_embedding):
                raise ValueError(
                    f"{last} positions exceed max_positions={len(self.position_embedding)} "
                    "learned by this model: shorten the text"
                )
            if documents is None or documents.positions_BS is None:
                x_BSD = x_BSD + self.position_embedding[past:last]
            else:
                x_BSD = x_BSD + F.embedding(documents.positions_BS, self.position_embedding)
        if (factor := self.config.embedding_factor) != 1:
            x_BSD = x_BSD * factor
        if self.embedding_norm is not None:
            n_BSD = self.embedding_norm(x_BSD * self.config.d_model**0.5)
            x_BSD = n_BSD.to(x_BSD.dtype)  # the norm has no weight to set its dtype
        return x_BSD

    def _run_layers(self, steps: DepthSteps, x_BSD: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the rows that the read-out reads, of one or more loops, and each one's exit gate."""
        if self.halting is None:
            return self.loops(steps, x_BSD, final_norm=self._normed, predict=self.read_out)
        halted = self.halting(steps.apply_unhalted, x_BSD, steps.schedule, real_BS=steps.real_BS)
        steps.halted = halted
        return [self._normed(halted.answer_BSD)], []

    def _normed(self, x_BSD: Tensor) -> Tensor:
        return x_BSD if self.final_norm is None else self.final_norm(x_BSD)

    def _read_state(self, state_BSD: Tensor, given: Targets | None) -> Tensor:
        """Returns what is read out of any state: logits, or with targets their loss."""
        return self.read_out(self._normed(state_BSD), given)


def _cache_key(step: DepthStep, shared_loops: int | None) -> tuple[int, int | None]:
    """Returns the layer of a depth step, and which of its cache's entries it uses."""
    if step.loop is None or shared_loops is None:
        return step.member, step.loop
    return step.member, step.loop % shared_loops


def _initializers(config: ModelConfig) -> Initializers:
    """Builds the initializers; post-norm layers start at full size: their norm bounds the residual."""
    depth = 2 if config.norm == "post" else config.num_layers
    rule = config.initialisation
    return Initializers(
        rule.kind,
        config.d_model,
        depth,
        scale=getattr(rule, "scale", None),
        expert_axis_norm=rule.expert_axis_norm,
        std=getattr(rule, "std", None),
        scaled_head=getattr(rule, "head", "") == "scaled",
        embedding_factor=config.embedding_factor,
    )
