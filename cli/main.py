"""The command `moebius`: parses a command line and calls the handler of its command.

Each module beside this one declares a group of commands (`add_commands`) and holds their handlers,
which import what they need when they are called: `moebius --help` imports none of it.
"""

import argparse
import errno
import gc
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..train.recipes.names import RECIPE_NAMES
from . import analyze, compare, completion, dashboard, layout
from .data import checkpoints, prepare
from .data import folders as data
from .jobs import cluster, doctor
from .jobs import control as jobs
from .jobs import status as job_reports
from .messages import print_message
from .models import evaluate, harness
from .models import recipes as models
from .planning import plan, simulate

# In the order in which `moebius --help` lists them.
GROUPS = (
    prepare,
    data,
    jobs,
    job_reports,
    dashboard,
    cluster,
    doctor,
    evaluate,
    harness,
    analyze,
    compare,
    models,
    layout,
    plan,
    simulate,
    checkpoints,
)

# What a path cannot be, wherever it is first looked at: too long, a circle of links, something below
# a file, or what this user may not look at.
NO_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EROFS)

# Objects that are made until garbage is looked for. Python's 700 cost a fifth of the time in which a
# command imports torch, and find nothing.
_GARBAGE_AFTER = 50_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 on success, 1 where a job failed, 2 where the request cannot be
    carried out.
    """
    gc.set_threshold(_GARBAGE_AFTER)
    options = parse(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()  # here, where a reader that has gone is no error
    except ValueError as error:  # a mistake of the user; its message says what to do
        print_message("error", str(error))
        code = 2
    except BrokenPipeError:  # `moebius logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        if error.errno not in NO_PATHS or error.filename is None:
            raise
        print_message("error", f"{_shortened(error.filename)}: {error.strerror}; name another path")
        code = 2
    except KeyboardInterrupt:  # where nothing runs that could be ended in better order
        code = 130
    raise SystemExit(code)


def _shortened(path: object) -> str:
    """The path, or the beginning of one that no screen holds."""
    text = str(path)
    return text if len(text) <= 80 else f"{text[:79]}…"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a command line; exits with 2 and the usage where it is not valid.

    Values to change may stand anywhere: argparse takes no more of them once an option has come.
    """
    parser = build_parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser.parse_known_args(words)
    if "passed_on" in options:  # a command whose arguments are another program's
        options.passed_on = words[1:]
        return options
    if not rest:
        return options
    are_overrides = all("=" in word and not word.startswith("-") for word in rest)
    if "overrides" not in options or not are_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.overrides = [*options.overrides, *rest]
    return options


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands with their options."""
    parser = argparse.ArgumentParser(
        prog="moebius",
        description="Expert-parallel pretraining of Mixture-of-Experts Universal Transformers.",
        epilog=f"recipes: {', '.join(RECIPE_NAMES)}",
    )
    parser.add_argument("--version", action="version", version=f"moebius {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for group in GROUPS:
        group.add_commands(commands)
    completion.add_commands(commands, parser)
    return parser
