"""Run folders for the page, written line by line like a run's."""

import json
from pathlib import Path
from typing import Any


def train_line(step: int, *, loss: float = 1.0, **values: Any) -> dict[str, Any]:
    """Returns a step's line: a second and 100 tokens each."""
    line = {
        "kind": "train",
        "step": step,
        "time": 1000.0 + step,
        "loss": loss,
        "tokens": 100 * step,
    }
    return line | {"tokens_per_s": 50.0} | values


def with_loads(step: int, *loads: list[float], **values: Any) -> dict[str, Any]:
    """Returns a step's line with every expert's share of routes, by depth step."""
    violations = [max(load) * len(load) - 1 for load in loads]
    given = {"expert_load": list(loads), "max_violation": violations}
    return train_line(step, **given, effective_experts=[1.0] * len(loads), **values)


def write_lines(file: Path, *lines: dict[str, Any]) -> None:
    """Appends lines to a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def journal_line(state: str, time: float, reason: str = "", **details: Any) -> dict[str, Any]:
    """Returns a line of the journal."""
    return {"time": time, "state": state, "generation": 1, "reason": reason, "details": details}


def write_run(run_dir: Path, *metrics: dict[str, Any]) -> Path:
    """Writes the folder of a running run."""
    entries = journal_line("SUBMITTED", 999.0), journal_line("RUNNING", 1000.5, "first step")
    write_lines(run_dir / "journal.jsonl", *entries)
    write_lines(run_dir / "metrics.jsonl", *metrics)
    return run_dir
