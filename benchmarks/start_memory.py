"""Measures the memory of ranks that start from a published folder (`--from`).

    python -m benchmarks.start_memory [--gib 2] [--ranks 4]

It generates a folder of Qwen3-MoE's family in float32, a file for each layer, and starts a run from
it with EP over all ranks, in float32 on CPUs. Goal for every rank: what it needed to build and load
its part of the model, on top of an empty process that has imported everything, is at most its
parameters plus twice the largest tensor. Exits with 1 if a rank misses it. Writes
results/start_memory.json, or the given name; takes about 2 minutes on 2 cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.memory import peak_bytes
from benchmarks.report import ROOT, save
from moebius.distributed.local_shard import local_tensor
from moebius.distributed.process.process import start_process
from moebius.model.config.model_config import ModelConfig
from moebius.train.config.run_config import Config
from moebius.train.families.start import start_from
from moebius.train.families.table import FAMILY, pieces_of
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run
from moebius.train.run import Run, assemble, resume

FAMILY_NAME = "qwen3_moe"
_SIZES = {
    "d_model": 1024,
    "attention.num_heads": 16,
    "attention.num_kv_heads": 4,
    "attention.d_head": 64,
    "attention.positions.width": 64,
    "feed_forward.num_experts": 64,
    "feed_forward.d_expert": 512,
    "feed_forward.router.top_k": 4,
    "vocab_size": 32_000,
}
_LAYER_GIB = 64 * 3 * 1024 * 512 * 4 / 2**30  # of experts
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.0, help="size of the folder, about")
    parser.add_argument("--ranks", type=int, default=4, choices=(1, 2, 4, 8))
    parser.add_argument("--name", default="start_memory", help="of the file in results/")
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_dir is not None:
        run_rank(options.run_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), max(1, round(options.gib / _LAYER_GIB)), options.ranks)
    for rank, found in enumerate(figures["by_rank"]):
        words = {name: f"{number / MIB:,.0f} MiB" for name, number in found.items() if number > 1e5}
        print(f"rank {rank}: {words}")
    print(f"written: {save(options.name, figures)}")
    raise SystemExit(0 if figures["fits"] else 1)


def measure(root: Path, num_layers: int, ranks: int) -> dict[str, Any]:
    """Generates the folder, starts the ranks, and returns their figures."""
    sizes = _SIZES | {"num_layers": num_layers, "layers_per_group": num_layers}
    model = RECIPES[f"{FAMILY_NAME}_small"]().model.changed(sizes)
    folder, run_dir = root / "folder", root / "run"
    num_bytes, largest = publish(model, folder)
    overrides = (
        f"mesh.ep={ranks}",
        "train.micro_batch=1",
        "train.device=cpu",
        "prepare.input=none.txt",
    )
    start = start_from(
        str(folder), "own_text", [*overrides, "prepare.tokenizer=bytes", "prepare.vocab_size=257"]
    )
    open_run(start.config, run_dir, start.source)
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", "-m", "benchmarks.start_memory"),
            *("--run-dir", str(run_dir)),
        ],
        cwd=ROOT,
        check=True,
    )
    by_rank = [json.loads((run_dir / f"memory-{rank}.json").read_text()) for rank in range(ranks)]
    for found in by_rank:
        found["limit_bytes"] = found["share_bytes"] + 2 * largest
    return {
        "folder_bytes": num_bytes,
        "largest_tensor_bytes": largest,
        "ranks": ranks,
        "by_rank": by_rank,
        "fits": all(found["peak_bytes"] <= found["limit_bytes"] for found in by_rank),
    }


def publish(model: ModelConfig, folder: Path) -> tuple[int, int]:
    """Writes a folder, a file per layer; returns its bytes and those of our largest tensor."""
    folder.mkdir()
    files: dict[str, dict[str, torch.Tensor]] = {}
    sizes: dict[str, int] = {}
    for piece in pieces_of(FAMILY.get(FAMILY_NAME), model):
        number = piece.name.split(".")[1] if piece.name.startswith("group.") else "outer"
        sizes[piece.name] = sizes.get(piece.name, 0) + 4 * torch.Size(piece.shape).numel()
        files.setdefault(f"model-{number}.safetensors", {})[piece.key] = torch.empty(
            piece.shape, device="meta"
        )
    index: dict[str, str] = {}
    for name, tensors in files.items():
        drawn = {key: torch.rand(tensor.shape) for key, tensor in tensors.items()}
        save_file(drawn, folder / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = FAMILY.get(FAMILY_NAME).write(model, 4096) | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return sum(sizes.values()), max(sizes.values())


def run_rank(run_dir: Path) -> None:
    """Starts one rank from the folder, and writes what it needed."""
    config = Config.load(run_dir / "config.json")
    found: dict[str, Any] = {}
    with start_process("cpu", timeout_s=300) as process:
        built: list[Run] = []

        def build() -> None:
            built.append(assemble(config, run_dir, process))

        build_peak = peak_bytes(build, process.device)
        share = sum(local_tensor(parameter).nbytes for parameter in built[0].parameters)
        began = time.perf_counter()
        # loading needs this on top of what building left, the model itself
        load_peak = peak_bytes(lambda: resume(built[0]), process.device)
        assert build_peak is not None, "needs Linux, which tells a process its peak"
        assert load_peak is not None, "needs Linux, which tells a process its peak"
        found["load_s"] = round(time.perf_counter() - began, 2)
        found |= {"build_peak_bytes": build_peak, "load_peak_bytes": load_peak}
        found |= {"share_bytes": share, "peak_bytes": max(build_peak, share + load_peak)}
        (run_dir / f"memory-{process.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
