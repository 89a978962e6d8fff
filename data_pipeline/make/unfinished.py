"""The state of a folder being prepared: its lock, its recorded plan and its quarantined units."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any, Literal

from ...plugins import PYTHON
from ..atomic import atomic_write, explained_write_errors, read_record, write_record
from ..errors import InputError, PrepareError
from ..files import TEMPORARY, lock_file
from ..manifest import (
    UNFINISHED,
    DatasetManifest,
    QuarantinedSplit,
    go_on,
    index_name,
    is_prepared,
    read_manifest,
    shard_name,
)
from ..prepare_config import DEFAULT_SOURCE, TOKENS, PrepareConfig, RecordFields
from ..sources.embedded import EMBEDDED
from ..sources.files import FoundFile, find_files
from ..tokenizers.chat_template import TEMPLATE_FILE
from ..words import some_of
from .tasks import SIDES, unfinished_file
from .units import Unit, plan_units

QuarantineStage = Literal["scan", "tokenise"]

LOCK = "lock"

_MADE = ("*.arrow", "tokenizer*", TEMPLATE_FILE)  # in a folder without manifests
_PLAN = "plan.json"
_FILES = "files.json"
_ELSE = (
    "to train on it as it is, name data.directory and no text; to prepare the text as it is now, name a "
    "new folder (--output or data.directory), since runs may still need this one"
)

QUARANTINED = "quarantined"
"""The subfolder of files that say why units were left out."""


def finished(config: PrepareConfig, folder: Path) -> DatasetManifest | None:
    """Returns the manifest of a complete folder with this configuration, or None.

    Raises:
        PrepareError: the folder holds other data.
    """
    if not is_prepared(folder):
        return None
    manifest = read_manifest(folder)
    if not config.describes(manifest.header):
        difference = _difference(manifest.header.spec, config.spec)
        raise PrepareError(f"{folder} holds data prepared in another way ({difference}): {_ELSE}")
    return manifest if manifest.complete else None


def record_files(folder: Path) -> None:
    """Records the files that a folder is made of, for `compare_files`.

    Local files are hashed, which takes 1 s per GB and thread, unless they changed after they were planned.
    """
    plan = read_record(folder / UNFINISHED / _PLAN) or {}
    files = [FoundFile(*file) for file in plan.get("files", ())]  # older versions planned none
    with ThreadPoolExecutor() as threads:
        digests = threads.map(_digest, files)
        pairs = zip(files, digests, strict=True)
        write_record(folder / _FILES, [(*file, digest) for file, digest in pairs])


def compare_files(config: PrepareConfig, folder: Path, tell: Callable[[str], None]) -> None:
    """Compares the files that a finished folder was made of with those that its input names now.

    A local file that was written to since is the same if its content is. `tell` is called with what
    cannot be compared.

    Raises:
        PrepareError: there are other files, or one has changed.
    """
    record, completion = read_record(folder / _FILES), read_manifest(folder).completion
    assert completion is not None, "the folder is finished"
    known = record or [(*file, "", "") for file in completion.inputs.items()]
    there = [name for name, *_ in known]
    try:
        units = plan_units(config)
        files = _files(config, units) if record else _inputs(units)
    except InputError as error:
        gone = [name for name in there if os.path.isabs(name) and not os.path.exists(name)]
        if not gone:
            return tell(f"{folder} cannot be compared with its input: {error}")
        raise _made_of_others(folder, removed=gone) from None
    here = [file.url for file in files]
    # equal names elsewhere are the same files, moved
    if list(map(os.path.basename, here)) != list(map(os.path.basename, there)):
        new, removed = set(here).difference(there), set(there).difference(here)
        raise _made_of_others(folder, new=sorted(new), removed=sorted(removed))
    pairs = list(zip(known, files, strict=True))
    if changed := [file.url for entry, file in pairs if not _is_same(file, *entry[1:])]:
        raise _made_of_others(folder, changed=changed)
    if not record and any(file.stamp for file in files):
        tell(f"{folder} is older than records of files: only their names and sizes were compared")
    elif any(entry[2] != file.stamp for entry, file in pairs):
        with suppress(PrepareError):  # of another user; the next call hashes them again
            write_record(folder / _FILES, [(*file, entry[3]) for entry, file in pairs])


def _files(config: PrepareConfig, units: Sequence[Unit]) -> list[FoundFile]:
    """Returns the files that determine what is prepared: input, evaluation sets and tokenizer."""
    beside = [] if config.decontaminate is None else list(config.decontaminate.evaluation_sets)
    if config.loads_tokenizer:
        beside += [config.tokenizer, *sorted(glob(f"{escape(config.tokenizer)}/tokenizer*"))]
    inputs = _inputs(units)
    beside += [f"{file.url[:-4]}.idx" for file in inputs if file.url.lower().endswith(".bin")]
    paths = [os.path.abspath(path) for path in beside if os.path.isfile(path)]
    return inputs + [find_files(path, bool)[0][0] for path in paths]


def _inputs(units: Sequence[Unit]) -> list[FoundFile]:
    splits = {split.url: split for unit in units for split in unit.splits}
    return [FoundFile(url, split.size, split.stamp) for url, split in splits.items()]


def _is_same(file: FoundFile, size: int, stamp: str, digest: str) -> bool:
    if file.size != size or not stamp or file.stamp == stamp:
        return file.size == size
    return bool(digest) and digest == _digest(file)


def _digest(file: FoundFile) -> str:
    """Returns the sha256 of a local file that still has its stamp; "" of any other."""
    try:
        if not file.stamp or not os.path.isfile(file.url):
            return ""
        with open(file.url, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        return digest if find_files(file.url, bool)[0][0] == file else ""
    except (OSError, InputError):  # removed meanwhile
        return ""


def _made_of_others(folder: Path, **files: Sequence[str]) -> PrepareError:
    words = [f"{what}: {some_of(names)}" for what, names in files.items() if names]
    return PrepareError(f"{folder} was made of other files ({'; '.join(words)}): {_ELSE}")


def named_as_in(folder: Path, config: PrepareConfig) -> PrepareConfig:
    """Returns a configuration that names its input as the folder does, if both mean the same files.

    So `texts/*.txt`, its absolute form and the list of its files are the same input.
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
    """Returns the configuration with which a folder was begun, if it is recorded."""
    if is_prepared(folder):
        return read_manifest(folder).header.spec
    path = folder / UNFINISHED / _PLAN
    plan = read_record(path) if path.exists() else None
    return plan["spec"] if plan else {}


