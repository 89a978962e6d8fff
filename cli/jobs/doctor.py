"""`moebius doctor`: checks this machine or a whole cluster before a job starts (cluster/check/)."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import RUNS, Commands, add_command, add_unauthenticated, allow_unauthenticated

if TYPE_CHECKING:
    from ...cluster.check.findings import Finding

LIMIT_S = 60.0  # for a node to answer
_HERE = "127.0.0.1"


def add_commands(commands: Commands) -> None:
    """Declares `moebius doctor` and its options."""
    parser = add_command(
        commands,
        "doctor",
        _doctor,
        "check this machine or a whole cluster before you start a job",
        examples=[
            "doctor",
            "doctor --address auto --run-dir /shared/runs",
            "doctor --address simulated --json",
            "doctor --gpu",
        ],
        notes="exit code: 0, 1 if a check fails, 2 if the checks cannot run",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help='check every node of a Ray cluster: HOST:PORT of its head, "auto", or '
        '"simulated"; default: this machine',
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="check only this machine's GPUs, in under a minute: every kernel against plain "
        "PyTorch, and NCCL",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", default=RUNS, help=f"where runs go; default: {RUNS}/"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per check")
    add_unauthenticated(parser)


def _doctor(options: argparse.Namespace) -> int:
    show, failed = (_print_json if options.json else _show), False
    for findings in _look(options):
        show(findings)
        failed |= any(each.verdict == "fail" for each in findings)
    return int(failed)


def _look(options: argparse.Namespace) -> "Iterator[list[Finding]]":
    """Yields the findings to be shown together: a GPU's one by one, as a kernel may hang."""
    if options.gpu:
        if options.address is not None:
            raise ValueError("--gpu checks this machine: omit --address")
        from ...cluster.check.doctor import look_at_gpus

        yield from ([each] for each in look_at_gpus())
    elif options.address is None:
        yield _examine_here(options)
    else:
        yield _examine_cluster(options)


def _examine_here(options: argparse.Namespace) -> "list[Finding]":
    from rich.console import Console

    from ...cluster.check.probe import Probe

    with Console(stderr=True).status("looking") as status:
        return _examine(options, {_HERE: Probe(_HERE)}, tell=status.update)


def _examine_cluster(options: argparse.Namespace) -> "list[Finding]":
    from rich.console import Console

    from ...cluster.places.standing import cluster_at

    allow_unauthenticated(options)
    with Console(stderr=True).status("connecting") as status, cluster_at(options.address):
        from ...cluster.check.probe import probes

        with probes(LIMIT_S) as (nodes, silent):
            return _examine(options, nodes, silent=silent, tell=status.update)


def _examine(options: argparse.Namespace, nodes: Any, **more: Any) -> "list[Finding]":
    from ...cluster.check.doctor import examine

    return examine(nodes, str(options.run_dir.absolute()), limit_s=LIMIT_S, **more)


def _print_json(findings: "Sequence[Finding]") -> None:
    from ...train.record.redaction import redact_values

    for finding in findings:
        print(json.dumps(redact_values(asdict(finding)), ensure_ascii=False))


def _show(findings: "Sequence[Finding]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ...train.record.redaction import redact

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for each in findings:
        words = Text(redact(each.found))
        if each.advice:
            words.append(f"\n→ {each.advice}", style="dim")
        table.add_row(Text(each.verdict, style=styles[each.verdict]), Text(each.check), words)
    Console().print(table)
