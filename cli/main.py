"""The command `moebius`: parses a command line and calls the handler of its command.

Each module of GROUPS declares commands (`add_commands`) and holds their handlers, which import what they need
when they are called, so `moebius --help` imports none of it.

Other packages add commands through entry points of the group `moebius.commands`. The entry's name is the
command; its value is a function that takes the remaining words and returns the exit code.
"""

import argparse
import errno
import gc
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from .. import __version__
from ..data_pipeline.words import some_of
from ..plugins import nearest
from ..train.config.arguments import bad_path
from ..train.record.process_log import print_in_any_encoding
from ..train.record.untrusted import escaped
from .console import print_message
from .data import checkpoints, folders, prepare
from .jobs import cluster, control, doctor, status
from .models import config, evaluate, recipes
from .planning import plan, simulate

# in the order of `moebius --help`
GROUPS = (
    prepare,
    folders,
    control,
    status,
    cluster,
    doctor,
    evaluate,
    recipes,
    config,
    plan,
    simulate,
    checkpoints,
)
# Commands of packages that may be missing, for a helpful error. Looking up what is installed would take 60
# ms, as long as all of `moebius --help`.
ELSEWHERE = {
    "analyze": "moebius-science",
    "compare": "moebius-science",
    "tasks": "moebius-science",
    "dashboard": "moebius-dashboard",
}

# names of our commands in other tools
ALIASES = {
    "export": "ckpt export",
    "import": "ckpt import",
    "verify": "data verify or ckpt verify",
    "tokenize": "prepare",
    "generate": "eval RUN --prompt TEXT",
    "sample": "eval RUN --prompt TEXT",
    "evaluate": "eval",
    "run": "train or submit",
    "launch": "submit",
    "kill": "stop",
    "list": "status or models",
    "ls": "status or models",
    "recipes": "models",
    "infer": "eval RUN --prompt TEXT",
    "inference": "eval RUN --prompt TEXT",
    "serve": "ckpt export, for vLLM and others to serve",
    "finetune": "train --from RUN or --from hf://org/name",
    "pretrain": "train",
    "test": "eval",
    "convert": "ckpt export or ckpt import",
    "init": "config RECIPE > mine.toml",
    "sweep": "compare RECIPE --sweep section.key=A,B,…",
}

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Objects that Python creates between two garbage collections. Its default of 700 costs a fifth of the time of
# importing torch, and finds nothing.
_GARBAGE_AFTER = 50_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits.

    The exit code is 0 on success, 1 if a job failed, and 2 if the request cannot be carried out.
    """
    gc.set_threshold(_GARBAGE_AFTER)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None after `>&-`
    print_in_any_encoding()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            code = _run(words)
        except SystemExit as end:  # after --help, or a wrong option
            code = end.code
        sys.stdout.flush()  # while a closed pipe or a full disk is still handled
    except ValueError as error:  # a user's mistake; the message says what to do
        print_message("error", str(error))
        code = 2
    except BrokenPipeError:  # `moebius logs | head`
        _output_fails()
        code = 0
    except OSError as error:
        code, problem = 2, bad_path(error)
        if not problem and (error.errno in _FULL or _output_fails()):
            _output_fails()
            code, problem = 1, f"the output cannot be written: {error.strerror}"
        if not problem:
            raise
        print_message("error", problem)
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)


def _output_fails() -> bool:
    """Returns whether standard output takes no more; if so, Python writes no rest to it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


class _Parser(argparse.ArgumentParser):
    """Shows help and errors, and hides no error of writing them, as argparse does."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        super().error(escaped(message))


def _run(words: list[str]) -> int:
    """Runs a command line and returns its exit code."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    parser = build_parser()
    is_elsewhere = words and words[0][:1] != "-" and words[0] not in command_names(parser)
    if is_elsewhere and (command := _find_elsewhere(words[0])):
        if words == sys.argv[1:] and not sys.stdout.isatty():
            os.environ.setdefault("COLUMNS", "10000")  # no line of a table wraps in a pipe
        return command(words[1:])
    if not words:
        parser.print_help()
        return 0
    if is_elsewhere and (meant := _meant(words[0], parser)):
        raise ValueError(f"moebius has no command {words[0]}{meant}")
    options = parse(words, parser)
    return options.run(options)


