"""The optimizer: AdamW, Muon (distributed/muon.py), or a user's own. The learning rate: config/schedule.py.

Every command that reads a configuration imports this module. A DTensor is known here by its
attributes, because importing its class takes 0.3 s, a third of what torch takes.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn import Parameter

from ..data_pipeline.words import some_of
from ..model.execution.roles import Role, roles_of
from ..plugins import PluginError, Registry, a_kind, is_own
from .config.schedule import ScheduleConfig

if TYPE_CHECKING:
    from ..distributed.mesh import Mesh

OPTIMIZER = Registry(
    "optim.kind",
    "an optimizer",
    dict.fromkeys(["adamw", "muon"]),
    "a function of (named parameters, OptimConfig) that returns a torch.optim.Optimizer",
    settings=True,
    takes=2,
)


class MuonConfig(BaseModel):
    """Configures Muon, which updates matrices under optim.kind=muon; AdamW updates the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    scale: Literal["match_rms_adamw", "spectral"] = "match_rms_adamw"
    """What an orthogonal update is multiplied by, beside the rate: with "match_rms_adamw"
    0.2·√max(out, in), so that AdamW's rates and decay fit (arXiv 2502.16982); with "spectral" √max(1,
    out / in), whose rates are about 0.02 (Jordan)."""

    learning_rate: float | None = Field(default=None, gt=0)
    """Peak rate of matrices; none: `optim.learning_rate`, which all other parameters have."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the momentum, which is Nesterov's."""

    steps: PositiveInt = 5
    """Newton–Schulz iterations that make a matrix orthogonal."""

    routers: bool = False
    """Updates routers by Muon, too."""

    cautious: bool = False
    """Decays only weights whose update has their sign (arXiv 2510.12402)."""


class OptimConfig(ScheduleConfig):
    """Configures the optimizer and the schedule; every default is from the MoEUT paper."""

    kind: Annotated[str, OPTIMIZER] = "adamw"
    """The optimizer: AdamW for all parameters, or Muon for matrices."""

    muon: MuonConfig = MuonConfig()

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""

    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of AdamW's second moment."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decay per step, times the rate; never of Parcae's injection."""

    weight_decay_on: Literal["all", "matrices"] = "all"
    """What decays: all parameters, norms and biases included, or only the matrices of attention,
    feed-forwards, experts, routers and the head."""

    embedding_rate: float = Field(default=1.0, ge=0)
    """Factor of the embedding's rate."""

    head_rate: float = Field(default=1.0, ge=0)
    """Factor of the head's rate; a tied head has the embedding's."""

    router_rate: float = Field(default=1.0, ge=0)
    """Factor of the routers' rate."""

    clip_norm: float = Field(default=0.25, gt=0)
    """Largest global norm of the gradient, over all parameters of all ranks."""

    @model_validator(mode="after")
    def _check_muon(self) -> Self:
        if self.kind != "muon" and self.muon != MuonConfig():
            changed = self.muon.model_dump(exclude_defaults=True)
            raise ValueError(
                f"optim.muon={changed} with optim.kind={self.kind!r}, which does not read it: set "
                'optim.kind="muon", or leave optim.muon out'
            )
        return self


def rate_notes(config: OptimConfig) -> list[str]:
    """Says in at most one line that the rate of Muon's matrices belongs to the other scale."""
    rate = config.muon.learning_rate or config.learning_rate
    is_matched = config.muon.scale == "match_rms_adamw"
    fits = rate < 0.01 if is_matched else rate > 1e-3
    if config.kind != "muon" or fits:
        return []
    key = "optim.learning_rate" if config.muon.learning_rate is None else "optim.muon.learning_rate"
    other = (
        "rates are those of AdamW, 2e-4 to 5e-3; for rates about 0.02 set optim.muon.scale=spectral"
        if is_matched
        else "rates are about 0.02; for AdamW's rates set optim.muon.scale=match_rms_adamw"
    )
    return [f"{key}={rate:g} with optim.muon.scale={config.muon.scale}, whose {other}"]


def muon_rate(config: OptimConfig, rate: float) -> dict[str, float]:
    """Returns the rate of Muon's matrices in a step, by its name in the log, if it is their own."""
    own = config.muon.learning_rate
    return {} if own is None else {"muon_learning_rate": rate * own / config.learning_rate}


