"""Defines the small job of a chaos run: four ranks that train while their data is tokenized slowly."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from moebius.distributed.checkpoint.format import list_checkpoints
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import RECIPES
from tests.tiny_job import (
    SLOW_READING,
    TINY_DATA,
    TINY_TRAINING,
    write_jsonl_files,
    write_slow_filter,
)

STEPS_PER_MINUTE = 20  # two quiet cores make many more: the ranks wait for data
FILES_PER_MINUTE = 34  # just what the steps need
DOCUMENTS = 2  # of each file
CPUS_PER_NODE = 2  # one is a rank's, the other tokenises
SETTINGS = (
    *TINY_DATA,
    *SLOW_READING,
    *TINY_TRAINING,
    "model.num_layers=2",
    "prepare.split_bytes=500",  # so that each of many files is a task of its own
    "train.micro_batch=1",
    "train.timeout_s=60",
    "checkpoint.every=10",
    "checkpoint.keep_last=3",
    "job.ranks_per_node=1",
    "job.max_restarts=1000",
    "job.max_node_losses=1000",
    "job.limits.step_s=10",
)


def write_texts(folder: Path, minutes: float) -> None:
    """Writes the texts and a slow filter, both importable by the job's processes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_slow_filter(folder)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    write_jsonl_files(folder, files=_number_of_files(minutes), documents=DOCUMENTS, words=16)


def slowness(minutes: float, nodes: int) -> float:
    """Returns the time per document that makes tokenizing last as long as the injections."""
    documents = _number_of_files(minutes) * DOCUMENTS
    workers = nodes * (CPUS_PER_NODE - 1)
    return round(1.1 * minutes * 60 * workers / documents, 2)


def _number_of_files(minutes: float) -> int:
    return max(4, round(minutes * FILES_PER_MINUTE))


def changes(folder: Path, data: str, *, minutes: float, nodes: int) -> list[str]:
    """Returns the overrides of the recipe smoke, with data that is prepared in `data`."""
    ep = 2 if nodes % 2 == 0 else 1
    return [
        *SETTINGS,
        f"prepare.input=['{folder}/texts/*.jsonl']",
        f"data.directory={folder / data}",
        f"train.steps={max(20, round(minutes * STEPS_PER_MINUTE))}",
        f"job.num_nodes={nodes}",
        f"mesh.ep={ep}",
        f"mesh.dp_replicate={nodes // ep}",
    ]


def configure(overrides: list[str]) -> Config:
    """Returns the configuration with these overrides."""
    return resolve("smoke", overrides, RECIPES)


def weights_hash(run_dir: Path) -> str:
    """Returns the SHA-256 of all tensors in the last checkpoint, including the optimizer's."""
    found = hashlib.sha256()
    for file in sorted(list_checkpoints(run_dir / "checkpoints")[-1].path.glob("*.distcp")):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def data_hash(data: Path) -> str:
    """Returns the SHA-256 of a prepared folder, without its report."""
    found = hashlib.sha256()
    files = sorted(path for path in data.rglob("*") if path.is_file())
    for file in files:
        if not file.name.startswith("report"):
            found.update(str(file.relative_to(data)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def curve(run_dir: Path) -> dict[int, tuple[Any, float]]:
    """Returns the sample digest and loss of each step; the last line of a step counts."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    train = [line for line in map(_decode, lines) if line.get("kind") == "train"]
    return {line["step"]: (line["digest"], line["loss"]) for line in train}


def _decode(line: str) -> dict[str, Any]:
    """Decodes a line; one that a kill tore is empty."""
    try:
        return json.loads(line)
    except ValueError:
        return {}
