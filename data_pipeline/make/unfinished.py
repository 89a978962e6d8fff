"""The folder that is prepared into: whose it is, what is in it already, and who else is at it."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import IO, Any, Literal

from ...own_parts import PYTHON
from ..atomic import TEMPORARY, atomic_write, explained_write_errors
from ..errors import PrepareError
from ..growth import UNFINISHED, go_on
from ..manifest import (
    DatasetManifest,
    QuarantinedSplit,
    index_name,
    is_prepared,
    read_manifest,
    shard_name,
)
from ..prepare_config import DEFAULT_SOURCE, PrepareConfig, RecordFields
from ..sources.embedded import EMBEDDED
from .tasks import SIDES, read_record, unfinished_file, write_record
from .units import Unit

QuarantineStage = Literal["scan", "tokenise"]

LOCK = "lock"

QUARANTINED = "quarantined"
"""The folder of files that say why a unit was given up."""


def finished(config: PrepareConfig, folder: Path) -> DatasetManifest | None:
    """Returns the manifest of a folder that is complete and of this configuration and input.

    Raises:
        PrepareError: it holds something else.
    """
    if not is_prepared(folder):
        return None
    manifest = read_manifest(folder)
    if manifest.header.spec_hash != config.spec_hash:
        raise PrepareError(
            f"{folder} holds data prepared in another way "
            f"({_difference(manifest.header.spec, config.spec)}): "
            "choose another folder, or delete this one"
        )
    if manifest.completion is None:
        return None
    for url, size in manifest.completion.inputs.items():
        if "://" in url or url == EMBEDDED or not Path(url).exists():
            continue
        if (size_now := Path(url).stat().st_size) != size:
            raise PrepareError(
                f"{folder} was prepared from {url} when it had {size} bytes; it has {size_now} "
                "now: choose another folder, or delete this one"
            )
    return manifest


def in_words_of(folder: Path, config: PrepareConfig) -> PrepareConfig:
    """Returns a configuration that names files as a folder does, where both lead to the same ones.

    So `texts/*.txt`, its absolute form and the list of its files are one input, whichever of them the
    folder was begun with.
    """
    known = _recorded_spec(folder)
    sources = {source["name"]: source for source in known.get("sources", ())}

    def words(asked: Sequence[str], there: Any) -> tuple[str, ...]:
        is_same = there and _led_to(there) == _led_to(asked)
        return tuple(there) if is_same else tuple(asked)

    def of_source(source: RecordFields, there: dict[str, Any]) -> dict[str, Any]:
        return {
            name: words(getattr(source, name), there.get(name))
            for name in ("input", "validation_input")
        }

    changed: dict[str, Any] = {}
    if config.sources:
        changed["sources"] = tuple(
            source.model_copy(update=of_source(source, sources.get(source.name, {})))
            for source in config.sources
        )
    else:
        changed = of_source(config, sources.get(DEFAULT_SOURCE, {}))
    if config.loads_tokenizer and "tokenizer" in known:
        (changed["tokenizer"],) = words([config.tokenizer], [known["tokenizer"]])
    if config.decontaminate is not None and known.get("decontaminate"):
        sets = words(
            config.decontaminate.evaluation_sets, known["decontaminate"]["evaluation_sets"]
        )
        changed["decontaminate"] = config.decontaminate.model_copy(update={"evaluation_sets": sets})
    return config.model_copy(update=changed)


def _recorded_spec(folder: Path) -> dict[str, Any]:
    """Returns the configuration that a folder was begun with, as far as it says so."""
    if is_prepared(folder):
        return read_manifest(folder).header.spec
    path = folder / UNFINISHED / "plan.json"
    plan = read_record(path) if path.exists() else None
    return plan["spec"] if plan else {}


def _led_to(names: Sequence[str]) -> list[str]:
    """Returns the files that names lead to, absolute, by way of no link to a folder."""
    found = []
    for name in names:
        if "://" in name or name == EMBEDDED or name.startswith(PYTHON):
            found.append(name)
        else:
            paths = [] if os.path.exists(name) else sorted(glob(name, recursive=True))
            found += [
                os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
                for path in paths or [name]
            ]
    return found


@contextmanager
def claimed(folder: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Locks the folder, so that one process at a time prepares into it; waits for another one.

    The lock is the process's own: it ends with it, however it ends.

    Args:
        folder: need not exist yet.
        on_wait: called once if another process has the folder.

    Raises:
        PrepareError: the folder cannot be written, or holds something else.
    """
    with explained_write_errors(folder):
        lock = _locked(folder, on_wait)
    with lock:
        yield


def _locked(folder: Path, on_wait: Callable[[], None]) -> IO[bytes]:
    """Opens and locks the lock file, which whoever had it before may have deleted meanwhile."""
    path = folder / UNFINISHED / LOCK
    told = False
    while True:
        _make_room(folder)
        try:
            lock = open(path, "ab")  # noqa: SIM115 (closed by the caller)
        except FileNotFoundError:  # deleted just now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                on_wait()
            told = True
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        lock.close()


