"""Tests claims of the family's papers on toys: which claims hold at this size?

    python -m moebius_science.claims [--claims M8 T3 …] [--seeds 5] [--steps N] [--jobs 2]
                                [--device auto] [--text FILE] [--folder DIR]
    python -m moebius_science.claims --judge satellites/science/results/claims.json

The second command judges and draws recorded runs again, without training.

    M8   Mixture of Tokens reaches the dense model's final loss in at most 60 % of its steps
    M11  uniform mixing is worse than learned mixing
    T3   the balance loss lets the largest load fall more than twofold
    X2   representations collapse less under X-MoE's router than under a linear one
    H3   Multi-Head MoE activates more experts than its draws alone explain,
         against SMoE and fine-grained experts of equal cost
    G1   finer experts lower the loss with an output norm; without it the gain vanishes

Toys (toys.py) are trained like the arms of `moebius compare` (satellites/science/compare/runner.py): a process
and a folder per run, one thread, resumed if the script is called again. Arms shared by claims are
trained once. judge.py has the rule. "Does not hold" means: not at this size, not in so few steps.
Nothing was tuned for a verdict. The spread is from the smallest to the largest seed.

Takes about half an hour on 2 cores. A run whose gradients stay non-finite ends; the others
continue, and nothing is judged.

Writes results/claims.json and one results/claims_*.png per claim; a selection of claims writes
results/claims_<choice>.json; --results DIR keeps trials apart. The exit code is 0 for any verdict,
and 1 if a run failed or was stopped.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

import moebius

from ..compare.environment import environment
from ..compare.plan import refuse_stale
from ..compare.progress import progress_of
from ..compare.runner import locked, run_all
from .judge import CLAIMS, Finding, by_seed
from .pictures import draw
from .runs import Job, command, planned, record_of, scoring, thin
from .toys import ARMS, toy

RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    options = parse()
    if options.judge is not None:
        judge_again(options)
        return
    console, machine = Console(), environment()  # the commit that trains
    arms = list(dict.fromkeys(arm for claim in options.claims for arm in CLAIMS[claim].arms))
    began = time.perf_counter()
    with locked(options.folder):
        jobs = make_jobs(arms, options)
        records = train_all(jobs, options, console)
    minutes = (time.perf_counter() - began) / 60
    settings = {
        "seeds": options.seeds,
        "jobs": options.jobs,
        "minutes": round(minutes, 1),
        "configurations": {job.arm.name: configuration(job) for job in jobs if job.seed == 0},
    }
    chosen = "" if list(options.claims) == list(CLAIMS) else "_" + "_".join(options.claims)
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"claims{chosen}.json"
    settle(options.claims, {"environment": machine, "settings": settings}, records, file, console)


def judge_again(options: argparse.Namespace) -> None:
    """Judges and draws a results file; the record has the commits that trained and judged.

    Recorded curves have at most 100 points and five decimals; those of the toys have fewer points.
    """
    recorded = json.loads(options.judge.read_text(encoding="utf-8"))
    records = _numbers(recorded["runs"])
    arms = {record["arm"] for record in records}
    claims = [name for name, claim in CLAIMS.items() if arms.issuperset(claim.arms)]
    source = {name: recorded[name] for name in ("environment", "settings")}
    source["judged_at"] = {"commit": environment()["commit"]}
    settle(claims, source, records, options.judge, Console())


def settle(
    claims: Sequence[str],
    source: dict[str, Any],
    records: Sequence[dict[str, Any]],
    file: Path,
    console: Console,
) -> None:
    """Judges, reports, and writes the results file and its pictures."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        runs[record["arm"]].append(record)
    findings = [finding for claim in claims for finding in CLAIMS[claim].judge(runs)]
    console.print(table(findings))
    explain(findings, console)
    figures = source | {
        "findings": [finding.as_dict() for finding in findings],
        "runs": [thin(record) for record in records],
    }
    file.write_text(compact(figures), encoding="utf-8")
    console.print(f"written: {file}", soft_wrap=True)
    for claim in claims:
        picture = file.parent / f"claims_{claim}.png"
        draw(claim, runs, picture)
        console.print(f"written: {picture}", soft_wrap=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--claims", nargs="+", choices=list(CLAIMS), default=list(CLAIMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, help="of every run; without it those of toys.py, 250 to 500"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--text", default="embedded", help="a file to train on instead of the embedded corpus"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/claims"),
        help="of the runs, which it goes on with",
    )
    parser.add_argument(
        "--judge",
        type=Path,
        metavar="FILE",
        help="recorded runs to judge again, instead of training",
    )
    return parser.parse_args(words)


