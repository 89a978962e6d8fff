"""The tiny job of tests that start `moebius train` or `submit`: settings, texts, the command.

Settings are overrides of the recipe smoke; later ones win.
"""

import json
import sys
from pathlib import Path

import numpy as np

MOEBIUS = (sys.executable, "-c", "from moebius.cli.main import main; main()")

TINY_DATA = (
    "model.vocab_size=257",
    "prepare.tokenizer=bytes",
    "prepare.vocab_size=257",
    "data.seq_len=32",
    "prepare.validation_fraction=0.1",
)
TINY_MODEL = (
    "model.d_model=32",
    "model.attention.d_head=8",
    "model.feed_forward.num_experts=8",
    "model.feed_forward.router.top_k=2",
    "model.feed_forward.d_expert=16",
)
TINY_TRAINING = (
    "train.log_every=1",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.eval_every=0",
    "train.eval_rows=8",
    "optim.warmup_steps=4",
    "job.rehearse_failure_at_step=none",
)
TINY_JOB = (*TINY_DATA, *TINY_MODEL, *TINY_TRAINING)

# Reading a document takes SLOW_S seconds of the environment; see `write_slow_filter`.
SLOW_READING = (
    "prepare.segment_tokens=2000",
    "prepare.filters=['slow_filter:keep']",
)
_SLOW_FILTER = """
import os, time
def keep(text):
    time.sleep(float(os.environ.get("SLOW_S", "0")))
"""
_WORDS = ("one", "two", "three", "band", "expert", "route")


def write_paragraphs(folder: Path, *, paragraphs: int) -> Path:
    """Writes text.txt into a folder: deterministic paragraphs of 60 words."""
    words = np.random.default_rng(1).choice(_WORDS, size=(paragraphs, 60))
    file = folder / "text.txt"
    file.write_text("\n\n".join(" ".join(line) for line in words), encoding="utf-8")
    return file


def write_jsonl_files(folder: Path, *, files: int, documents: int, words: int) -> None:
    """Writes texts/0000.jsonl … into a folder: deterministic documents of so many words."""
    rng = np.random.default_rng(3)
    (folder / "texts").mkdir()
    for number in range(files):
        lines = [
            json.dumps({"text": " ".join(rng.choice(_WORDS, words)) + f" {number} {line}"})
            for line in range(documents)
        ]
        (folder / "texts" / f"{number:04}.jsonl").write_text("\n".join(lines) + "\n")


def write_slow_filter(folder: Path) -> None:
    """Writes the filter of `SLOW_READING`; its folder must be on Python's path."""
    (folder / "slow_filter.py").write_text(_SLOW_FILTER)
