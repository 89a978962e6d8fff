"""`moebius layout`: which rank sits where, and which links its groups use."""

import argparse

from ..train.recipes.names import RECIPE_NAMES
from .arguments import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Declares `moebius layout`."""
    text = "print which rank sits where, and which links its groups use"
    parser = add_command(
        commands,
        "layout",
        _layout,
        text,
        examples=["layout --world-size 64 --ep 8 --model moeut_244m"],
    )
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks in all")
    parser.add_argument(
        "--ep", type=int, default=1, metavar="N", help="ranks that share one copy of the experts"
    )
    parser.add_argument(
        "--dp-shard",
        type=int,
        metavar="N",
        help="ranks that share the dense weights; default: as --ep",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="default: 8, or all on one node if 8 do not fit",
    )
    parser.add_argument(
        "--model",
        metavar="RECIPE",
        choices=RECIPE_NAMES,
        help="show the experts of this recipe's model",
    )


def _layout(options: argparse.Namespace) -> int:
    """Carries out `moebius layout`."""
    from ..distributed.layout import MeshConfig, plan_layout, render_layout
    from ..train.recipes.smoke import RECIPES

    for option, value in (("--ep", options.ep), ("--dp-shard", options.dp_shard)):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value}: at least 1")
    layout = plan_layout(MeshConfig(ep=options.ep, dp_shard=options.dp_shard), options.world_size)
    experts = RECIPES[options.model]().model.expert_counts() if options.model else None
    per_node = 8 if options.world_size % 8 == 0 else options.world_size
    print(render_layout(layout, options.ranks_per_node or per_node, experts))
    return 0
