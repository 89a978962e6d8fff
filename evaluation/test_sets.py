"""A finished run on test sets: its own, or others, with as many depth steps as one likes.

A model whose layers are shared may apply its group more often, or less, than it was trained to: the
weights are the same. So a task can be asked at two or three times the length with more loops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data_pipeline.data_config import DataConfig, TestSet
from ..distributed.process.process import start_process
from ..train.config.run_config import Config, ConfigError
from ..train.exact_match import ExactMatch, score_test_sets
from .restore import restore


@dataclass(frozen=True)
class TestSetReport:
    """Holds what a checkpoint scores on test sets, by their names."""

    __test__ = False  # for pytest, which takes the name for a class of tests

    step: int
    depth_steps: int
    trained_depth_steps: int
    scores: dict[str, ExactMatch]


def measure_test_sets(
    run_dir: Path,
    *,
    step: int | None = None,
    inputs: Mapping[str, Sequence[str]] | None = None,
    depth_steps: int | None = None,
) -> TestSetReport:
    """Scores a checkpoint on test sets by exact match.

    Args:
        run_dir: the run folder.
        step: of the checkpoint; None: the newest.
        inputs: test sets by name, each the names of its inputs; None: those of the run.
        depth_steps: how many; None: as trained.

    Raises:
        ConfigError: there are no test sets, or the model cannot have so many depth steps.
        ValueError: the run, its checkpoint or a test set cannot be read.
    """
    with start_process("auto") as process:
        restored = restore(run_dir, process, step=step, depth_steps=depth_steps)
        config = restored.config
        if inputs is not None:
            sets = tuple(TestSet(name=name, input=tuple(given)) for name, given in inputs.items())
            plain = config.data.model_dump() | {"test_sets": sets}
            config = config.model_copy(update={"data": DataConfig.model_validate(plain)})
        if not config.data.test_sets:
            raise ConfigError(
                f"{run_dir}: has no test sets (data.test_sets); name some with --test-set NAME=INPUT"
            )
        scores = score_test_sets(restored.model, config, process)
        restored.model.eval()
        trained = Config.load(run_dir / "config.json").model.num_layers
    return TestSetReport(restored.step, config.model.num_layers, trained, scores)
