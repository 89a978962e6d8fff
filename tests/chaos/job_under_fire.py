"""The small job of a chaos run: four ranks that train while their data is tokenised slowly."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from moebius.distributed.checkpoint.files import list_checkpoints
from moebius.train.config import Config, resolve
from moebius.train.recipes.smoke import RECIPES

STEPS_PER_MINUTE = 100  # about what two quiet cores make, recoveries included
FILES_PER_MINUTE = 32
DOCUMENTS = 10  # of each file
SLOW_S = 0.6  # of reading a document: tokenising takes most of the run
SMALL = (
    "model.vocab_size=257",
    "data.tokenizer=bytes",
    "data.vocab_size=257",
    "data.seq_len=32",
    "data.era_tokens=2000",
    "data.validation_fraction=0.1",
    "data.language.function=slow_language:language",
    "data.language.allow=['en']",
    "train.log_every=1",
    "train.global_batch=8",
    "train.micro_batch=1",
    "train.eval_every=0",
    "train.eval_rows=8",
    "train.timeout_s=60",
    "checkpoint.every=10",
    "checkpoint.keep_last=3",
    "optim.warmup_steps=4",
    "job.ranks_per_node=1",
    "job.rehearse_failure_at_step=none",
    "job.max_restarts=1000",
    "job.max_node_losses=1000",
)
_SLOW_LANGUAGE = """
import os, time
def language(text):
    time.sleep(float(os.environ.get("SLOW_S", "0")))
    return "en"
"""


def write_texts(folder: Path, minutes: float) -> None:
    """Writes the texts, and the rule that makes reading them slow; both are importable below."""
    (folder / "texts").mkdir(parents=True)
    (folder / "slow_language.py").write_text(_SLOW_LANGUAGE)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    rng = np.random.default_rng(3)
    words = ["one", "two", "three", "band", "expert", "route"]
    for number in range(max(4, round(minutes * FILES_PER_MINUTE))):
        lines = [
            json.dumps({"text": " ".join(rng.choice(words, 16)) + f" {number} {line}"})
            for line in range(DOCUMENTS)
        ]
        (folder / "texts" / f"{number:04}.jsonl").write_text("\n".join(lines) + "\n")


def changes(folder: Path, data: str, *, minutes: float, nodes: int) -> list[str]:
    """Returns the overrides of the recipe smoke, with data that is prepared in `data`."""
    ep = 2 if nodes % 2 == 0 else 1
    return [
        *SMALL,
        f"data.input=['{folder}/texts/*.jsonl']",
        f"data.directory={folder / data}",
        f"train.steps={max(20, round(minutes * STEPS_PER_MINUTE))}",
        f"job.num_nodes={nodes}",
        f"mesh.ep={ep}",
        f"mesh.dp_replicate={nodes // ep}",
    ]


def configure(overrides: list[str]) -> Config:
    """Returns the configuration."""
    return resolve("smoke", overrides, RECIPES)


def weights_hash(run_dir: Path) -> str:
    """Returns SHA-256 over all tensors of the last checkpoint, the optimizer's included."""
    found = hashlib.sha256()
    for file in sorted(list_checkpoints(run_dir / "checkpoints")[-1].path.glob("*.distcp")):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def data_hash(data: Path) -> str:
    """Returns SHA-256 over a prepared folder, all but its report."""
    found = hashlib.sha256()
    files = sorted(path for path in data.rglob("*") if path.is_file())
    for file in files:
        if not file.name.startswith("report"):
            found.update(str(file.relative_to(data)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def curve(run_dir: Path) -> dict[int, tuple[Any, float]]:
    """Returns digest of the samples and loss of each step; of a repeated step the last ones."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    train = [line for line in map(_decode, lines) if line.get("kind") == "train"]
    return {line["step"]: (line["digest"], line["loss"]) for line in train}


def _decode(line: str) -> dict[str, Any]:
    """A line that a kill tore apart is none."""
    try:
        return json.loads(line)
    except ValueError:
        return {}
