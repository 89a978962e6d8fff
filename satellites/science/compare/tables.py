"""Builds a comparison's tables as rows of text for terminal and Markdown, and writes its files.

`Table` is a title, a head and rows; the command line draws it with rich, `markdown` as text.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..files import write_whole
from .cost import Costs
from .environment import in_words
from .file import ComparisonFile
from .plan import Arm
from .results import SIDES, Results, as_values
from .statistics import Spread

_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Table:
    """Holds one table; columns are right-aligned except the first and those in `left`."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[int, ...] = (0,)


def short(number: float) -> str:
    """Formats a number with three digits and its unit: 1.84M."""
    for unit, letter in _UNITS:
        if abs(number) >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


def size_table(file: ComparisonFile, arms: Sequence[Arm]) -> Table:
    """Returns what is equal among the arms, and what is not."""
    equal = {
        "parameters": "equal parameters",
        "flops": "equal FLOPs of training",
        "none": "nothing is made equal",
    }[file.match]
    if file.match != "none":
        equal += f" within {file.tolerance:.2%}"
    whole_run = file.match == "flops" or len({arm.size.tokens for arm in arms}) > 1
    head = ["arm", "parameters", "active", "forward FLOPs/token", "tokens"]
    head += ["training FLOPs"] * whole_run + ["off", "scaled"]
    rows = []
    for arm in arms:
        size = arm.size
        row = [arm.label, f"{size.parameters.total:,}", short(size.parameters.active)]
        row += [short(size.flops.forward), short(size.tokens)]
        row += [short(size.training_flops)] * whole_run
        row.append("" if file.match == "none" else f"{arm.deviation:+.2%}")
        row.append(f"{arm.scaled.rpartition('.')[2]} {arm.value}" if arm.scaled else "")
        rows.append(tuple(row))
    return Table(f"{file.name}: {equal}", tuple(head), tuple(rows))


def loss_table(results: Results) -> Table:
    """Returns final validation losses over seeds, and task scores."""
    file = results.file
    tasks = sorted({task for arm in results.arms for task in arm.scores})
    head = ("arm", "runs", "validation loss", "min … max", "perplexity", *tasks)
    rows = tuple(
        (
            arm.arm.label,
            f"{len(arm.runs)}/{len(file.seeds)}",
            _with_deviation(arm.loss, "{:.4f}"),
            _range(arm.loss, "{:.4f}"),
            "" if arm.loss is None else f"{math.exp(min(arm.loss.mean, 700)):.2f}",
            *(_with_deviation(arm.scores.get(task), "{:.3f}") for task in tasks),
        )
        for arm in results.arms
    )
    return Table(f"{file.name}: {results.finished} of {results.planned} runs", head, rows)


def difference_table(results: Results) -> Table | None:
    """Returns differences of losses to the baseline, paired by seed; None if there are none."""
    file = results.file
    baseline = next(one.arm.label for one in results.arms if one.arm.name == file.baseline)
    published = any(entry.published.difference is not None for entry in file.arms.values())
    head = ["arm", "mean", "95 % interval", "by seed"] + ["published"] * published
    rows = []
    for arm in results.arms:
        if not arm.differences:
            continue
        by_seed = " ".join(f"{value:+.4f}" for value in arm.differences.values())
        row = [arm.arm.label, _with_deviation(arm.difference, "{:+.4f}")]
        row += [_interval(arm.interval), by_seed]
        reported = file.arms[arm.arm.name].published.difference
        row += ["" if reported is None else f"{reported:+.3g}"] * published
        rows.append(tuple(row))
    if not rows:
        return None
    title = f"validation loss − that of {baseline}, nats per token, paired by seed"
    return Table(title, tuple(head), tuple(rows), left=(0, 3))


def _with_deviation(found: Spread | None, form: str) -> str:
    if found is None:
        return ""
    mean = form.format(found.mean)
    return mean if found.count < 2 else f"{mean} ± {found.deviation:.4f}"


def _range(found: Spread | None, form: str) -> str:
    if found is None or found.count < 2:
        return ""
    return f"{form.format(found.least)} … {form.format(found.most)}"


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:+.4f} … {ends[1]:+.4f}"


def claim_table(results: Results) -> Table | None:
    """Returns the file's claims with their verdicts; None if it has none."""
    if not results.claims:
        return None
    rows = tuple(
        (
            judged.claim.says,
            f"{judged.claim.arm} − {judged.against} {SIDES[judged.claim.side]} {judged.claim.bound:g}",
            ", ".join(f"{value:+.4f}" for value in judged.values.values()),
            _interval(judged.interval),
            judged.claim.source,
            judged.verdict,
        )
        for judged in results.claims
    )
    head = ("claim", "holds if", "by seed", "95 % interval", "source", "verdict")
    return Table("claims", head, rows, left=(0, 1, 2, 3, 4, 5))


