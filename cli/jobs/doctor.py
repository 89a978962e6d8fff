"""`moebius doctor`: checks this machine, or a whole cluster, before a job is started (cluster/checks/)."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import RUNS, Commands, add_command, add_unauthenticated, allow_unauthenticated

if TYPE_CHECKING:
    from ...cluster.check.findings import Finding

_MATRIX_NODES = 12  # more do not fit a terminal; the file has them all


def add_commands(commands: Commands) -> None:
    """Declares `moebius doctor`."""
    parser = add_command(
        commands,
        "doctor",
        _doctor,
        "check this machine, or a whole cluster, before a job is started",
        examples=[
            "doctor",
            "doctor --address auto --run-dir /shared/runs --links links.json",
            "doctor --address simulated --json",
            "doctor --gpu",
        ],
        notes="exit code: 0, or 1 where a check fails, or 2 where it cannot be made",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help='check every node of a Ray cluster; "auto"; "simulated[:NAME]"; default: this machine',
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="instead: every kernel against plain PyTorch, a CUDA graph and NCCL on this machine's "
        "GPUs, in under a minute",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", default=RUNS, help=f"where runs go; default: {RUNS}/"
    )
    parser.add_argument(
        "--links", type=Path, metavar="FILE", help="write the measured links, for the planner"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        default=2,
        help="in the all-to-all test, on each node; default: 2",
    )
    parser.add_argument(
        "--limit", type=float, metavar="S", default=30.0, help="for a node to answer; default: 30"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per check")
    add_unauthenticated(parser)


def _doctor(options: argparse.Namespace) -> int:
    """Carries out `moebius doctor`."""
    from ...cluster.check.findings import exit_code

    on_cluster = options.address is not None
    if not (1 if on_cluster else 2) <= options.processes <= 16:
        raise ValueError(f"--processes {options.processes}: 2 to 16, or 1 with --address")
    if not 1.0 <= options.limit <= 3600.0:
        raise ValueError(f"--limit {options.limit:g}: 1 to 3600 seconds")
    if options.gpu:
        if on_cluster or options.links is not None:
            raise ValueError("--gpu is of this machine, and does not go with --address or --links")
        findings, links = _of_gpus(), None
    else:
        findings, links = _of_cluster(options) if on_cluster else _of_machine(options)
    if options.links is not None and links is not None:
        options.links.write_text(json.dumps(links, indent=1) + "\n", encoding="utf-8")
    if options.json:
        _print_json(findings)
    else:
        _show(findings)
        _show_matrix(links or {})
    return exit_code(findings)


def _of_gpus() -> "list[Finding]":
    """Checks what this machine's GPUs compute."""
    from ...cluster.check.gpus import look_at_gpus

    return look_at_gpus()


def _of_machine(options: argparse.Namespace) -> "tuple[list[Finding], dict[str, Any]]":
    """Checks this machine; returns its links, too."""
    from ...cluster.check.findings import judge_links
    from ...cluster.check.links import measure_links
    from ...cluster.check.machine import look_at_machine
    from ...planning.measured import fit_hockney

    try:
        findings = look_at_machine(options.run_dir.absolute())
        rows, sound = measure_links(options.processes)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"the checks could not be made: {error}") from error
    fitted = fit_hockney([(row["bytes"], row["seconds"]) for row in rows])
    alpha_s, beta = fitted.alpha_s, fitted.beta_s_per_byte
    findings.append(judge_links(alpha_s, beta, world=options.processes, sound=sound))
    return findings, {
        "rows": rows,
        "ranks_per_node": options.processes,
        "alpha_s": alpha_s,
        "beta_s_per_byte": beta,
    }


def _of_cluster(options: argparse.Namespace) -> "tuple[list[Finding], dict[str, Any] | None]":
    """Checks a cluster; returns its links, if its nodes could measure them."""
    from rich.console import Console

    from ...cluster.check.cluster import Settings, examine
    from ...cluster.places.standing import cluster_at
    from ...planning.measured import fit_hockney

    allow_unauthenticated(options)
    settings = Settings(str(options.run_dir.absolute()), options.processes, options.limit)
    with Console(stderr=True).status("connecting") as status, cluster_at(options.address):
        from ...cluster.check.ray_probes import probes

        with probes(options.limit) as (nodes, silent):
            done = examine(nodes, settings, fit=fit_hockney, silent=silent, tell=status.update)
    return done.findings, done.links


def _print_json(findings: "Sequence[Finding]") -> None:
    from ...train.record.redaction import redact_values

    for finding in findings:
        print(json.dumps(redact_values(finding.record()), ensure_ascii=False))


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


def _show_matrix(links: Mapping[str, Any]) -> None:
    """Prints the bandwidth between every two nodes, where they are few."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    nodes, pairs = links.get("nodes", []), links.get("pairs", [])
    if not 2 <= len(nodes) <= _MATRIX_NODES:
        return
    table = Table(title="GB/s of the largest message, α in µs", box=None, padding=(0, 2, 0, 0))
    for heading in ("", *nodes):
        table.add_column(Text(heading), justify="right")
    cells = {tuple(pair["nodes"]): _cell(pair) for pair in pairs}
    for row in nodes:
        found = [cells.get((row, column)) or cells.get((column, row), "") for column in nodes]
        table.add_row(Text(row), *found)
    Console().print(table)


def _cell(pair: Mapping[str, Any]) -> str:
    largest = pair["times"][-1]
    rate = largest["bytes"] / largest["quartiles_s"][1] / 1e9
    return f"{rate:.2f}, {pair['alpha_s'] * 1e6:,.0f}"
