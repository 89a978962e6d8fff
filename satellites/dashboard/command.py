"""Implements `moebius dashboard`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_LOCAL = ("127.0.0.1", "::1", "localhost")


def main(words: Sequence[str]) -> int:
    """Serves the page until interrupted (entry point of the group moebius.commands).

    Raises:
        ValueError: there is no run, or the port is not available.
    """
    options = _parser().parse_args(words)
    from .serve import serve

    if options.host not in _LOCAL:
        print(
            f"warning: --host {options.host} sends the token and the runs unencrypted over the "
            "network; use `ssh -L` from your machine instead",
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
        epilog="The printed address contains a token. Press Ctrl-C to stop.",
    )
    text = "a run folder, or a folder of runs; default: runs/"
    parser.add_argument(
        "root", type=Path, nargs="?", metavar="RUN|FOLDER", default=Path("runs"), help=text
    )
    parser.add_argument("--port", type=int, default=8050, help="default: 8050; 0: any free port")
    parser.add_argument(
        "--host",
        default=_LOCAL[0],
        help="address to listen on, default: 127.0.0.1; others send the token unencrypted",
    )
    return parser


def _tell(address: str) -> None:
    print(f"open {address}\npress Ctrl-C to stop", flush=True)