def cost_table(costs: Costs) -> Table:
    """Returns the time of a step, absolute and relative to the baseline's."""
    entries = costs.file.arms
    baseline = entries[costs.file.baseline].label or costs.file.baseline
    published = any(entry.published.time for entry in entries.values())
    head = ["arm", "ms/step", f"÷ {baseline}", "min … max"]
    head += ["published"] * published
    rows = []
    for cost in costs.arms:
        reported = entries[cost.arm.name].published
        row = [cost.arm.label, f"{cost.step_s.mean * 1e3:.0f}", f"{cost.time_ratio.mean:.2f}"]
        row.append(_range(cost.time_ratio, "{:.2f}"))
        row += [_number(reported.time)] * published
        rows.append(tuple(row))
    return Table(f"{costs.file.name}: what a step costs", tuple(head), tuple(rows))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def how_measured(costs: Costs) -> str:
    """Returns the number of measurements, their length, and whether the machine was quiet."""
    config = costs.arms[0].arm.config
    words = (
        f"{costs.rounds} rounds, the arms in turn, each in a process of its own: the median of "
        f"{costs.steps} steps of {config.train.global_batch} × {config.data.seq_len} tokens in "
        f"micro-batches of {config.train.micro_batch} sequences, {config.train.precision}, "
        f"{config.train.threads} thread(s); ratios are paired by round."
    )
    if not costs.was_quiet:
        words += (
            f" THE MACHINE WAS NOT QUIET: other processes took up to {costs.busy_cores:.1f} cores."
        )
    return words


def write_costs(costs: Costs, arms: Sequence[Arm], folder: Path) -> list[Path]:
    """Writes NAME_cost.md and NAME_cost.json."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{costs.file.name}_cost"
    sizes = size_table(costs.file, arms)
    parts = [f"# {costs.file.name}: cost", markdown(cost_table(costs)), how_measured(costs)]
    parts += [f"## {sizes.title}", markdown(sizes), in_words(costs.environment)]
    values = {
        "environment": costs.environment,
        "rounds": costs.rounds,
        "steps": costs.steps,
        "busy_cores": costs.busy_cores,
        "arms": [
            {
                "arm": cost.arm.name,
                "step_s": asdict(cost.step_s),
                "time_ratio": asdict(cost.time_ratio),
                "published": costs.file.arms[cost.arm.name].published.model_dump(),
            }
            for cost in costs.arms
        ],
    }
    return [
        _written(folder / f"{name}.md", ("\n\n".join(parts) + "\n").encode()),
        _written(folder / f"{name}.json", (json.dumps(values, indent=1) + "\n").encode()),
    ]


def result_tables(results: Results) -> list[Table]:
    """Returns losses, differences and claims, as far as available."""
    found = (loss_table(results), difference_table(results), claim_table(results))
    return [table for table in found if table is not None]


def markdown(table: Table) -> str:
    """Returns a table as GitHub's Markdown."""
    marks = ["---" if column in table.left else "---:" for column in range(len(table.head))]
    lines = [table.head, marks, *table.rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )


RULE = (
    "± is the standard deviation over seeds. Differences are paired: runs of one seed read the same "
    "data in the same order. Intervals are Student's t, widened so that all of a table cover their "
    "means with 95 %. A claim holds if its whole interval is on its side of the bound, does not hold "
    "if all of it is on the other, and is undecided otherwise; fewer than five seeds give no verdict."
)


def as_markdown(results: Results, arms: Sequence[Arm]) -> str:
    """Returns the whole report: question, sizes, results, claims, machine and code."""
    file = results.file
    parts = [f"# {file.name}"]
    if file.question:
        parts.append(file.question)
    for table in (*result_tables(results), size_table(file, arms)):
        parts += [f"## {table.title}", markdown(table)]
    parts.append(RULE)
    parts += [in_words(origin) for origin in results.origins]
    return "\n\n".join(parts) + "\n"


def write_results(results: Results, arms: Sequence[Arm], folder: Path) -> list[Path]:
    """Writes NAME.md, NAME.json and, once a run has finished, NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    name = results.file.name
    written = [
        _written(folder / f"{name}.md", as_markdown(results, arms).encode()),
        _written(folder / f"{name}.json", _json(results).encode()),
    ]
    if results.finished:
        from .picture import draw

        written.append(_written(folder / f"{name}.png", draw(results)))
    return written


def _json(results: Results) -> str:
    """Returns JSON for people and git, with every run on its own line."""
    values = as_values(results)
    runs = [json.dumps(run, allow_nan=False) for run in values.pop("runs")]
    rest = json.dumps(values, indent=1, allow_nan=False, ensure_ascii=False)
    return rest[: rest.rindex("\n}")] + ',\n "runs": [\n  ' + ",\n  ".join(runs) + "\n ]\n}\n"


def _written(path: Path, content: bytes) -> Path:
    write_whole(path, content)
    return path
