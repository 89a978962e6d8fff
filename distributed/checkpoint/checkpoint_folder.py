"""The folder with a run's checkpoints: who may change it, what is kept, cleaned up and set aside.

    step_00000050/                             a committed checkpoint
    step_00000060.g3.tmp/                      being written by generation 3, or left by it
    step_00000050.old.tmp/                     stepped aside while its replacement is renamed
    step_00000010.deleted.tmp/                 on its way out
    step_00000050.fetched.tmp/                 from the second place (second_copy.py), not yet taken over
    step_00000040.damaged-20261122-170411/     found damaged by a run that went on from the one before
    step_00000040.abandoned-20261122-170411/   saved before the run went back further, past spikes of its loss

All acts here are rank 0's. Nothing is read but names and the supervisor's fence; every change is a
rename, so half a directory never looks like a checkpoint.
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from .format import CheckpointError, StaleGenerationError, latest, list_checkpoints

logger = logging.getLogger(__name__)

_TEMPORARY_NAME = re.compile(r"(step_\d{8,})\.(?:g(?P<generation>\d+)|old|deleted|fetched)\.tmp")
_ASIDE_NAME = re.compile(r"step_\d{8,}\.(?P<why>damaged|abandoned)-\d{8}-\d{6}")

OnFailure = Literal["go_on", "stop"]


class CheckpointConfig(BaseModel):
    """Configures when the state is saved and how much of it is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    every: NonNegativeInt = 100
    """The number of steps between two checkpoints; 0 saves at the end only."""

    keep_last: PositiveInt = 3
    """How many checkpoints are kept."""

    verify: bool = True
    """Reads a checkpoint back from the disk before an older one is deleted."""

    on_failure: OnFailure = "go_on"
    """What a failed save does, of a full disk for example: "go_on" trains on and saves again at the
    next time, "stop" ends the run at the next step. A save that fails at the run's end is an error
    either way."""

    copy_to: str | None = Field(default=None, examples=["s3://bucket/checkpoints"])
    """A folder or URL (s3://bucket/checkpoints) for copies of the last checkpoints, made in the
    background into a folder of the run's name."""


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that was found damaged, and passed over for an earlier one."""

    step: int
    path: Path  # where it is now
    why: str


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run, as a process of one generation may change them.

    `generation_file` is the supervisor's fence: where it exists, only the generation whose number
    it holds may change anything.
    """

    path: Path
    keep_last: int
    generation: int
    generation_file: Path | None

    def prepare(self) -> None:
        """Makes the folder, and removes what this and earlier generations left unfinished.

        Raises:
            CheckpointError: it cannot be written, or this generation is a stale one.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.refuse_if_stale()  # what would be cleaned may be the current generation's
            self._clean_leftovers()
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints into {self.path}: {error.strerror}; "
                "choose a run folder that this user may write to"
            ) from error

    def refuse_if_stale(self) -> None:
        """Raises an error if the supervisor's fence names another generation.

        (A rename right after it could still be late; by then the state is the same run's all the
        same.)
        """
        if self.generation_file is None or not self.generation_file.exists():
            return
        current = self.generation_file.read_text().strip()
        if current != str(self.generation):
            raise StaleGenerationError(
                f"generation {self.generation} may not commit: {self.generation_file} says "
                f"{current or 'nothing'}; the job was started anew and this process is a leftover "
                "that must end"
            )

    def make_temporary(self, temporary: Path) -> None:
        """Makes the directory that a save is written into, empty."""
        self.refuse_if_stale()
        discard(temporary)
        temporary.mkdir(parents=True)

    def set_aside(self, damaged: Sequence[DamagedCheckpoint]) -> list[DamagedCheckpoint]:
        """Renames damaged checkpoints, so that no run takes them for whole again.

        Nothing is deleted: somebody may want to look at them, or mend them from a copy.

        Returns:
            The same with their new paths; one that cannot be renamed keeps its name.
        """
        self.refuse_if_stale()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return [self._set_one_aside(each, stamp) for each in damaged]

    def abandon_after(self, step: int) -> list[str]:
        """Renames the checkpoints of later steps, newest first: the run has gone back to this one.

        So whenever it ends in between, the newest that is left is one that it may go on from.

        Returns:
            Their new names.

        Raises:
            OSError: one cannot be renamed.
        """
        self.refuse_if_stale()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        later = [found.path for found in list_checkpoints(self.path) if found.step > step]
        return [
            path.rename(path.with_name(f"{path.name}.abandoned-{stamp}")).name
            for path in reversed(later)
        ]

    def _set_one_aside(self, damaged: DamagedCheckpoint, stamp: str) -> DamagedCheckpoint:
        aside = damaged.path.with_name(f"{damaged.path.name}.damaged-{stamp}")
        try:
            damaged.path.rename(aside)
        except OSError as error:
            logger.warning("%s could not be set aside: %s", damaged.path, error.strerror)
            return damaged
        return replace(damaged, path=aside)

    def delete_old(self, step: int, *, spare: Path | None = None) -> None:
        """Deletes all but the last n checkpoints up to the one just written.

        A later one, behind which the run fell back, is not judged here.

        Args:
            step: of the one just written.
            spare: is read by somebody, and stays until the next time.
        """
        past = [found for found in list_checkpoints(self.path) if found.step <= step]
        for checkpoint in past[: -self.keep_last]:
            if checkpoint.path == spare:
                continue
            doomed = checkpoint.path.with_name(f"{checkpoint.path.name}.deleted.tmp")
            try:
                checkpoint.path.rename(doomed)  # half a directory must never look like a checkpoint
            except OSError as error:
                logger.warning(
                    "the old checkpoint %s could not be deleted: %s", checkpoint.path, error
                )
            else:
                discard(doomed)

    def what_remains(self) -> str:
        """Spells what the user still has after a save that failed.

        A failure of its own must not hide the first.
        """
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
                continue  # what a later generation writes is not ours to touch
            committed = self.path / match[1]
            if path.name.endswith(".old.tmp") and not committed.exists():
                path.rename(committed)  # we died between two renames: this is the last good one
            else:
                discard(path)


def list_set_aside(directory: Path) -> list[tuple[Path, str]]:
    """Lists the checkpoints that runs have set aside, by name, with why: damaged or abandoned."""
    if not directory.is_dir():
        return []
    return [
        (path, match["why"])
        for path in sorted(directory.iterdir())
        if (match := _ASIDE_NAME.fullmatch(path.name))
    ]


def publish(temporary: Path, final: Path) -> None:
    """Makes a checkpoint visible by a rename; an older one of the same step steps aside for it."""
    aside = final.with_name(f"{final.name}.old.tmp")
    if final.exists():
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    sync_directory(final.parent)
    discard(aside)


def discard(path: Path) -> None:
    """Deletes a directory, or what is left of it; warns if it cannot.

    Its own writer may be deleting it too.
    """
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be deleted; it holds nothing that is needed", path)


def sync_directory(path: Path) -> None:
    """Writes a directory's names to the disk (fsync): after that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