def _make_room(folder: Path) -> None:
    """Makes the folder of unfinished work, where that destroys nothing."""
    work = folder / UNFINISHED
    has_content = folder.exists() and any(one.name != UNFINISHED for one in folder.iterdir())
    # in this order: meanwhile another process may begin, or end and clear its work away
    if has_content and not work.exists() and not is_prepared(folder):
        raise PrepareError(
            f"{folder} is not empty and holds no prepared data: choose a new or an empty folder"
        )
    try:
        work.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # was there for mkdir, and cleared away before it looked what it is
        if work.exists():
            raise


def begin(config: PrepareConfig, folder: Path, units: Sequence[Unit]) -> None:
    """Records what is being made, or checks that an interrupted run was making the same.

    Removes the temporary files of that run.

    Raises:
        PrepareError: it was making something else, or of other input.
    """
    plan = {
        "spec_hash": config.spec_hash,
        "spec": config.spec,
        "units": [json.loads(json.dumps(asdict(unit))) for unit in units],
    }
    path = folder / UNFINISHED / "plan.json"
    with explained_write_errors(folder):
        go_on(folder)
        for debris in [*temporary_files(folder), *path.parent.glob(f"*{TEMPORARY}*")]:
            debris.unlink(missing_ok=True)
    if not path.exists():
        write_record(path, plan)
        return
    found = read_record(path)
    if found is None:
        raise PrepareError(
            f"{path} is damaged, so it is not known what was being prepared here: delete the "
            "folder and prepare again"
        )
    if found["spec_hash"] != plan["spec_hash"]:
        raise PrepareError(
            f"{folder} holds an unfinished preparation of something else "
            f"({_difference(found['spec'], plan['spec'])}): choose another folder, or delete this "
            "one"
        )
    if found["units"] != plan["units"]:
        raise PrepareError(
            f"{folder} holds an unfinished preparation, and its input files have changed since: "
            "delete the folder and prepare again, from files that nobody writes to"
        )


@dataclass(frozen=True)
class Quarantined:
    """Says in which stage a unit was given up, and what the last manifest says about it."""

    stage: QuarantineStage
    split: QuarantinedSplit


def write_quarantined(folder: Path, unit: Unit, entry: Quarantined, account: str) -> None:
    """Records that a unit is given up, for good, and removes what it has left.

    `account` tells people where it failed, traceback and all: a file that stays in the folder, and
    not in the manifest, which is the same on any machine.
    """
    for side in SIDES.values():
        name = shard_name(unit.source, side, unit.number)
        (folder / name).unlink(missing_ok=True)
        (folder / index_name(name)).unlink(missing_ok=True)
    path = folder / QUARANTINED / f"{unit.source}-{unit.number:05d}.txt"
    with explained_write_errors(path):
        path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        heading = f"{unit.label} was left out in stage {entry.stage!r}\n\n"
        file.write((heading + account).encode(errors="backslashreplace"))
    said = {"stage": entry.stage, "split": entry.split.model_dump(mode="json")}
    write_record(unfinished_file(folder, unit, "quarantined.json"), said)


def read_quarantined(folder: Path, unit: Unit) -> Quarantined | None:
    """Returns why an earlier run gave up a unit; None: it did not."""
    said = read_record(unfinished_file(folder, unit, "quarantined.json"))
    if said is None:
        return None
    return Quarantined(said["stage"], QuarantinedSplit.model_validate(said["split"]))


def temporary_files(folder: Path) -> Iterator[Path]:
    """Yields what killed preparers have left in a folder beside its unfinished work.

    Plans of rows (`read/packing.py`) are written by loaders, which may be at it.
    """
    for pattern in ("*.arrow", "manifest-*.json", "tokenizer*"):
        for path in folder.glob(f"{pattern}{TEMPORARY}*"):
            if not path.name.startswith("pack-"):
                yield path


def clear(folder: Path) -> None:
    """Removes the unfinished work and temporary files of a complete folder, under its lock.

    The lock goes last: once it is gone another process may begin, whose work must not be removed.
    """
    for path in temporary_files(folder):
        path.unlink(missing_ok=True)
    work = folder / UNFINISHED
    for one in sorted(work.glob("*"), key=lambda one: one.name == LOCK):
        if one.is_dir():
            shutil.rmtree(one, ignore_errors=True)
        else:
            one.unlink(missing_ok=True)
    with suppress(OSError):  # another process has begun
        work.rmdir()


def _difference(found: dict[str, Any], asked: dict[str, Any]) -> str:
    found, asked = _flat(found), _flat(asked)
    keys = [key for key in sorted({*found, *asked}) if found.get(key) != asked.get(key)]
    return (
        "; ".join(f"{key}: there {found.get(key)!r}, asked for {asked.get(key)!r}" for key in keys)
        or "older format"
    )


def _flat(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns a spec with the fields of every source under the source's name."""
    flat = dict(spec)
    sources = flat.pop("sources", [])
    flat["sources"] = [source["name"] for source in sources]
    for source in sources:
        flat |= {f"{source['name']}.{key}": value for key, value in source.items()}
    return flat
