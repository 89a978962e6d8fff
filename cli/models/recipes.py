"""`moebius models`: lists the recipes (catalogue.py)."""

import argparse
import json

from ..arguments import Commands, add_command


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
    from rich.console import Console

    from ...train.recipes.smoke import RECIPES
    from .catalogue import arms_of, catalogue, differences, render_catalogue

    names = options.names
    if options.pair is not None:
        if not names:
            raise ValueError("--pair needs a recipe with loops: moebius models huginn_moe --pair …")
        names = [arm for name in names for arm in arms_of(name)]
    with Console(stderr=True).status("counting"):
        entries = list(catalogue(names, RECIPES))
    if options.json:
        print(json.dumps([entry.plain() for entry in entries], indent=2))
    else:
        console = Console()
        console.print(render_catalogue(entries, width=console.width))
        if options.pair is not None:
            for name in options.names:
                console.print("\n".join(differences(name, RECIPES)), highlight=False)
    return 0
