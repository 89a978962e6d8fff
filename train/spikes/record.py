"""The rollbacks of a run, in rollbacks.json of its run folder: what was left out, and why.

The file is written before a run goes back, so whatever happens then, a resumed run leaves out the
same samples, on any number of ranks. Every checkpoint's meta has the rollbacks up to it, so it can
be told from those that were saved on a way which the run has left.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from ...data_pipeline.read.skipped_samples import SkippedSamples

FILE = "rollbacks.json"


class Rollback(BaseModel):
    """One time that a run went back to an earlier checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    from_step: NonNegativeInt  # the last that was made before
    to_step: NonNegativeInt  # of the checkpoint
    first_sample: NonNegativeInt  # of those that are left out
    end_sample: NonNegativeInt
    why: str


_LIST = TypeAdapter(tuple[Rollback, ...])


def read_rollbacks(run_dir: Path) -> tuple[Rollback, ...]:
    """Returns the rollbacks of a run, in order.

    Raises:
        ValueError: the file cannot be read, or is damaged.
    """
    path = run_dir / FILE
    try:
        return _LIST.validate_json(path.read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise ValueError(
            f"{path} is damaged ({error.errors()[0]['msg']}): restore it, or take it from the list "
            '"rollbacks" in meta.json of the newest checkpoint; without it the run would read '
            "samples that it has left out"
        ) from None


def write_rollbacks(run_dir: Path, rollbacks: Sequence[Rollback]) -> None:
    """Writes the rollbacks of a run, all or nothing, and returns when they are on the disk."""
    partial = run_dir / f"{FILE}.tmp"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(json.dumps(as_values(rollbacks), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(run_dir / FILE)


def as_values(rollbacks: Sequence[Rollback]) -> list[dict[str, Any]]:
    """Returns rollbacks as values of JSON."""
    return [rollback.model_dump() for rollback in rollbacks]


def from_values(values: Any) -> tuple[Rollback, ...]:
    """Returns the rollbacks that `as_values` made values of."""
    return _LIST.validate_python(values)


def skipped_by(rollbacks: Sequence[Rollback]) -> SkippedSamples:
    """Returns the samples that a run with these rollbacks leaves out."""
    return SkippedSamples.of(range(one.first_sample, one.end_sample) for one in rollbacks)


def why_abandoned(step: int, known: int, rollbacks: Sequence[Rollback]) -> str:
    """Returns why a run must not go on from a checkpoint: "" where it may.

    Args:
        step: of the checkpoint.
        known: how many rollbacks there had been when it was saved.
        rollbacks: of the run.
    """
    for rollback in rollbacks[known:]:
        if rollback.to_step < step:
            return (
                f"was saved before the run went back from step {rollback.from_step} to step "
                f"{rollback.to_step}"
            )
    return ""
