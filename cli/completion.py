"""`moebius completion`: a script that lets a shell complete commands, options, recipes and paths.

The script holds all of it, so that pressing TAB starts no Python.
"""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

from ..train.recipes.names import RECIPE_NAMES
from .arguments import Commands, add_command

_SHELLS = ("bash", "zsh", "fish")
_FOLDERS = ("RUN", "DIR", "RUN|CHECKPOINT")  # how the help calls an argument that is a folder
_FILES = ("FILE", "FILE.json", "NAME|FILE.toml")
_RECIPES = ("RECIPE", "RECIPE|FILE.toml", "MODEL")


def add_commands(commands: Commands, root: argparse.ArgumentParser) -> None:
    """Declares `moebius completion`, which completes the commands of `root`."""
    parser = add_command(
        commands,
        "completion",
        functools.partial(_completion, root),
        "print a script that completes commands, options and recipes in your shell",
        examples=[
            "completion bash > ~/.local/share/bash-completion/completions/moebius",
            "completion zsh > ~/.zfunc/_moebius",
            "completion fish > ~/.config/fish/completions/moebius.fish",
        ],
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell that is to read the script")


def _completion(root: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Carries out `moebius completion`."""
    import shtab

    for action in _actions(root):
        _describe(action, shtab)
    print(shtab.complete(root, shell=options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the arguments of a parser and of all commands below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


def _describe(action: Any, shtab: Any) -> None:
    """Tells shtab what an argument may be, which its name in the help says."""
    if action.metavar in _FOLDERS:
        action.complete = shtab.DIRECTORY
    elif action.metavar in _FILES:
        action.complete = shtab.FILE
    elif action.metavar in _RECIPES and action.choices is None:
        action.choices = RECIPE_NAMES
