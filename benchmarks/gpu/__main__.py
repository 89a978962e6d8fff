"""Everything that wants a GPU, in one call of less than ten minutes: ceilings, tests, tuning, the
layer of experts, whole steps.

    pip install --no-deps --no-build-isolation -e . && python -m benchmarks.gpu --out FOLDER

Made for a machine with one H100 or H200, torch ≥ 2.11 and Triton ≥ 3.6, and no network. Every part
is a process of its own with a time limit, and figures are written as they come, so a part that
fails or hangs costs the others nothing. Into FOLDER go gpu_ceilings.json, tune_tiles.json and the
triton_tiles.py that follows from it, gpu_kernels.json, expert_layer_gpu.json and .png, step_gpu.json and .png, and
gpu_log.txt: all that the parts said, and how each ended. The parts after the tuning run with its
tiles. Last come short tables: kernels, layers and steps, measured beside what the roofline model
predicts of them for this GPU (predicted.py), and beside what was expected by arithmetic
(results/expert_layer_gpu_expected.json).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.kernel_times import kernel_table
from benchmarks.gpu.predicted import predicted_ms, step_prediction
from benchmarks.kernels.problem import GPU_SETTINGS
from benchmarks.report import RESULTS, ROOT
from moebius.planning.hardware import Hardware, hardware_of_gpu
from moebius.train.recipes.smoke import RECIPES

EXPECTED = RESULTS / "expert_layer_gpu_expected.json"
LEAST_S = 30.0  # a part is not begun with less
TIME = "{seconds}"  # in a command: the seconds that the part may plan with
TO_END_S = 20.0  # between these and its limit


@dataclass(frozen=True)
class Part:
    """A command and how long it may take."""

    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Ended:
    """How a part ended."""

    name: str
    state: str  # "ok", "exit code 3", "stopped after 60 s", "not begun: …"
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--parts", nargs="+", help="by name; default: all")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: this script times nothing else")
    options.out = options.out.resolve()  # parts run in the project's folder
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=140)
    with (options.out / "gpu_log.txt").open("w", encoding="utf-8") as log:
        ended = run_all(chosen(parts(options.out), options.parts), options.seconds, log, console)
        log.write(f"\n===== {json.dumps([asdict(part) for part in ended])}\n")
    summary(console, ended, options.out)
    raise SystemExit(0 if all(part.state == "ok" for part in ended) else 1)


def parts(out: Path) -> list[Part]:
    """In the order in which they are run: what is slow is timed with what was tuned before."""
    python = sys.executable

    def script(name: str, *words: str) -> tuple[str, ...]:
        return (python, "-m", f"benchmarks.{name}", *words, "--out", str(out))

    return [
        Part("ceilings", script("gpu.ceilings"), 50),
        Part("tests", script("gpu.parallel_tests", "--seconds", TIME), 110),
        Part("tuning", script("gpu.tune_tiles", "--seconds", TIME), 95),
        Part("kernels", script("gpu.kernel_times"), 45),
        Part(
            "expert layer", script("kernels.expert_layer", "--device", "cuda", "--limit", TIME), 125
        ),
        Part("whole step", script("step", "--device", "cuda", "--limit", TIME), 200),
    ]


def chosen(every: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    unknown = set(names or ()) - {part.name for part in every}
    if unknown:
        raise SystemExit(
            f"no part {', '.join(sorted(unknown))}: choose from "
            f"{', '.join(part.name for part in every)}"
        )
    return [part for part in every if not names or part.name in names]


def run_all(every: Sequence[Part], seconds: float, log: TextIO, console: Console) -> list[Ended]:
    """One part after the other, each within its own limit and what is left of the whole."""
    deadline, ended = time.monotonic() + seconds, []
    for part in every:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            ended.append(Ended(part.name, f"not begun: {max(left, 0):.0f} s were left", 0.0))
        else:
            ended.append(run_part(part, min(part.limit_s, left), log))
        console.print(f"{ended[-1].name}: {ended[-1].state} ({ended[-1].seconds:.0f} s)")
    return ended


def run_part(part: Part, limit_s: float, log: TextIO) -> Ended:
    """Runs a part in a group of processes of its own, which ends with it whatever happens."""
    command = [f"{limit_s - TO_END_S:.0f}" if word == TIME else word for word in part.command]
    log.write(f"\n===== {part.name}: {' '.join(command)}\n")
    log.flush()
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(timeout=limit_s)
        state = "ok" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        state = f"stopped after {limit_s:.0f} s"
    finally:
        end_group(process)
    return Ended(part.name, state, time.monotonic() - started)


def end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them have ended
    process.wait()


# The table at the end -----------------------------------------------------------------------------


def summary(console: Console, ended: Sequence[Ended], out: Path) -> None:
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    console.print(f"[bold]{torch.cuda.get_device_name(0)}[/bold], torch {torch.__version__}")
    for name, value in (load(out / "gpu_ceilings.json") or {}).get("ceilings", {}).items():
        if not name.endswith(("columns", "warps")):
            console.print(f"  {name}: {value:,.4g}")
    hardware = hardware_of_gpu(torch.cuda.get_device_name(0))
    kernels = load(out / "gpu_kernels.json")
    if kernels is not None:
        console.print(kernel_table(kernels))
    layers = load(out / "expert_layer_gpu.json")
    if layers is not None:
        console.print(layer_table(layers, expected, hardware))
    steps = load(out / "step_gpu.json")
    if steps is not None:
        console.print(step_table(steps, expected["goals"]["step_244m_ratio"], hardware))
    console.print("; ".join(f"{part.name}: {part.state}" for part in ended))
    console.print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


def load(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def layer_table(
    figures: dict[str, Any], expected: dict[str, Any], hardware: Hardware | None = None
) -> Table:
    """Fastest milliseconds under skewed routing: everybody in setting 244M and bfloat16, ours and
    dense layers elsewhere.
    """
    table = Table(
        "",
        "setting",
        "dtype",
        "ms",
        "expected ms",
        "predicted ms",
        "measured ÷ predicted",
        "of ceiling",
        "saved ÷ ideal",
        "error",
        title=f"a layer of experts; goal: feed-forward ≤ {expected['goals']['feed_forward_ms']} ms, "
        f"× best peer ≥ {expected['goals']['times_the_best_peer']}",
    )
    for entry in figures["entries"]:
        cells = [cell for cell in entry["cells"] if cell["skew"] > 0]
        expectable = (entry["setting"], entry["dtype"]) == ("244M", "bfloat16")
        if not expectable and (entry["role"] == "peer" or not cells):
            continue
        wanted = expected["expected_ms"].get(entry["name"]) if expectable else None
        predicted = _layer_ms(hardware, entry)
        time_text = (
            f"{cells[0]['fastest_ms']:.3f}" if cells else (entry["why_not"] or "not reached")[:40]
        )
        table.add_row(
            entry["name"],
            entry["setting"],
            entry["dtype"],
            time_text,
            range_text(wanted),
            "" if predicted is None else f"{predicted:.3f}",
            f"{cells[0]['fastest_ms'] / predicted:.2f}" if predicted and cells else "",
            f"{cells[0]['of_ceiling']:.2f}" if cells else "",
            "" if entry["saved_over_ideal"] is None else f"{1 + entry['saved_over_ideal']:.2f}",
            "" if entry["error"] is None else f"{entry['error']:.0e}",
        )
    return table


def _layer_ms(hardware: Hardware | None, entry: dict[str, Any]) -> float | None:
    """What the model predicts for a contender's layer; None: it knows the GPU or the contender not."""
    settings = {setting.name: setting for setting in GPU_SETTINGS}
    if hardware is None or entry["setting"] not in settings:
        return None
    return predicted_ms(hardware, settings[entry["setting"]], entry["name"], entry["dtype"])


