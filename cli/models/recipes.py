"""`moebius models`: lists the recipes (catalogue.py)."""

import argparse
import json

from ..arguments import Commands, add_command
from ..console import console


def add_commands(commands: Commands) -> None:
    """Declares `moebius models` and its options."""
    parser = add_command(
        commands,
        "models",
        _models,
        "list the recipes with their costs and promises",
        examples=[
            "models",
            "models switch deepseek mine.toml --json",
            "models huginn_moe --pair looped,unlooped",
        ],
    )
    parser.add_argument(
        "names", nargs="*", metavar="RECIPE|FILE.toml", help="default: every recipe"
    )
    parser.add_argument(
        "--pair",
        choices=["looped,unlooped"],
        help="beside each looped recipe its partners without loops, at equal FLOPs, parameters and "
        "cache",
    )
    parser.add_argument("--json", action="store_true", help="everything, exact, as a JSON list")


def _models(options: argparse.Namespace) -> int:
    from ...train.recipes.smoke import RECIPES
    from .catalogue import catalogue, pair, render_catalogue

    if options.pair is not None and not options.names:
        raise ValueError("--pair needs a recipe with loops: moebius models huginn_moe --pair …")
    lines: list[str] = []
    with console(stderr=True).status("counting"):
        if options.pair is None:
            entries = list(catalogue(options.names, RECIPES))
        else:
            pairs = [pair(name, RECIPES) for name in options.names]
            entries = [entry for found, _ in pairs for entry in found]
            lines = [line for _, found in pairs for line in found]
    if options.json:
        print(json.dumps([entry.plain() for entry in entries], indent=2))
    else:
        screen = console()
        screen.print(render_catalogue(entries, width=screen.width))
        if lines:
            screen.print("\n".join(lines), highlight=False)
    return 0
