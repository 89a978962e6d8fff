"""The interface of routers; each is one file in this folder and one line in `table.py`.

A router reads rows and returns routes or a mixture. It moves no data, knows no ranks, and decides
in float32 whatever the compute dtype. It also owns the statistics and losses of its decisions, and
any state that changes from step to step.

    forward        rows → routing
    statistics     routing → sums per sequence, added up over the repeats of a shared layer
    losses         sums → values and their coefficients, computed once per forward pass
    before_step    receives the step's number, for schedules
    after_step     receives sums over the whole step and all ranks, for learning without a gradient

Legend: B sequences, T rows (B·S, sequence-major), D their width, E experts, H heads (1 for the
feed-forward), A experts of a head, K experts chosen, N routes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import NonNegativeFloat, PositiveInt, model_validator
from torch import Tensor, nn

from ...kernels.fused.router import Gate, Routed, can_route, route_top_k
from ...plugins import PluginError
from ..balance import BALANCE, RunningSum, balance_value, choice_sums, document_sums
from ..config.sections import Keys
from ..execution.draws import num_sequences
from ..execution.recompute import save_choice
from ..initialise import Initializer
from ..routing import Routes, Routing, token_routes


@dataclass(frozen=True)
class Promises:
    """States what a router guarantees for any weights (tests/model/test_promises.py)."""

    # No output depends on what later positions hold, of any sequence; under a capacity only on their
    # number.
    causal: bool
    batch_invariant: bool  # no sequence's output depends on the other sequences of the batch
    dropless: bool  # every row gets the outputs of all requested experts
    balanced: bool  # every expert serves equally many rows, by construction


class RouterConfig(Keys):
    """Describes one kind of router in the model's configuration."""

    kind: str

    @property
    def promises(self) -> Promises:
        """Returns what this configuration guarantees."""
        raise PluginError(f"the router {self.kind!r} must define promises")

    @property
    def evaluation_promises(self) -> Promises:
        """Returns what this configuration guarantees in evaluation; by default the same."""
        return self.promises

    @property
    def group_sequences(self) -> int:
        """Returns how many consecutive samples are routed together; 1: each alone.

        Every micro-batch holds whole groups.
        """
        return 1

    @property
    def evaluation_group_sequences(self) -> int:
        """Returns how many sequences are routed together in evaluation."""
        return self.group_sequences

    @property
    def reads_whole_sequences(self) -> bool:
        """Returns whether the router needs whole sequences and so cannot decode."""
        return False

    def check_length(self, sequence_rows: int) -> None:
        """Checks the router against the length of a sequence; raises ValueError."""

    @property
    def experts_per_row(self) -> float:
        """Returns the mean number of experts per row before refusals, which gives its FLOPs."""
        raise PluginError(f"the router {self.kind!r} must define experts_per_row")

    def active_experts(self, num_experts: int, sequence_rows: int) -> float:
        """Returns `experts_per_row`, or its value for these experts and a sequence's rows."""
        return self.experts_per_row

    @property
    def may_serve_fewer(self) -> bool:
        """Returns whether some rows get fewer experts than `active_experts`, an upper bound
        then.
        """
        return not (self.promises.dropless or self.promises.balanced)

    def check(self, num_experts: int) -> None:
        """Checks the router against the number of experts; raises ValueError."""

    def router_flops(self, d_row: int, num_experts: int) -> int:
        """Returns the forward FLOPs for one row of width d_row, with mixing but without experts."""
        return 2 * d_row * num_experts


@dataclass(frozen=True)
class Loss:
    """Holds one auxiliary loss of one router."""

    name: str
    value_B: Tensor  # float32, per sequence, without its coefficient; (R, B) of equal routers
    coefficient: float
    mean_over_layers: bool  # else summed over them


