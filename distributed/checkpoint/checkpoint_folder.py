"""Manages the folder with a run's checkpoints: access, retention, cleanup.

    step_00000050/                             a committed checkpoint
    step_00000060.g3.tmp/                      being written by generation 3, or left by it
    step_00000050.old.tmp/                     renamed while its replacement is published
    step_00000010.deleted.tmp/                 being deleted
    step_00000050.fetched.tmp/                 fetched from the second place (second_copy.py), not yet adopted
    step_00000040.damaged-20261122-170411/     found damaged by a run that resumed from an earlier one

Only rank 0 acts here. It reads only names and the supervisor's fence. Every change is a rename, so a
partial directory never looks like a checkpoint.
"""

import logging
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from ...data_pipeline.files import sync
from ...data_pipeline.words import best_of, reads_in, step_of
from .format import CheckpointError, StaleGenerationError, latest, list_checkpoints

logger = logging.getLogger(__name__)

_TEMPORARY_NAME = re.compile(r"(step_\d{8,})\.(?:g(?P<generation>\d+)|old|deleted|fetched)\.tmp")
_ASIDE_NAME = re.compile(r"step_\d{8,}\.damaged-\d{8}-\d{6}")

OnFailure = Literal["go_on", "stop"]


class CheckpointConfig(BaseModel):
    """Configures when checkpoints are saved and how many are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    every: NonNegativeInt = 100
    """The number of steps between two checkpoints; 0 saves only at the end."""

    keep_last: PositiveInt = 3
    """How many of the newest checkpoints are kept."""

    keep_every: NonNegativeInt = Field(default=0, examples=[5000])
    """Saves and keeps the checkpoints of all steps that are multiples of this; 0: none."""

    keep_best: str | None = Field(default=None, examples=["validation"])
    """Saves a checkpoint whenever the validation loss is measured ("validation") or the accuracy in a
    task, and keeps the best one."""

    on_failure: OnFailure = "go_on"
    """What happens if a save fails, for example on a full disk: "go_on" continues training until the
    next save, "stop" ends the run at the next step. A failed save at the run's end is always an
    error."""

    copy_to: str | None = Field(default=None, examples=["s3://bucket/checkpoints"])
    """A folder or URL (s3://bucket/checkpoints) for background copies of the kept checkpoints, in a
    subfolder with the run's name."""

    def why_kept(self, names: Sequence[str], read: Callable[[str], bytes]) -> dict[str, str]:
        """Returns why each of a run's checkpoints stays, by name; "": nothing keeps it.

        `read` is as for `best_of`.
        """
        last, every = sorted(names, key=step_of)[-self.keep_last :], self.keep_every
        best, score = best_of(names, self.keep_best, read) or ("", 0.0)
        kept = {}
        for name in names:
            reasons = {
                "last": name in last,
                f"every {every}": every and step_of(name) % every == 0,
                f"best {self.keep_best} {score:.4g}": name == best,
            }
            kept[name] = ", ".join(reason for reason, is_true in reasons.items() if is_true)
        return kept


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that was found damaged and skipped for an earlier one."""

    step: int
    path: Path  # its current path
    why: str


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run, as seen by one generation.

    `generation_file` is the supervisor's fence: if it exists, only the generation that it names may
    change anything.
    """

    path: Path
    config: CheckpointConfig
    generation: int
    generation_file: Path | None

    def prepare(self) -> None:
        """Creates the folder and removes unfinished leftovers of this and earlier generations.

        Raises:
            CheckpointError: the folder cannot be written, or this generation is stale.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.refuse_if_stale()  # the leftovers may be the current generation's
            self._clean_leftovers()
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints into {self.path}: {error.strerror}; "
                "choose a run folder that this user may write to"
            ) from error

    def refuse_if_stale(self) -> None:
        """Raises StaleGenerationError if the supervisor's fence names another generation.

        A rename after this check may still be late, but the state is the same run's.
        """
        if self.generation_file is None or not self.generation_file.exists():
            return
        current = self.generation_file.read_text().strip()
        if current != str(self.generation):
            raise StaleGenerationError(
                f"generation {self.generation} may not commit: {self.generation_file} says "
                f"{current or 'nothing'}; the job has restarted and this leftover process must end"
            )

    def make_temporary(self, temporary: Path) -> None:
        """Creates the empty directory for a save."""
        self.refuse_if_stale()
        discard(temporary)
        temporary.mkdir(parents=True)

    def set_aside(self, damaged: Sequence[DamagedCheckpoint]) -> list[DamagedCheckpoint]:
        """Renames damaged checkpoints, so that no run uses them; they can still be inspected or repaired.

        Returns:
            The checkpoints with their new paths; one that cannot be renamed keeps its path.
        """
        self.refuse_if_stale()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return [self._set_one_aside(each, stamp) for each in damaged]

    def _set_one_aside(self, damaged: DamagedCheckpoint, stamp: str) -> DamagedCheckpoint:
        aside = damaged.path.with_name(f"{damaged.path.name}.damaged-{stamp}")
        try:
            damaged.path.rename(aside)
        except OSError as error:
            logger.warning("%s could not be set aside: %s", damaged.path, error.strerror)
            return damaged
        return replace(damaged, path=aside)

    def delete_old(self, step: int, *, spare: Path | None = None) -> None:
        """Deletes checkpoints up to the one just written that nothing keeps; later ones stay.

        Args:
            step: the step just written.
            spare: a checkpoint in use, kept until the next call.
        """
        past = [found for found in list_checkpoints(self.path) if found.step <= step]
        try:
            kept = self.config.why_kept([found.path.name for found in past], reads_in(self.path))
        except OSError as error:  # the one that cannot be read may be the best
            logger.warning("old checkpoints are not deleted: %s", error)
            return
        for checkpoint in past:
            if kept[checkpoint.path.name] or checkpoint.path == spare:
                continue
            doomed = checkpoint.path.with_name(f"{checkpoint.path.name}.deleted.tmp")
            try:
                checkpoint.path.rename(
                    doomed
                )  # a partial directory must not look like a checkpoint
            except OSError as error:
                logger.warning(
                    "the old checkpoint %s could not be deleted: %s", checkpoint.path, error
                )
            else:
                discard(doomed)

    def what_remains(self) -> str:
        """Describes what is left after a failed save; never raises, to keep the first error visible."""
        try:
            found = latest(self.path)
            free_mib = shutil.disk_usage(self.path).free / 2**20
        except OSError as error:
            return f"{self.path} cannot be read any more: {error.strerror}"
        remains = (
            f"{found.name} is still there and untouched" if found else "there is no earlier one"
        )
        return f"{remains} ({free_mib:,.0f} MiB free on its disk)"

    def _clean_leftovers(self) -> None:
        for path in self.path.iterdir():
            match = _TEMPORARY_NAME.fullmatch(path.name)
            if match is None or int(match["generation"] or 0) > self.generation:
                continue  # not ours, or a later generation's
            committed = self.path / match[1]
            if path.name.endswith(".old.tmp") and not committed.exists():
                path.rename(
                    committed
                )  # a process died between two renames: this is the last good one
            else:
                discard(path)


def list_set_aside(directory: Path) -> list[Path]:
    """Lists the damaged checkpoints that runs have set aside."""
    if not directory.is_dir():
        return []
    return [path for path in sorted(directory.iterdir()) if _ASIDE_NAME.fullmatch(path.name)]


def publish(temporary: Path, final: Path) -> None:
    """Publishes a checkpoint by a rename, which replaces an older one of the same step."""
    aside = final.with_name(f"{final.name}.old.tmp")
    if final.exists():
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    sync(final.parent)
    discard(aside)


def discard(path: Path) -> None:
    """Deletes a directory, which its writer may be deleting too; warns on failure."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be deleted; it is no longer needed", path)
