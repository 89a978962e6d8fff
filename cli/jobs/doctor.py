"""`moebius doctor`: checks this machine or a whole cluster before a job starts (cluster/check/)."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import RUNS, Commands, add_command, add_unauthenticated, allow_unauthenticated
from ..console import console

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
    else:
        yield _examine(options)


def _examine(options: argparse.Namespace) -> "list[Finding]":
    from ...cluster.check.doctor import examine
    from ...cluster.check.probe import Probe, probes

    run_dir = options.run_dir.absolute()
    with console(stderr=True).status("checking the nodes and running ranks on all of them"):
        if options.address is None:
            return examine({_HERE: Probe(_HERE)}, run_dir)
        from ...cluster.places.standing import cluster_at

        allow_unauthenticated(options)
        with cluster_at(options.address), probes(LIMIT_S) as nodes:
            return examine(nodes, run_dir)


def _print_json(findings: "Sequence[Finding]") -> None:
    from ...train.record.redaction import redact_values

    for finding in findings:
        print(json.dumps(redact_values(asdict(finding)), ensure_ascii=False))


def _show(findings: "Sequence[Finding]") -> None:
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
    console().print(table)
