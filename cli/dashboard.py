"""Live views of runs: `moebius watch` in the terminal, `moebius dashboard` as a web page."""

import argparse
from pathlib import Path

from .arguments import RUNS, Commands, add_command, add_run_argument
from .jobs.status import EXIT_CODES, watch_run
from .messages import print_message

_LOCAL = ("127.0.0.1", "::1", "localhost")


def add_commands(commands: Commands) -> None:
    """Declares the commands that show runs live."""
    parser = add_command(
        commands,
        "watch",
        _watch,
        "follow a run in the terminal until it has ended: loss, throughput, expert load, events",
        examples=["watch runs/mine"],
        notes=EXIT_CODES,
    )
    add_run_argument(parser)
    parser = add_command(
        commands,
        "dashboard",
        _dashboard,
        "compare runs on a web page of this machine: loss, throughput, expert load, events",
        examples=["dashboard", "dashboard runs/mine", "dashboard runs --port 8051"],
        notes="The page needs the extra: pip install 'moebius[web]'. Its address holds a token; Ctrl-C ends it.",
    )
    text = f"a run folder, or a folder of runs; default: {RUNS}/"
    parser.add_argument("root", type=Path, nargs="?", metavar="RUN|FOLDER", default=RUNS, help=text)
    parser.add_argument("--port", type=int, default=8050, help="default: 8050; 0: any that is free")
    parser.add_argument(
        "--host",
        default=_LOCAL[0],
        help="address to listen on, default: 127.0.0.1; on others the token travels unencrypted",
    )


def _watch(options: argparse.Namespace) -> int:
    """Carries out `moebius watch`."""
    return watch_run(options.run_dir)


def _dashboard(options: argparse.Namespace) -> int:
    """Carries out `moebius dashboard`."""
    try:
        from ..cluster.dashboard.serve import serve
    except ModuleNotFoundError as error:
        if error.name not in ("dash", "plotly", "flask", "werkzeug"):
            raise
        raise ValueError(
            "the page needs Dash, which is not installed: pip install 'moebius[web]'"
        ) from None
    if options.host not in _LOCAL:
        print_message(
            "warning",
            f"{options.host}: whoever can read this network's traffic can read the token and the "
            "runs. `ssh -L` from your machine to this one needs no --host",
        )
    try:
        serve(options.root, host=options.host, port=options.port, say=_tell)
    except KeyboardInterrupt:
        print("ended")
    return 0


def _tell(address: str) -> None:
    print(f"open {address}\nCtrl-C ends it", flush=True)