def make_jobs(arms: Sequence[str], options: argparse.Namespace) -> list[Job]:
    """Prepares the data and returns every arm with every seed.

    Jobs go seed by seed, so that the remaining work resembles the finished work and the estimate of
    the time left is right.
    """
    folder = options.folder.absolute()
    first = ARMS[next(iter(arms))]
    text, device = options.text, options.device
    config = toy(first, seed=0, steps=first.steps, text=text, data="", device=device)
    data = moebius.prepare(config, folder).data.directory
    return [
        Job(
            ARMS[arm],
            seed,
            options.steps or ARMS[arm].steps,
            text,
            data,
            folder / _folder_name(arm) / f"seed-{seed}",
            device,
        )
        for seed in range(options.seeds)
        for arm in arms
    ]


def _folder_name(arm: str) -> str:
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in arm)


def configuration(job: Job) -> dict[str, Any]:
    """Returns the whole configuration of a run with seed 0, without the scratch folder."""
    config = toy(
        job.arm, seed=job.seed, steps=job.steps, text=job.text, data=job.data, device=job.device
    )
    values = config.model_dump(mode="json", exclude={"job": True, "mesh": True})
    return values | {"data": values["data"] | {"directory": ""}}


def train_all(
    jobs: Sequence[Job], options: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """Trains missing runs; returns records in the order of the jobs.

    Raises:
        SystemExit: not all runs have finished.
    """
    runs = [planned(job) for job in jobs]
    refuse_stale(runs, options.folder, remedy="or remove it")
    with progress_of(runs, console) as watch:
        states = run_all(
            runs,
            at_once=options.jobs,
            scoring=scoring,
            command=command,
            on_change=watch.on_change,
            on_end=watch.on_end,
        )
    if left := sum(state.state != "finished" for state in states):
        raise SystemExit(
            f"{left} of {len(states)} runs have not finished; the same command goes on with them"
        )
    return [record_of(job) for job in jobs]


def table(findings: Sequence[Finding]) -> Table:
    """Returns one line per finding, in 80 columns."""
    found = Table(
        "claim",
        "figure",
        "mean",
        "min … max",
        "holds if",
        "verdict",
        title="claims on toys, spread over seeds",
    )
    for finding in findings:
        mean, least, most = fmean(finding.values), min(finding.values), max(finding.values)
        found.add_row(
            finding.claim,
            finding.figure,
            f"{mean:.3g}",
            f"{least:.3g} … {most:.3g}",
            f"{finding.side} {finding.bound:g}",
            finding.verdict,
        )
    return found


def explain(findings: Sequence[Finding], console: Console) -> None:
    """Prints each claim, its figure by seed, and the means behind it."""
    for finding in findings:
        console.print(
            f"[bold]{finding.claim}[/bold] {finding.says}: {finding.verdict}\n"
            f"     {finding.figure}, by seed: {by_seed(finding.values)}\n     {finding.detail}"
        )


def compact(figures: dict[str, Any]) -> str:
    """Writes JSON for people and git: one run per line, curves to five decimals."""
    runs = [json.dumps(_rounded(record), allow_nan=False) for record in figures["runs"]]
    rest = json.dumps(
        {name: value for name, value in figures.items() if name != "runs"},
        indent=1,
        allow_nan=False,
    )
    return rest[: rest.rindex("\n}")] + ',\n "runs": [\n  ' + ",\n  ".join(runs) + "\n ]\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _numbers(value: Any) -> Any:
    """Converts words written by `_rounded` back to numbers."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    return [_numbers(entry) for entry in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