class Router(nn.Module):
    """Plans where rows go; a subclass sets `Config`, builds its weights and implements `forward`.

    Args:
        config: an instance of the subclass's `Config`.
        d_row: width of a row.
        num_experts: E.
        init: initializer of a weight whose fan-in is a row.
    """

    Config: ClassVar[type[RouterConfig]]
    backend: str = "auto"  # of the experts (`kernels.backend`); Triton's has router kernels
    carried: tuple[str, ...] = ()  # names of the statistics for `after_step`
    # Whether `forward` takes `step`, the DepthStep that it is in.
    reads_step: ClassVar[bool] = False
    # Biases and temperatures that no precision of the run rounds; it never rounds buffers.
    keeps_float32: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, d_row: int, num_experts: int, *, init: Initializer) -> None:
        super().__init__()
        self.config, self.d_row, self.num_experts = config, d_row, num_experts

    @property
    def group_context_size(self) -> int:
        """Returns how many sequences must accompany one in evaluation, at this step."""
        return self.config.evaluation_group_sequences - 1

    def forward(self, x_TD: Tensor, *, batch_size: int, real_T: Tensor | None = None) -> Routing:
        """Plans where T rows of `batch_size` sequences go.

        `real_T` (bool) is False for padding; None: no padding. Padding's routes are removed
        afterwards in any case, so only routers whose rows compete for places read it.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement forward")

    def statistics(self, routing: Routing, batch_size: int) -> dict[str, Tensor]:
        """Sums over positions, each with a first axis of `batch_size`; nothing of size T
        survives.
        """
        return {}

    def losses(self, sums: dict[str, Tensor], running: RunningSum) -> list[Loss]:
        """Returns the auxiliary losses from statistics summed over the repeats of this router's
        weights.
        """
        return []

    def alike(self, repeats: Sequence[dict[str, Tensor]]) -> Hashable | None:
        """Returns a key of these statistics: routers of one key compute their losses at once.

        `losses` then gets sums with a leading axis of routers, (R, B, …), and returns (R, B). None:
        the router computes its own.
        """
        return None

    def before_step(self, step: int) -> None:
        """Receives the number of finished steps, before each step, evaluation and checkpoint."""

    def after_step(self, step: int, totals: dict[str, Tensor]) -> None:
        """Receives the `carried` statistics of one optimizer step, summed over everything.

        That is over sequences, micro-batches, repeats and ranks.
        """


class TopKConfig(RouterConfig):
    """Describes the keys of every router by which a row asks for K experts."""

    top_k: PositiveInt = 1
    """Experts per token."""

    @property
    def experts_per_row(self) -> float:
        """Returns how many experts serve one row."""
        return self.top_k

    def check(self, num_experts: int) -> None:
        """Checks that the router and the number of experts fit each other."""
        if self.top_k > num_experts:
            raise ValueError(f"router.top_k={self.top_k} is more than num_experts={num_experts}")


class ChoiceConfig(RouterConfig):
    """Describes the losses of every router that chooses experts for a row."""

    balance: NonNegativeFloat = 0.01
    """Weight of the balancing loss."""

    balance_form: Annotated[str, BALANCE] = "load"
    """With "load", E·Σ_e f_e·P_e with f_e the fraction of all choices and P_e the mean probability, 1
    at perfect balance, mean over layers (Switch, arXiv 2101.03961, eq. 4; for K > 1 the sum
    over all choices divided by K). "entropy": minus the entropy of the mean probability, at
    least −ln E, summed over layers (σ-MoE, arXiv 2310.10837, §5; MoEUT, arXiv 2405.16039, eq.
    8). Your own function returns the costs c_e of Σ_e c_e·P_e."""

    balance_scope: Literal["sequence", "micro_batch", "global_batch"] = "micro_batch"
    """Rows over which f and, for the entropy, P are averaged. "global_batch": all ranks and the
    step's micro-batches so far, so gradient accumulation makes it vary slightly with the number of
    ranks. "sequence" is the document under train.balance_documents.
    """

    balance_choices: Literal["all", "first"] = "all"
    """What f counts: all K choices of a row, or only its first (GShard, Switch, torchscale)."""

    balance_pool: bool = False
    """Balances all layers in one pool, E·Σ_e f_e·P_e with f_e the choices of e per row and P_e the mean
    probability, both over the rows of all layers, K at perfect balance (as transformers does); else
    each layer by itself."""

    z_loss: NonNegativeFloat = 0.0
    """Weight of the mean over rows of logsumexp(logits)², mean over layers (ST-MoE, arXiv
    2202.08906, eq. 5)."""

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.balance_pool and (self.balance_form, self.balance_choices) != ("load", "all"):
            raise ValueError(
                f"balance_pool=true with balance_form={self.balance_form!r}, "
                f'balance_choices={self.balance_choices!r}: a pool needs balance_form="load" and '
                'balance_choices="all"'
            )
        return self


@dataclass(frozen=True)
class Choice:
    """Holds the experts chosen for every row, before refusals."""

    experts_TK: Tensor  # int64
    weights_TK: Tensor  # float32, differentiable
    logits_TE: Tensor  # float32, before the gate's nonlinearity
    # averaged by the balancing loss; None: softmax of the logits
    probabilities_TE: Tensor | None = None
    # softmax(logits_TE) summed over sequences, if a kernel has; `replace` drops it
    sums_BHA: Tensor | None = field(default=None, init=False)

    @staticmethod
    def of(found: Routed) -> "Choice":
        """Returns the choice of a router with one head."""
        rows = found.experts_THK, found.gates_THK, found.logits_THA
        choice = Choice(*(each.squeeze(1) for each in rows))
        object.__setattr__(choice, "sums_BHA", found.sums_BHA)
        return choice


class ChoiceRouter(Router):
    """Lets every row choose its experts; a subclass implements `choose`."""

    config: ChoiceConfig

    def choose(self, x_TD: Tensor) -> Choice:
        """Chooses K experts for every row."""
        raise NotImplementedError(f"{type(self).__name__} must implement choose")

    def route_in_one(
        self, x_TD: Tensor, weight_ED: Tensor, *, gate: Gate, heads: int = 1, routers: int = 1
    ) -> Routed | None:
        """Returns the choice of one kernel, also for several routers whose weights follow each other.

        None if the backend has no kernel for these rows; the router then takes its own steps.
        """
        if not can_route(self.backend, x_TD, weight_ED, heads=heads * routers):
            return None
        top_k = self.config.experts_per_row
        assert isinstance(top_k, int)
        return save_choice(
            lambda given_THK: route_top_k(
                x_TD,
                weight_ED,
                top_k=top_k,
                gate=gate,
                heads=heads,
                routers=routers,
                num_sequences=num_sequences() if self.training else 0,
                given_THK=given_THK,
            )
        )

    def admit(
        self, choice: Choice, routes: Routes, batch_size: int, real_T: Tensor | None
    ) -> Routes:
        """Returns the routes that are served: all of them unless a subclass has a capacity.

        `real_T` is False for padding, which takes no place.
        """
        return routes

    def forward(self, x_TD: Tensor, *, batch_size: int, real_T: Tensor | None = None) -> Routing:
        """Sends every row through its chosen experts and back into itself."""
        choice = self.choose(x_TD)
        wanted = token_routes(choice.experts_TK, choice.weights_TK, num_experts=self.num_experts)
        probabilities = (
            None if choice.probabilities_TE is None else choice.probabilities_TE[:, None]
        )
        routing = Routing(
            self.admit(choice, wanted, batch_size, real_T),
            choice.logits_TE[:, None],
            probabilities,
            choice.experts_TK,
        )
        return routing.with_sums(choice.sums_BHA)

    def statistics(self, routing: Routing, batch_size: int) -> dict[str, Tensor]:
        """Sums probabilities, choices and squared log-partition functions per sequence."""
        config = self.config
        first = config.balance_choices == "first"
        sums = choice_sums(
            routing,
            batch_size,
            with_z=config.z_loss > 0,
            with_load=config.balance_form != "entropy" or "load" in self.carried,
            first_choices=first,
        )
        if config.balance and config.balance_scope == "sequence":
            sums |= document_sums(routing, first_choices=first)
        return sums

    @property
    def pool(self) -> float:
        """Returns the coefficient of the balancing loss over all layers; 0: it is no part of it."""
        return self.config.balance if self.config.balance_pool else 0.0

    def counted(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the statistics with the load that the balancing loss counts."""
        return sums

    def alike(self, repeats: Sequence[dict[str, Tensor]]) -> Hashable | None:
        """Returns what the built-in losses read; None if another formula or sum takes part."""
        config, own = self.config, type(self)
        built_in = own.losses is ChoiceRouter.losses and own.counted is ChoiceRouter.counted
        built_in = built_in and config.balance_form in ("load", "entropy")
        apart = self.carried or self.pool or config.balance_scope == "global_batch"
        if not built_in or apart or not repeats or "document_rows" in repeats[0]:
            return None
        shapes = tuple((name, value.shape) for name, value in repeats[0].items())
        losses = config.balance, config.balance_form, config.balance_scope, config.z_loss
        return losses, len(repeats), shapes

    def losses(self, sums: dict[str, Tensor], running: RunningSum) -> list[Loss]:
        """Returns the balancing loss and the z-loss, if configured."""
        config, found = self.config, []
        if config.balance and not config.balance_pool:
            value_B = balance_value(
                self.counted(sums), config.balance_form, config.balance_scope, running
            )
            names = {"load": "load_balancing", "entropy": "negative_entropy"}
            name = names.get(config.balance_form) or config.balance_form.partition(":")[2]
            is_mean = config.balance_form != "entropy"
            found.append(Loss(name, value_B, config.balance, mean_over_layers=is_mean))
        if config.z_loss:
            value_B = sums["z"] / sums["rows"].clamp_min(1)
            found.append(Loss("router_z", value_B, config.z_loss, mean_over_layers=True))
        return found
