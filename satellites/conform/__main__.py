"""Checks an expert-parallel layer: python -m moebius_conform MODULE:NAME.

Exit codes: 0 conforms; 1 does not conform; 2 could not be checked.
"""

import argparse
import io
import sys
from collections.abc import Sequence

from rich.console import Console

from .contract import ContractError
from .ranks.processes import LaunchError
from .run import LIMIT_S, RANKS, check
from .scenes import SCENES


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # "?" for signs that the encoding lacks
    given = _parser().parse_args(arguments)
    if given.list:
        print("\n".join(SCENES))
        return 0
    if given.layer is None:
        _parser().error("no layer given: pass MODULE:NAME or FILE.py:NAME")
    try:
        report = check(
            given.layer,
            ranks=given.ranks,
            skip=given.skip,
            only=given.only,
            limit_s=given.limit,
            preload=given.preload,
        )
    except (ContractError, LaunchError) as error:
        print(f"moebius_conform: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(report.json())
    else:
        report.print(Console())
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moebius_conform",
        description="Checks an expert-parallel layer against one rank, and diagnoses faults.",
        epilog="exit codes: 0 conforms, 1 does not conform, 2 could not be checked",
    )
    parser.add_argument("layer", nargs="?", metavar="MODULE:NAME", help="or FILE.py:NAME")
    parser.add_argument(
        "--ranks", type=_numbers, default=RANKS, metavar="1,2,4", help="sizes of the group"
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="SCENE", help="leave a scene out"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="SCENE",
        help="play only this scene; repeatable",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help="seconds without progress on any rank that count as a hang (%(default)g)",
    )
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it once, before ranks are forked; for heavy libraries that start no thread",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--list", action="store_true", help="print the scenes' names")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers of ranks, such as 1,2,4"
        )
    return numbers


if __name__ == "__main__":
    sys.exit(main())