def _led_to(names: Sequence[str]) -> list[str]:
    """Returns the absolute paths of the files that names match, with folder links resolved."""
    found = []
    for name in names:
        if "://" in name or name == EMBEDDED or name.startswith(PYTHON):
            found.append(name)
        elif name.startswith(TOKENS):
            found += [TOKENS + path for path in _led_to([name.removeprefix(TOKENS)])]
        else:
            paths = [] if os.path.exists(name) else sorted(glob(name, recursive=True))
            found += [
                os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
                for path in paths or [name]
            ]
    return found


@contextmanager
def claimed(folder: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Locks a folder for one preparing process; waits for another one. The lock ends with the process.

    Args:
        folder: the folder, which need not exist.
        on_wait: called once if another process holds the lock.

    Raises:
        PrepareError: the folder cannot be written, or holds something else.
    """
    with explained_write_errors(folder):
        lock = _locked(folder, on_wait)
    with lock:
        yield


def _locked(folder: Path, on_wait: Callable[[], None]) -> io.FileIO:
    """Opens and locks the lock file, which its last holder may delete meanwhile."""
    told = False
    while True:
        _make_room(folder)
        try:
            return lock_file(folder / UNFINISHED / LOCK, "a", wait=told)
        except FileNotFoundError:  # deleted just now
            continue
        except BlockingIOError:
            on_wait()
            told = True


def _make_room(folder: Path) -> None:
    """Creates the folder of unfinished work, unless the folder holds something else."""
    work = folder / UNFINISHED
    has_content = folder.exists() and any(one.name != UNFINISHED for one in folder.iterdir())
    # in this order, because another process may begin, or clear its work, meanwhile
    if has_content and not work.exists() and not is_prepared(folder):
        raise PrepareError(
            f"{folder} is not empty and holds no prepared data: choose a new or empty folder"
        )
    try:
        work.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # it was removed between two checks of `mkdir`
        if work.exists():
            raise


def begin(config: PrepareConfig, folder: Path, units: Sequence[Unit]) -> str:
    """Records the plan, or checks that an interrupted run had the same; removes its temporary files.

    An interrupted run of something else that has sealed nothing is started over.

    Returns:
        What to tell about that, or "".

    Raises:
        PrepareError: an interrupted run with sealed data had another configuration or other input.
    """
    plan = {
        "spec_hash": config.spec_hash,
        "spec": config.spec,
        "units": [_without_stamps(unit) for unit in units],
        "files": _files(config, units),
    }
    path = folder / UNFINISHED / _PLAN
    with explained_write_errors(folder):
        go_on(folder)
        _remove(*temporary_files(folder), *path.parent.glob(f"*{TEMPORARY}*"))
    found = read_record(path) if path.exists() else plan
    if problem := _other_plan(found, plan):
        if is_prepared(folder):
            raise PrepareError(f"{folder} {problem}: {_ELSE}")
        with explained_write_errors(folder):
            _start_over(folder)
    if not path.exists():
        write_record(path, plan)
    if found is None or problem:
        return f"{folder} {problem}; it had sealed nothing and is started over"
    began = {FoundFile(*file) for file in found.get("files", plan["files"])}
    touched = [file.url for file in plan["files"] if file not in began]
    words = f"{folder} was begun before {some_of(touched)} was last written to: prepare a new folder if "
    return f"{words}its text has changed" if touched else ""


def _without_stamps(unit: Unit) -> dict[str, Any]:
    values = json.loads(json.dumps(asdict(unit)))
    for split in values["splits"]:
        del split["stamp"]
    return values


def _other_plan(found: dict[str, Any] | None, plan: dict[str, Any]) -> str:
    """Describes how an interrupted preparation differs from a plan; "" if it does not."""
    if found is None:
        return "holds an unfinished preparation whose plan is damaged"
    if found["spec_hash"] != plan["spec_hash"]:
        difference = _difference(found["spec"], plan["spec"])
        return f"holds an unfinished preparation of something else ({difference})"
    if found["units"] != plan["units"]:
        return "holds an unfinished preparation whose input files have changed since"
    return ""


def _start_over(folder: Path) -> None:
    """Removes the work of a preparation that has sealed nothing, except its lock."""
    made = [one for pattern in _MADE for one in folder.glob(pattern)]
    work = (one for one in (folder / UNFINISHED).iterdir() if one.name != LOCK)
    _remove(folder / QUARANTINED, *made, *work)


def _remove(*paths: Path) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Quarantined:
    """Holds the stage in which a unit failed, and its entry for the last manifest."""

    stage: QuarantineStage
    split: QuarantinedSplit


def write_quarantined(folder: Path, unit: Unit, entry: Quarantined, account: str) -> None:
    """Records for good that a unit is left out, and removes its shards.

    `account`, the traceback, goes to a file in the folder, because the manifest must be the same on any
    machine.
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
    """Returns a unit's quarantine entry of an earlier run, or None."""
    said = read_record(unfinished_file(folder, unit, "quarantined.json"))
    if said is None:
        return None
    return Quarantined(said["stage"], QuarantinedSplit.model_validate(said["split"]))


def forget_quarantined(folder: Path, source: str = "*") -> None:
    """Forgets which units are left out, so that the next call tries them again; not their accounts."""
    for path in (folder / UNFINISHED).glob(f"{source}-[0-9]*.json"):
        # a bucket of nothing was collected from them
        if path.name.endswith(".quarantined.json") or read_record(path) == []:
            path.unlink(missing_ok=True)


def temporary_files(folder: Path) -> Iterator[Path]:
    """Yields the temporary files that killed preparations left outside `unfinished/`."""
    for pattern in (*_MADE, "manifest-*.json"):
        yield from folder.glob(f"{pattern}{TEMPORARY}*")


def clear(folder: Path) -> None:
    """Removes the unfinished work and temporary files of a complete, locked folder.

    The lock file goes last, because another process may then begin.
    """
    work = folder / UNFINISHED
    _remove(*temporary_files(folder), *sorted(work.glob("*"), key=lambda one: one.name == LOCK))
    with suppress(OSError):  # another process has begun
        work.rmdir()


def _difference(found: dict[str, Any], asked: dict[str, Any]) -> str:
    found, asked = _flat(found), _flat(asked)
    keys = [key for key in sorted({*found, *asked}) if found.get(key) != asked.get(key)]
    words = [
        f"{key}: there {found.get(key)!r:.80}, asked for {asked.get(key)!r:.80}" for key in keys
    ]
    return some_of(words, between="; ") if words else "another format"


def _flat(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns a spec with the fields of every source under dotted names."""
    flat = dict(spec)
    sources = flat.pop("sources", [])
    flat["sources"] = [source["name"] for source in sources]
    for source in sources:
        flat |= {f"{source['name']}.{key}": value for key, value in source.items()}
    return flat
