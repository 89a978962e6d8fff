"""Declares commands and their recurring arguments, and resolves the configuration that they name.

Every command declares its arguments before one is chosen, so this module and the top of every command's
module must not import torch, pydantic or rich: `moebius --help` has to answer at once. Handlers import what
they need.
"""

import argparse
import os
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plugins import is_own

if TYPE_CHECKING:
    from ..train.config.run_config import Config

RUNS = Path("runs")  # default folder of runs and prepared data

Commands = argparse._SubParsersAction  # what `add_subparsers` returns; argparse has no public name
Handler = Callable[[argparse.Namespace], int]  # runs a command and returns its exit code


class NamesOrOwn(list[str]):
    """Choices of an option that also takes a user-defined part, as `module:name`."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or is_own(str(name))


class _Once(argparse._StoreAction):
    """Refuses an option that is given twice, of which argparse would keep only the last value."""

    given_to: Any = None  # the namespace of the last command line that has it

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if option_string and self.given_to is namespace:
            before = getattr(namespace, self.dest)
            raise argparse.ArgumentError(
                self, f"has {before} already: give it once, not {values} too"
            )
        self.given_to = namespace
        super().__call__(parser, namespace, values, option_string)


def add_command(
    commands: Commands,
    name: str,
    handler: Handler,
    text: str,
    *,
    examples: Sequence[str],
    notes: str = "",
) -> argparse.ArgumentParser:
    """Declares a command and returns its parser, without arguments so far.

    Args:
        handler: called with the parsed options; returns the exit code.
        text: what the command does, for the list of commands and its own help.
        examples: command lines without the leading `moebius`, for its own help.
        notes: a paragraph before the examples, such as exit codes.
    """
    epilog = [*textwrap.wrap(notes, 79), ""] if notes else []
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog="\n".join([*epilog, "examples:", *(f"  moebius {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for action in (None, "store"):
        parser.register("action", action, _Once)
    parser.set_defaults(run=handler)
    return parser


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that name a run's configuration and its run folder."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="RECIPE|FILE.toml",
        help="a recipe (`moebius models` lists them), a TOML file, or a run's config.json",
    )
    add_overrides(parser)
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="run folder; an existing run is continued"
    )
    parser.add_argument(
        "--from",
        dest="start_from",
        metavar="SOURCE",
        help="start a new run from weights: a run (its newest checkpoint), a checkpoint, a published "
        "folder, or hf://org/name@revision; the recipe then gives everything but the model (default: "
        "the run's own configuration; of a folder the recipe with its sizes). RUN@STEP (or "
        "RUN@best, RUN@last) branches off a run, with its optimizer state and data, and new rates",
    )
    parser.add_argument(
        "--family", metavar="MODULE:NAME", help="with --from FOLDER: a family of your own"
    )
    parser.add_argument(
        "--draw-anew",
        action="append",
        default=[],
        metavar="PATTERN",
        help="with --from: draw parameters that match (* and ?) instead of loading them; can be "
        "repeated",
    )
    parser.add_argument(
        "--grow",
        action="extend",
        nargs="+",
        default=[],
        metavar="WORD",
        help="with --from: grow the model first, for example split=2, experts=x2 or mixture=8/4 "
        "(docs/grow.md)",
    )
    parser.add_argument(
        "--moments",
        choices=["keep", "new"],
        help="with --from RUN@STEP --grow: the optimizer's state, by default kept",
    )


def add_overrides(parser: argparse.ArgumentParser, *, metavar: str = "section.key=value") -> None:
    """Declares values of the configuration that a command changes."""
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar=metavar, help="values to change"
    )


def words_and_overrides(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of growth, whose names have no dot, and the changes of the configuration."""
    words = [word for word in given if "." not in word.partition("=")[0]]
    return words, [word for word in given if word not in words]


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Declares the run folder that a command reads."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run folder")


def add_checkpoint_argument(
    parser: argparse.ArgumentParser,
    default: str = "default: its newest checkpoint",
    *,
    steps: bool = True,
) -> None:
    """Declares a checkpoint by its name, with its step apart if `steps`."""
    text = f"a run, RUN@STEP, RUN@best, RUN@last, or the folder of a checkpoint; {default}"
    parser.add_argument("path", type=Path, metavar="RUN[@STEP]|CHECKPOINT", help=text)
    if steps:
        parser.add_argument("--step", type=int, metavar="N", help="the same as RUN@N")


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    """Declares which weights of a checkpoint are read."""
    parser.add_argument(
        "--weights",
        choices=["trained", "average"],
        default="trained",
        help="the weights of the step (default), or their average, if the run has train.average",
    )


def add_unauthenticated(parser: argparse.ArgumentParser) -> None:
    """Declares the option that allows a cluster without a token."""
    parser.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help="use a network cluster that asks for no token: anyone who reaches it can run code "
        "in it",
    )


def allow_unauthenticated(options: argparse.Namespace) -> None:
    """Sets the environment variable behind `--allow-unauthenticated`, if it was given."""
    from ..cluster.places.ray_session import ALLOW_UNAUTHENTICATED

    if options.allow_unauthenticated:
        os.environ[ALLOW_UNAUTHENTICATED] = "1"


def resolve_config(name: str, overrides: list[str]) -> "Config":
    """Returns the configuration of a recipe, a TOML file or a run's config.json, changed.

    Raises:
        ConfigError: there is none of this name, it cannot be read, or a change is not valid.
    """
    from ..train.config.resolve import resolve
    from ..train.config.run_config import Config
    from ..train.recipes.smoke import RECIPES
    from ..train.record.run_folder import stored_config

    if not name.endswith(".json"):
        return resolve(name, overrides, RECIPES)
    path, is_run = Path(name), Path(name).name == "config.json"
    load = partial(stored_config, path.parent) if is_run else partial(Config.load, path)
    return resolve(name, overrides, {name: load})
