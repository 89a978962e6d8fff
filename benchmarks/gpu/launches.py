"""How many kernels a training step launches, by what it does. On a machine without a GPU.

    python -m benchmarks.gpu.launches [--recipes moeut_244m dense_244m] [--name gpu_launches]

One micro-batch of 16 × 1024 tokens in bfloat16 on one GPU, forward, backward, clipping and AdamW,
traced with tensors that have no values on a device that is not there (traced/). Every operation of
torch's counts as one kernel, but views and allocations, and so does every launch of Triton's; an
operation that torch makes of several (a sort, attention's backward, `_foreach_` of many tensors) is
undercounted, for both models alike. Attention counts as torch's fused kernel.

What the host needs for it is no measurement: the launches times what `moebius plan` takes one for
(`launch_s` in planning/hardware.py, which says where it is from). Beside the count stands that of the
planner's list of kernels. Writes results/gpu_launches.json, in a minute.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.traced.device import reason_against, run_module
from benchmarks.report import save
from benchmarks.step_operations import part_of
from moebius.planning.hardware import HARDWARE
from moebius.planning.kernel import Shape
from moebius.planning.kernel_times import step_kernels, why_unknown
from moebius.planning.rank_kernels import kernel_launches
from moebius.train.config.run_config import Config, resolve
from moebius.train.recipes.smoke import RECIPES

HARDWARE_NAME = "h200"
CHANGES = (
    *("train.micro_batch=16", "train.global_batch=16", "mesh.ep=1", "mesh.dp_replicate=none"),
    *("train.precision=bfloat16", "data.directory=unused"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", nargs="+", default=["moeut_244m", "dense_244m"])
    parser.add_argument("--set", nargs="+", default=[], help="changes of the configuration")
    parser.add_argument("--name", default="gpu_launches", help="of the file in results/")
    options = parser.parse_args()
    if reason := reason_against():
        raise SystemExit(f"nothing can be traced here: {reason}")
    found = count(options.recipes, options.set)
    show(found)
    print(save(options.name, {"recipes": found, "changes": [*CHANGES, *options.set]}))


def count(recipes: Sequence[str], changes: Sequence[str]) -> dict[str, Any]:
    """The launches of every recipe: in all, by part of the step, and by name."""
    cases = [
        {
            "name": recipe,
            "config": resolve(recipe, [*CHANGES, *changes], RECIPES).model_dump(mode="json"),
            "evaluate": False,
        }
        for recipe in recipes
    ]
    printed = run_module("benchmarks.gpu.traced.step", [], given=json.dumps(cases))
    traces = {traced["name"]: traced["step"] for traced in map(json.loads, printed.splitlines())}
    models = {case["name"]: Config.model_validate(case["config"]) for case in cases}
    return {
        name: {"launches_planned": planned(models[name])} | figures(traced)
        for name, traced in traces.items()
    }


def planned(config: Config) -> float | None:
    """The launches of the planner's list of kernels, without the optimizer's; None: it has no list."""
    if why_unknown(config.model) is not None:
        return None
    seq_len = config.data.seq_len
    shape = Shape(config.model, config.train.micro_batch * seq_len, seq_len, config.train.precision)
    return round(kernel_launches(step_kernels(HARDWARE[HARDWARE_NAME], shape)), 1)


def figures(traced: dict[str, Any]) -> dict[str, Any]:
    """Sums of one trace."""
    by_part: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for name, where, number in traced["launches"]:
        by_name[name] += number
        by_part["backward of torch's operations" if not where else part_of(where)] += number
    total = by_name.total()
    return {
        "launches": total,
        "host_ms_predicted": round(1e3 * total * HARDWARE[HARDWARE_NAME].launch_s, 1),
        "host_reads": sum(number for *_, number in traced["reads"]),
        "by_part": dict(by_part.most_common()),
        "by_name": dict(by_name.most_common()),
    }


def show(found: dict[str, Any]) -> None:
    """Prints the launches by part, and the names with the most of them."""
    console = Console(width=110)
    table = Table("part", *found, title="kernels launched by one step of one micro-batch")
    for part in dict.fromkeys(part for one in found.values() for part in one["by_part"]):
        table.add_row(part, *(str(one["by_part"].get(part, 0)) for one in found.values()))
    table.add_section()
    table.add_row("all", *(str(one["launches"]) for one in found.values()))
    table.add_row(
        "in the planner's list", *(f"{one['launches_planned'] or 0:g}" for one in found.values())
    )
    table.add_row("host, predicted, ms", *(str(one["host_ms_predicted"]) for one in found.values()))
    console.print(table)
    for recipe, one in found.items():
        names = ", ".join(f"{name} {number}" for name, number in [*one["by_name"].items()][:24])
        console.print(f"[bold]{recipe}[/bold]: {names}")


if __name__ == "__main__":
    main()
