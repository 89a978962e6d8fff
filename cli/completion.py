"""`moebius --print-completion`: a script with which a shell completes commands, options and recipes.

The script is complete in itself, so pressing TAB starts no Python.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from ..train.recipes.names import RECIPE_NAMES

SHELLS = ("bash", "zsh", "fish")
_FOLDERS = (
    "RUN",
    "DIR",
    "RUN|CHECKPOINT",
    "RUN|FOLDER",
)  # what the help calls an argument that is a folder
_FILES = ("FILE", "FILE.json", "NAME|FILE.toml")
_RECIPES = ("RECIPE", "RECIPE|FILE.toml", "SECTION[.KEY]|RECIPE|FILE.toml", "MODEL")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Declares the option that prints the script for all commands of the parser."""
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=SHELLS,
        help="print a script that completes commands, options and recipes in your shell",
    )


class _PrintCompletion(argparse.Action):
    """Prints the script and exits, as `--version` does."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *_: Any
    ) -> None:
        import shtab

        for action in _all_actions(parser):
            _describe(action, shtab)
        print(shtab.complete(parser, shell=values))
        parser.exit()


def _all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the arguments of a parser and of all commands below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _all_actions(below)


def _describe(action: Any, shtab: Any) -> None:
    """Tells shtab what may stand for an argument, judging by its name in the help."""
    if action.metavar in _FOLDERS:
        action.complete = shtab.DIRECTORY
    elif action.metavar in _FILES:
        action.complete = shtab.FILE
    elif action.metavar in _RECIPES and action.choices is None:
        action.choices = RECIPE_NAMES
