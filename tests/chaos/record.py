"""Keeps the results of chaos runs, one entry per seed:

    python -m tests.chaos.record build/chaos/seed-7/report.json …

writes benchmarks/results/chaos.json, with the machine and commit of each run.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

FILE = RESULTS / "chaos.json"


def main() -> None:
    """Adds the named reports, replacing older ones of the same seeds."""
    runs = json.loads(FILE.read_text())["runs"] if FILE.exists() else []
    by_seed = {run["seed"]: run for run in runs}
    for name in sys.argv[1:]:
        report = json.loads(Path(name).read_text())
        by_seed[report["seed"]] = summarise(report)
    runs = [by_seed[seed] for seed in sorted(by_seed)]
    FILE.write_text(json.dumps({"runs": runs}, indent=2) + "\n")


def summarise(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report with one entry per kind of fault."""
    kinds: dict[str, dict[str, Any]] = {}
    for one in report["injected"]:
        kind = kinds.setdefault(one["kind"], {"injected": 0, "hit": 0, "goes_on_after_s": []})
        kind["injected"] += 1
        kind["hit"] += bool(one["victim"])
        if one["recovery_s"] is not None:
            kind["goes_on_after_s"].append(one["recovery_s"])
            ways = kind.setdefault("by", {})
            ways[one["way"]] = ways.get(one["way"], 0) + 1
    values = {key: value for key, value in report.items() if key != "injected"}
    return values | {"faults": dict(sorted(kinds.items()))}


if __name__ == "__main__":
    main()
