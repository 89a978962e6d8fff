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
        examples=["models", "models switch deepseek mine.toml --json"],
    )
    parser.add_argument(
        "names", nargs="*", metavar="RECIPE|FILE.toml", help="default: every recipe"
    )
    parser.add_argument("--json", action="store_true", help="everything, exact, as a JSON list")


def _models(options: argparse.Namespace) -> int:
    from rich.console import Console

    from ...train.recipes.smoke import RECIPES
    from .catalogue import catalogue, render_catalogue

    with Console(stderr=True).status("counting"):
        entries = list(catalogue(options.names, RECIPES))
    if options.json:
        print(json.dumps([entry.plain() for entry in entries], indent=2))
    else:
        console = Console()
        console.print(render_catalogue(entries, width=console.width))
    return 0
