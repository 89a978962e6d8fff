"""`moebius doctor`: checks this machine before a job is started on it (cluster/checks/)."""

import argparse
import json
from pathlib import Path

from .arguments import RUNS, Commands, add_command


def add_commands(commands: Commands) -> None:
    """Declares `moebius doctor`."""
    parser = add_command(
        commands,
        "doctor",
        _doctor,
        "check this machine before a job is started on it",
        examples=["doctor", "doctor --run-dir /shared/runs --json", "doctor --links links.json"],
        notes="exit code: 0, or 1 where a check fails, or 2 where it cannot be made",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", default=RUNS, help=f"where runs go; default: {RUNS}/"
    )
    parser.add_argument(
        "--links", type=Path, metavar="FILE", help="write the measured all-to-all, for the planner"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", default=2, help="in the all-to-all test; default: 2"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per check")


def _doctor(options: argparse.Namespace) -> int:
    """Carries out `moebius doctor`."""
    from ..cluster.checks.findings import exit_code, judge_links
    from ..cluster.checks.links import measure_links
    from ..cluster.checks.machine import look_at_machine
    from ..planning.measured import fit_hockney

    if not 2 <= options.processes <= 16:
        raise ValueError(f"--processes {options.processes}: 2 to 16")
    try:
        findings = look_at_machine(options.run_dir.absolute())
        rows, sound = measure_links(options.processes)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"the checks could not be made: {error}") from error
    fitted = fit_hockney([(row["bytes"], row["seconds"]) for row in rows])
    findings.append(
        judge_links(fitted.alpha_s, fitted.beta_s_per_byte, world=options.processes, sound=sound)
    )
    if options.links is not None:
        measured = {
            "rows": rows,
            "ranks_per_node": options.processes,
            "alpha_s": fitted.alpha_s,
            "beta_s_per_byte": fitted.beta_s_per_byte,
        }
        options.links.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    if options.json:
        for finding in findings:
            print(json.dumps(finding.record(), ensure_ascii=False))
    else:
        _show([(each.verdict, each.check, each.found, each.advice) for each in findings])
    return exit_code(findings)


def _show(findings: list[tuple[str, str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for verdict, check, found, advice in findings:
        words = Text(found)
        if advice:
            words.append(f"\n→ {advice}", style="dim")
        table.add_row(Text(verdict, style=styles[verdict]), Text(check), words)
    Console().print(table)
