"""Compares a training step with Muon, or with an average of the weights, to a plain one with AdamW.

    python -m benchmarks.muon [--recipe moeut_44m] [--sequences 8] [--seq-len 1024] [--rounds 8]
    python -m benchmarks.muon --arm ema       (train.average=ema; also: last)

Both optimizers' runs are built in the same processes and take turns, a step each, so that a machine's drift affects
both. It reports the slowest rank's time, the ratio of the two in the same round (median and quartiles), and the bytes
that a rank sends in Muon's own exchanges in a step, beside its all-reduced gradients. `--sequences` are over all ranks:
the published batch of MoEUT-44M is 64 of 1,024 tokens, so its ratio is smaller. Goal: at most 1.10, and 1.02 for an
average. Writes results/muon.json, or step_with_ema.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.expert_parallel import Turn, random_batch, ratio, shared_groups, spelled, take_turn
from benchmarks.report import ROOT, save
from moebius.data_pipeline.read.loader import Batch
from moebius.distributed.process.process import Process, start_process
from moebius.train.config.resolve import resolve
from moebius.train.recipes.smoke import RECIPES
from moebius.train.run import Run, assemble

LAYOUTS = {  # ranks and keys of the mesh
    "1 rank": (1, []),
    "4 ranks": (4, []),
    "EP 4": (4, ["mesh.ep=4"]),
    "FSDP 4": (4, ["mesh.dp_shard=4", "mesh.sharding=fsdp"]),
    "EP 2, FSDP 4": (4, ["mesh.ep=2", "mesh.dp_shard=4", "mesh.sharding=fsdp"]),
}
PLAIN = "adamw"
ARMS = {  # keys, and the goal beside AdamW
    PLAIN: (["optim.kind=adamw"], 1.0),
    "muon": (["optim.kind=muon"], 1.10),
    "ema": (["optim.kind=adamw", "train.average=ema"], 1.02),
    "last": (["optim.kind=adamw", "train.average=last"], 1.02),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="moeut_44m")
    parser.add_argument("--sequences", type=int, default=8, help="of a step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8, help="2 at least")
    parser.add_argument("--arm", choices=[*ARMS][1:], default="muon")
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS], default=[*LAYOUTS])
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_out is not None:
        return run_rank(options)
    figures: dict[str, Any] = {
        key: getattr(options, key) for key in ("recipe", "sequences", "seq_len", "rounds")
    } | {"load_average_before": os.getloadavg(), "goal": ARMS[options.arm][1], "layouts": {}}
    arm, out = options.arm, "muon" if options.arm == "muon" else f"step_with_{options.arm}"
    table = Table(*("layout", f"{PLAIN}, s", f"{arm}, s", f"{arm} ÷ {PLAIN}", "MB a rank sends"))
    for name in options.layouts:
        found = figures["layouts"][name] = launch(name, options)
        sent = f"{found['bytes_sent'] / 1e6:.1f}"
        seconds = [f"{found[kind]:.3f}" for kind in (PLAIN, arm)]
        table.add_row(name, *seconds, spelled(found["ratio"]), sent)
        save(out, figures)  # as figures come
    Console(width=110).print(table)


def launch(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of a layout."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={LAYOUTS[name][0]}", "-m", "benchmarks.muon", "--rank-of", name),
            *("--arm", options.arm, "--recipe", options.recipe),
            *("--sequences", str(options.sequences)),
            *("--seq-len", str(options.seq_len), "--rounds", str(options.rounds)),
            *("--rank-out", str(out)),
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL, cwd=ROOT)
        return json.loads(out.read_text())


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    kinds = (PLAIN, options.arm)
    with start_process("cpu", timeout_s=600) as process:
        with shared_groups():
            runs = {kind: build_run(kind, options, process) for kind in kinds}
        turns: dict[str, list[Turn]] = {kind: [] for kind in kinds}
        for number in range(1 + options.rounds):  # the first warms up
            for kind in kinds[:: 1 if number % 2 else -1]:
                turn = take_turn(*runs[kind], 1)
                if number:
                    turns[kind].append(turn)
        pairs = zip(turns[options.arm], turns[PLAIN], strict=True)
        found = {
            **{
                kind: sorted(turn.wall_s for turn in turns[kind])[len(turns[kind]) // 2]
                for kind in kinds
            },
            "ratio": ratio([one.wall_s / other.wall_s for one, other in pairs]),
            "bytes_sent": bytes_sent(runs[options.arm][0]),
            "turns": {kind: [asdict(turn) for turn in turns[kind]] for kind in kinds},
        }
        if process.rank == 0:
            options.rank_out.write_text(json.dumps(found))


def build_run(kind: str, options: argparse.Namespace, process: Process) -> tuple[Run, Batch]:
    """Builds a run without data, and one batch (one micro-batch per rank) for all its steps."""
    own = options.sequences // process.world_size
    changes = [
        *("mesh.ep=1", "mesh.dp_replicate=none"),
        *LAYOUTS[options.rank_of][1],
        *ARMS[kind][0],
        *(f"data.seq_len={options.seq_len}", "train.precision=float32"),
        *(f"train.micro_batch={own}", f"train.global_batch={own * process.world_size}"),
    ]
    config = resolve(options.recipe, changes, RECIPES)
    folder = options.rank_out.parent / kind
    folder.mkdir(exist_ok=True)
    return assemble(config, folder, process), random_batch(config, process.rank)


def bytes_sent(run: Run) -> float:
    """Returns the bytes that the average rank sends in one step of the optimizer. Collective."""
    with counted() as sent:
        run.optimizer.step()
    total = torch.tensor(float(sum(sent)), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / run.process.world_size


@contextmanager
def counted() -> Iterator[list[int]]:
    """Collects the bytes that every exchange sends from here to other ranks."""
    sent: list[int] = []
    exchange, broadcast = dist.all_to_all_single, dist.broadcast

    def counted_exchange(out: torch.Tensor, given: torch.Tensor, *args: Any, **options: Any) -> Any:
        kept = args[1][options["group"].rank()]  # what stays here
        sent.append((given.numel() - kept) * given.element_size())
        return exchange(out, given, *args, **options)

    def counted_broadcast(tensor: torch.Tensor, **options: Any) -> Any:
        group = options["group"]
        if options["group_src"] == group.rank():
            sent.append(tensor.nbytes * (group.size() - 1))
        return broadcast(tensor, **options)

    dist.all_to_all_single, dist.broadcast = counted_exchange, counted_broadcast
    try:
        yield sent
    finally:
        dist.all_to_all_single, dist.broadcast = exchange, broadcast


if __name__ == "__main__":
    main()
