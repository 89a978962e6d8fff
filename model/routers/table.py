"""The table of routers.

A new router of the package is one file and one line here; a user's own is named as `module:Class`
(docs/extend.md shows both).
"""

from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from ...plugins import is_subclass
from ..config.sections import Section
from ..initialise import Initializer
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


def make_router(config: RouterConfig, d_row: int, num_experts: int, *, init: Initializer) -> Router:
    """Builds the router that `config.kind` selects."""
    return ROUTER.entry(config.kind)(config, d_row, num_experts, init=init)


ROUTER = Section(
    "feed_forward.router",
    "router",
    ROUTERS,
    config_of=lambda router: router.Config,
    own="a subclass of Router that sets Config",
    fits=lambda found: (
        is_subclass(found, Router) and is_subclass(getattr(found, "Config", None), RouterConfig)
    ),
)
AnyRouterConfig = Annotated[SerializeAsAny[RouterConfig], BeforeValidator(ROUTER.read)]
