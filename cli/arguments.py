"""What the commands of `moebius` share: how one is declared, and the arguments that recur.

Nothing here, and nothing that a command's module imports at its top, may import torch, pydantic or
rich: every command's arguments are declared before one is chosen, and `moebius --help` answers at
once. Handlers import what they need when they are called.
"""

import argparse
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from ..own_parts import is_own

RUNS = Path("runs")  # where runs and prepared data go unless told otherwise

Commands = argparse._SubParsersAction  # what `add_subparsers` returns; argparse has no public name
Handler = Callable[[argparse.Namespace], int]  # carries out a command and returns its exit code


class NamesOrOwn(list[str]):
    """The choices of an option that takes a part of the user's own, too, as `module:name`."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or is_own(str(name))


def add_command(
    commands: Commands,
    name: str,
    handler: Handler,
    text: str,
    *,
    examples: Sequence[str],
    notes: str = "",
) -> argparse.ArgumentParser:
    """Declares a command and returns its parser, which still lacks its arguments.

    Args:
        handler: called with the parsed options; returns the exit code.
        text: what the command does, for the list of commands; its own help begins with it.
        examples: command lines without the leading `moebius`; its own help ends with them.
        notes: a paragraph before the examples: exit codes, where there is more than one.
    """
    epilog = [*textwrap.wrap(notes, 79), ""] if notes else []
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog="\n".join([*epilog, "examples:", *(f"  moebius {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=handler)
    return parser


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that name a run's configuration and its run folder."""
    parser.add_argument(
        "name",
        metavar="RECIPE|FILE.toml",
        help="a recipe (`moebius models` lists them), a TOML file, or a run's config.json",
    )
    add_overrides(parser)
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="run folder; an existing run is continued"
    )


def add_overrides(parser: argparse.ArgumentParser, *, metavar: str = "section.key=value") -> None:
    """Declares the single values of a configuration that a command changes."""
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar=metavar, help="values to change"
    )


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Declares the run folder that a command looks into."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run folder")


def add_unauthenticated(parser: argparse.ArgumentParser) -> None:
    """Declares the option by which a cluster that asks for no token is used all the same."""
    parser.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help="use a network cluster that asks for no token: anyone who reaches it can run code "
        "in it",
    )


def allow_unauthenticated(options: argparse.Namespace) -> None:
    """Hands on that the option was given."""
    from ..cluster.places.ray_session import ALLOW_UNAUTHENTICATED

    if options.allow_unauthenticated:
        os.environ[ALLOW_UNAUTHENTICATED] = "1"
