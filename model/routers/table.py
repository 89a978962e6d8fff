"""The table of routers. A new one is one file and one line here (docs/extending.md shows it)."""

from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny, ValidationError

from ..initialise import Start
from .cosine import CosineRouter
from .deepseek import DeepSeekRouter
from .expert_choice import ExpertChoiceRouter
from .mixture import TokenMixingRouter
from .router import Router, RouterConfig
from .sigmoid import SigmoidRouter
from .soft import SlotMixingRouter
from .sut import SutRouter
from .token_choice import TokenChoiceRouter
from .transition import TransitionRouter

ROUTERS: dict[str, type[Router]] = {
    "sigmoid": SigmoidRouter,
    "token_choice": TokenChoiceRouter,
    "deepseek": DeepSeekRouter,
    "cosine": CosineRouter,
    "expert_choice": ExpertChoiceRouter,
    "mixture_of_tokens": TokenMixingRouter,
    "soft_moe": SlotMixingRouter,
    "transition": TransitionRouter,
    "sut": SutRouter,
}


def make_router(config: RouterConfig, d_row: int, num_experts: int, *, start: Start) -> Router:
    """The router that `config.kind` names."""
    return ROUTERS[config.kind](config, d_row, num_experts, start=start)


def read_router_config(value: Any) -> RouterConfig:
    """A router's configuration from plain values, by their `kind`.

    Raises:
        ValueError: the kind or a key is unknown, or a value is not valid.
    """
    if isinstance(value, RouterConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError(
            f"router={value!r}: the router is a section; write its kind, for example "
            f"model.router.kind={value}"
        )
    if "kind" not in value:
        raise ValueError(
            f"the router has no kind (keys: {', '.join(value)}); there are {', '.join(ROUTERS)}"
        )
    if not isinstance(value["kind"], str) or value["kind"] not in ROUTERS:
        raise ValueError(f"kind={value['kind']!r} is no router; there are {', '.join(ROUTERS)}")
    config = ROUTERS[value["kind"]].Config
    try:
        return config.model_validate(value)
    except ValidationError as error:
        known = ", ".join(name for name in config.model_fields if name != "kind")
        raise ValueError(
            "; ".join(_explain(entry, value["kind"], known) for entry in error.errors())
        ) from None


def _explain(entry: Any, kind: str, known: str) -> str:
    where = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        return f"the router {kind!r} has no key {where!r}; it has {known}"
    message = str(entry["msg"]).removeprefix("Value error, ")
    return f"{where}={entry['input']!r}: {message}" if where else message


AnyRouterConfig = Annotated[SerializeAsAny[RouterConfig], BeforeValidator(read_router_config)]
