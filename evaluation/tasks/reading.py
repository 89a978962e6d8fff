"""A task's records, one JSON object a line, from DIR/NAME.jsonl or DIR/NAME.jsonl.zst; or the hub."""

import json
from collections.abc import Iterator
from pathlib import Path

from ...data_pipeline.sources.compression import chunks, is_compressed, unpacked_chunks
from .hub import hub_records
from .task import Record, Task, TaskError

HUB = "hub"
"""In the place of a folder: the published sets, from the Hugging Face hub."""

_ENDINGS = (".jsonl", ".jsonl.zst")


def task_file(data: Path, name: str) -> Path | None:
    """Returns the file of a task; None if there is none."""
    return next((data / (name + end) for end in _ENDINGS if (data / (name + end)).is_file()), None)


def required_file(data: Path, name: str) -> Path:
    """Returns the file of a task.

    Raises:
        TaskError: there is none.
    """
    path = task_file(data, name)
    if path is None:
        raise TaskError(
            f"task {name!r} has no file: {data / name}{' or '.join(_ENDINGS)} does not exist; "
            "--data names the folder of the task files, or is 'hub'"
        )
    return path


def read_records(data: Path | str, name: str, task: Task) -> Iterator[tuple[str, Record]]:
    """Yields a task's records, each with words for where it lies.

    Args:
        data: a folder, or "hub".
        name: of the task.
        task: what it is.

    Raises:
        TaskError: there is no such file, or it is damaged.
    """
    if data == HUB:
        yield from hub_records(name, task.hub)
        return
    path = required_file(Path(data), name)
    try:
        with open(path, "rb") as file:
            packed = is_compressed(path.name)
            pieces = unpacked_chunks(file, str(path)) if packed else chunks(file)
            text = b"".join(pieces).decode()
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 ({error.reason}): fetch the file again") from error
    yield from _json_lines(path, text)


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or line.isspace():
            continue
        where = f"{path}: line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TaskError(
                f"{where}: not valid JSON ({error}); each line must be one JSON object"
            ) from error
        if not isinstance(record, dict):
            raise TaskError(
                f"{where}: a JSON {type(record).__name__}; each line must be one JSON object"
            )
        yield where, record
