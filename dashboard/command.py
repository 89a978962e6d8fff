"""Carries out `moebius dashboard`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_LOCAL = ("127.0.0.1", "::1", "localhost")


def main(words: Sequence[str]) -> int:
    """Serves the page until it is interrupted (entry point of the group moebius.commands).

    Raises:
        ValueError: there is no run, or the port cannot be had.
    """
    options = _parser().parse_args(words)
    from .serve import serve

    if options.host not in _LOCAL:
        print(
            f"warning: {options.host}: whoever can read this network's traffic can read the token "
            "and the runs; `ssh -L` from your machine to this one needs no --host",
            file=sys.stderr,
        )
    try:
        serve(options.root, host=options.host, port=options.port, say=_tell)
    except KeyboardInterrupt:
        print("ended")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moebius dashboard",
        description="Compares runs on a live web page: loss, throughput, expert load, events.",
        epilog="The printed address holds a token. Ctrl-C ends the page.",
    )
    text = "a run folder, or a folder of runs; default: runs/"
    parser.add_argument(
        "root", type=Path, nargs="?", metavar="RUN|FOLDER", default=Path("runs"), help=text
    )
    parser.add_argument("--port", type=int, default=8050, help="default: 8050; 0: any that is free")
    parser.add_argument(
        "--host",
        default=_LOCAL[0],
        help="address to listen on, default: 127.0.0.1; on others the token travels unencrypted",
    )
    return parser


def _tell(address: str) -> None:
    print(f"open {address}\nCtrl-C ends it", flush=True)