def optimizer_of(
    config: OptimConfig, model: nn.Module, mesh: "Mesh | None" = None
) -> torch.optim.Optimizer:
    """Builds the configured optimizer over all parameters of a model.

    Args:
        config: of the optimizer.
        model: the model, or this rank's part of it.
        mesh: the ranks that share Muon's work; None: this process has the whole model.

    Raises:
        PluginError: a user's own function returns no optimizer, or omits parameters; or a user's own
            module does not say what its parameters are.
    """
    named, build = list(model.named_parameters()), OPTIMIZER.get(config.kind)
    if is_own(config.kind):
        optimizer = build(named, config)
    elif config.kind == "muon":
        optimizer = _make_muon(config, named, known_roles(config, model), mesh)
    else:
        optimizer = make_optimizer(config, named, roles=known_roles(config, model))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PluginError(
            f"optim.kind: {config.kind} returned {a_kind(optimizer)}: it must return a "
            "torch.optim.Optimizer"
        )
    taken = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if left_out := [name for name, parameter in named if parameter not in taken]:
        raise PluginError(
            f"optim.kind: {config.kind} leaves out {len(left_out)} of {len(named)} parameters, "
            f"for example {left_out[0]}: give every parameter a group, with lr=0 to freeze it"
        )
    if is_own(config.kind):
        _refuse_unread(config, model, optimizer)
    for group in optimizer.param_groups:
        group["initial"] = _numbers(group)
        group["constant"] = deepcopy(_others(group))
    return optimizer


def _refuse_unread(config: OptimConfig, model: nn.Module, own: torch.optim.Optimizer) -> None:
    """Refuses keys for some parameters that a user's own optimizer has made no groups for."""
    group_of = {one: group for group in own.param_groups for one in group["params"]}
    rates: dict[str, set[Any]] = {"": set()}
    decays, roles = False, roles_of(model)
    for name, parameter in model.named_parameters():
        role, group = roles[name], group_of[parameter]
        part = role.part if _rate_factor(config, role) != 1 else ""
        rates.setdefault(part, set()).add(group.get("lr"))
        decays |= bool(group.get("weight_decay")) and role.kind != "unknown" and not role.is_matrix
    others = rates.pop("")
    unread = [f"optim.{part}_rate" for part, found in rates.items() if found & others]
    if decays and config.weight_decay_on == "matrices":
        unread.append("optim.weight_decay_on")
    if unread:
        raise PluginError(
            f"optim.kind: {config.kind} does not read {', '.join(unread)}: give these parameters groups "
            "of their own in your function, or leave the key at its default"
        )


def set_rates(optimizer: torch.optim.Optimizer, rate: float, *, peak: float) -> None:
    """Scales the rate that every group was built with by rate / peak."""
    for group in optimizer.param_groups:
        initial = group.setdefault("initial", _numbers(group))  # of a group added since
        if "lr" in initial:
            group["lr"] = rate * (initial["lr"] / peak)


def changed_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Returns the numbers of every group, except its rate, that differ from those at the start.

    Raises:
        PluginError: something else differs, which a checkpoint cannot hold.
    """
    check_constants(optimizer)
    return [
        {
            name: value
            for name, value in _numbers(group).items()
            if name != "lr" and value != group["initial"].get(name)
        }
        for group in optimizer.param_groups
    ]


def check_constants(optimizer: torch.optim.Optimizer) -> None:
    """Checks that what is no number in an optimizer's groups is as it was built.

    Raises:
        PluginError: it differs.
    """
    for group in optimizer.param_groups:
        now, before = _others(group), group.get("constant")
        if before is not None and now != before:
            changed = next(name for name in now | before if now.get(name) != before.get(name))
            raise PluginError(
                f"optim.kind: {type(optimizer).__name__} changes {changed!r} of a group, a "
                f"{type(now.get(changed)).__name__}, and checkpoints hold only numbers there"
            )


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in group.items() if isinstance(value, int | float)}


def _others(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain values of a group that are no numbers."""
    ours = ("params", "initial", "constant")
    plain = str | list | tuple | dict | set
    return {key: one for key, one in group.items() if key not in ours and isinstance(one, plain)}


def known_roles(config: OptimConfig, model: nn.Module) -> dict[str, Role]:
    """Returns the role of every parameter of a model.

    Raises:
        PluginError: the configuration depends on roles, and a parameter has none.
    """
    roles = roles_of(model)
    unknown = [name for name, role in roles.items() if role.kind == "unknown"]
    needed = {"optim.kind=muon": config.kind == "muon"}
    needed["optim.weight_decay_on=matrices"] = config.weight_decay_on == "matrices"
    for what, is_needed in needed.items():
        if unknown and is_needed:
            path, _, name = unknown[0].rpartition(".")
            kind, shape = (
                type(model.get_submodule(path)).__name__,
                model.get_parameter(unknown[0]).shape,
            )
            raise PluginError(
                f"{what} does not know what {some_of(unknown)} is, of shape {tuple(shape)}: set roles = "
                f'{{"{name}": "vector"}} in the class {kind} or on the module (matrix (out, in), bank (E, in, '
                "out), table (rows, width), or vector), or use optim.kind=adamw with "
                "optim.weight_decay_on=all"
            )
    return roles