def _meant(word: str, parser: argparse.ArgumentParser) -> str:
    """Returns a question that names the command meant by `word`; "" if there is none."""
    if word in ALIASES:
        return f"; did you mean {ALIASES[word]}?"
    return nearest(word, [*command_names(parser), *ELSEWHERE])


def _find_elsewhere(name: str) -> Callable[[list[str]], int] | None:
    """Returns a command of another package, or None.

    Raises:
        ValueError: the command's package is known but not installed.
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group="moebius.commands", name=name):
        return entry.load()
    if name in ELSEWHERE:
        package = ELSEWHERE[name]
        folder = package.removeprefix("moebius-")
        raise ValueError(
            f"moebius {name} is a command of the package {package}, which is not installed: run "
            f"pip install ./satellites/{folder} in a checkout of moebius"
        )
    return None


def parse(
    words: Sequence[str], parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """Returns the options of a command line; exits with 2 and the usage if it is not valid.

    Overrides (`section.key=value`) may be anywhere; argparse alone accepts them only before the first option.
    """
    parser = parser or build_parser()
    options, rest = parser.parse_known_args(words)
    if "passed_on" in options:  # the command passes its arguments to another program
        options.passed_on = words[1:]
        return options
    if "start_from" in options:
        rest = _place_name(options, rest)
        if not (options.name or options.start_from or rest):
            needed = "the following arguments are required: RECIPE|FILE.toml, or --from SOURCE"
            _chosen(parser, words).error(needed)
    if not rest:
        return options
    is_bare = "bare_words" in options
    are_overrides = all(("=" in word or is_bare) and not word.startswith("-") for word in rest)
    if "overrides" not in options or not are_overrides:
        chosen = _chosen(parser, words)
        hint = _hint_for(rest) if "overrides" in options else _options_of(chosen)
        chosen.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    options.overrides = [*options.overrides, *rest]
    return options


def _place_name(options: argparse.Namespace, rest: list[str]) -> list[str]:
    """Sets an optional name that comes after options, which argparse leaves over with the overrides."""
    if options.name is None and rest and "=" not in rest[0] and not rest[0].startswith("-"):
        options.name, *rest = rest
    return rest


def _chosen(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of the command in `words`, whose usage an error shows."""
    for word in words:
        groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not groups:
            break
        parser = groups[0].choices.get(word, parser)
    return parser


def _options_of(chosen: argparse.ArgumentParser) -> str:
    """Lists the options of a command that takes no keys."""
    names = [max(each.option_strings, key=len, default="--help") for each in chosen._actions]
    known = [name for name in names if name != "--help"]
    return f"; it takes {some_of(known) if known else 'no options'}"


def _hint_for(rest: Sequence[str]) -> str:
    """Returns a hint at the key that an unknown option such as `--steps 10` means."""
    from ..train.config.keys import known_keys
    from ..train.config.run_config import Config
    from ..train.config.suggestions import suggest

    option = next((word for word in rest if word.startswith("--")), "")
    name = option.partition("=")[0].removeprefix("--")
    hint = suggest(name, (key for key, _ in known_keys(Config))) if name else ""
    keys = " Keys are written section.key=value, without dashes" if hint.endswith("?") else ""
    return hint + keys


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands with their options."""
    others = ", ".join(f"{name} ({package})" for name, package in ELSEWHERE.items())
    parser = _Parser(
        prog="moebius",
        description="Expert-parallel pretraining of Mixture-of-Experts Universal Transformers.",
        epilog=f"Commands of other packages: {others}. `moebius models` lists the recipes.",
    )
    parser.add_argument("--version", action="version", version=f"moebius {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for group in GROUPS:
        group.add_commands(commands)
    return parser


def command_names(parser: argparse.ArgumentParser) -> Collection[str]:
    """Returns the commands of a parser."""
    return next(
        action.choices
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
