"""A comparison of two tiny arms, for tests: its file, its arms and its runs."""

from collections.abc import Sequence
from pathlib import Path

from moebius.train.recipes.smoke import RECIPES
from moebius_science.compare.file import ComparisonFile, read_file
from moebius_science.compare.plan import Arm, PlannedRun, plan_arms, plan_runs

TINY = """
name = "tiny"
baseline = "moeut"
seeds = [0, 1, 2]
scaled = "model.feed_forward.num_experts"
tolerance = 0.05
steps = 6
evaluations = 2
jobs = 2

[common.model]
vocab_size = 257
d_model = 16
num_layers = 2
attention.num_heads = 2
attention.d_head = 8
feed_forward.d_expert = 8
feed_forward.router.top_k = 2

[common.data]
seq_len = 32

[common.prepare]
tokenizer = "bytes"
vocab_size = 257
validation_fraction = 0.2

[common.train]
global_batch = 4
micro_batch = 4
log_every = 1
eval_rows = 8

[common.checkpoint]
every = 2
keep_last = 1

[arms.moeut]
recipe = "moeut"
label = "MoEUT"

[arms.single]
recipe = "moeut_g1"
"""


def write_comparison(place: Path, text: str = TINY) -> Path:
    """The file in a folder, and the text that it trains on."""
    file = place / "tiny.toml"
    file.write_text(text, encoding="utf-8")
    return file


def planned(
    place: Path, text: str = TINY, overrides: Sequence[str] = ()
) -> tuple[ComparisonFile, list[Arm], list[PlannedRun]]:
    """What `moebius compare` plans of a file."""
    file = read_file(write_comparison(place, text))
    arms = plan_arms(file, overrides, RECIPES, data_root=place / "data", origin="tiny.toml")
    return file, arms, plan_runs(file, arms, place / "runs")