def range_text(wanted: dict[str, Any] | None) -> str:
    if wanted is None:
        return ""
    if wanted["high"] is None:
        return f"≥ {wanted['low']:g}"
    return (
        f"{wanted['low']:g}"
        if wanted["low"] == wanted["high"]
        else f"{wanted['low']:g} to {wanted['high']:g}"
    )


def step_table(figures: dict[str, Any], goal: float, hardware: Hardware | None = None) -> Table:
    """Measured milliseconds, those predicted, and what one is of the other: MoEUT's, the dense
    model's.
    """
    heads = ("step", "MoEUT ms", "dense ms", "ratio", "goal", "tokens/s", "best")
    table = Table(*heads, "predicted ms", "measured ÷ predicted")
    for case in figures["cases"]:
        name = f"{case['size']} {case['precision']}"
        if "ratio" not in case:
            table.add_row(name, case["why_not"].strip().splitlines()[-1][:60])
            continue
        best = case["sides"]["moeut"]["best"]
        table.add_row(
            name,
            *(f"{case['seconds'][side] * 1e3:.1f}" for side in ("moeut", "dense")),
            f"{case['ratio']:.2f}",
            f"≤ {goal:g}" if case["size"] == "244m" else "",
            f"{case['tokens_per_s']['moeut']:,.0f}",
            f"{best['backend']}{', compiled' * best['compiled']}",
            *_step_cells(case, hardware),
        )
    return table


def _step_cells(case: dict[str, Any], hardware: Hardware | None) -> tuple[str, str]:
    if hardware is None:
        return "", ""
    found = {
        side: step_prediction(
            hardware,
            RECIPES[f"{side}_{case['size']}"]().model,
            tokens=case["seq_len"] * case["batch"],
            seq_len=case["seq_len"],
            precision=case["precision"],
        ).seconds
        for side in ("moeut", "dense")
    }
    ratios = (case["seconds"][side] / found[side] for side in found)
    return (
        ", ".join(f"{1e3 * seconds:.1f}" for seconds in found.values()),
        ", ".join(f"{ratio:.2f}" for ratio in ratios),
    )


if __name__ == "__main__":
    main()