def _make_muon(
    config: OptimConfig,
    named: Iterable[tuple[str, Parameter]],
    roles: dict[str, Role],
    mesh: "Mesh | None",
) -> torch.optim.Optimizer:
    """Builds Muon for matrices, and AdamW for all others."""
    from ..distributed.muon import Muon  # imports DTensor

    own, others = dict[Any, list[Parameter]](), list[tuple[str, Parameter]]()
    for name, parameter in named:
        role = roles[name]
        if role.is_muons(routers=config.muon.routers) and parameter.requires_grad:
            decay = role.decays * config.weight_decay
            own.setdefault((decay, _rate_factor(config, role)), []).append(parameter)
        else:
            others.append((name, parameter))
    if not own:
        raise PluginError("optim.kind=muon: no trained parameter is a matrix: use optim.kind=adamw")
    peak = config.muon.learning_rate or config.learning_rate
    settings = config.muon.model_dump(include={"momentum", "steps", "scale", "cautious"})
    return Muon(
        [
            {"params": group, "lr": peak * factor, "weight_decay": decay, **settings}
            for (decay, factor), group in own.items()
        ],
        {parameter: roles[name] for name, parameter in named},
        make_optimizer(config, others, roles=roles),
        mesh,
    )


def _rate_factor(config: OptimConfig, role: Role) -> float:
    factors = {"embedding": config.embedding_rate, "head": config.head_rate}
    return (factors | {"router": config.router_rate}).get(role.part, 1.0)


class AdamW(torch.optim.AdamW):
    """AdamW in torch's fused kernel, which here gives an element the same bits at any place in a tensor.

    On CPUs the kernel takes whole blocks of 64 bytes at once, and rounds what is left at a tensor's end
    otherwise. Experts move between slots, and a layout cuts tensors anywhere, so the ends of all tensors
    are copied into one more tensor of whole blocks: at most 15 numbers of each, there and back.
    """

    def step(self, closure: Any = None) -> Any:
        """Makes a step; see torch.optim.AdamW."""
        self._ends: list[tuple[list[Tensor], Tensor]] = []
        loss = super().step(closure)
        with torch.no_grad():
            for parts, joined in self._ends:
                for part, new in zip(parts, joined.split([*map(len, parts)]), strict=True):
                    part.copy_(new)
        return loss

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Collects what the kernel takes: parameters, gradients, moments, maxima and step counts."""
        found = super()._init_group(group, *lists)
        columns, steps = lists[:4], lists[5]
        ends: dict[Any, list[int]] = {}
        for row, (step, parameter) in enumerate(zip(steps, columns[0], strict=True)):
            if parameter.device.type == "cpu":
                ends.setdefault((parameter.dtype, float(step)), []).append(row)
        for (dtype, _), rows in ends.items():
            self._join_ends(columns, rows, 64 // dtype.itemsize)
            steps.append(steps[rows[0]].clone())
        return found

    def _join_ends(self, columns: Sequence[list[Tensor]], rows: Sequence[int], block: int) -> None:
        """Shortens tensors to whole blocks, and appends one of what is left of them all."""
        for place, column in enumerate(columns):
            parts = []
            for row in rows:
                local = _local(column[row])
                flat = local.reshape(-1) if place == 1 else local.view(-1)  # never a copy
                column[row], part = flat.tensor_split([len(flat) // block * block])
                parts.append(part)
            size = sum(map(len, parts))
            column.append(torch.cat([*parts, parts[0].new_zeros(-size % block)]))
            if place != 1:  # the kernel only reads gradients
                self._ends.append((parts, column[-1][:size]))


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "to_local", lambda: tensor)()


def make_optimizer(
    config: OptimConfig,
    named: Iterable[tuple[str, Parameter]],
    *,
    roles: Mapping[str, Role] | None = None,
) -> AdamW:
    """Builds AdamW, whose moments have the parameters' dtype.

    Sharded parameters of one mesh form a group, and unsharded ones another, because one operation
    cannot mix them.

    Args:
        config: of the optimizer.
        named: the parameters to update, with their names.
        roles: what they are; None: matrices, which all decay.
    """
    groups: dict[Any, list[Parameter]] = {}
    for name, parameter in named:
        mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
        role = Role("body", "matrix") if roles is None else roles[name]
        decays = role.decays and (role.is_matrix or config.weight_decay_on == "all")
        key = (mesh, decays * config.weight_decay, _rate_factor(config, role))
        groups.setdefault(key, []).append(parameter)
    return AdamW(
        [
            {"params": group, "weight_decay": decay, "lr": config.learning_rate * factor}
            for (_, decay, factor), group in groups.items()
        ],
        fused=True,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )
