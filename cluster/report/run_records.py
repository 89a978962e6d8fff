"""Reads what runs recorded, from their folders alone: the half of `import moebius` without torch.

    for run_dir in moebius.find_runs("runs"):
        print(run_dir, moebius.status(run_dir).state)
        losses = moebius.history(run_dir).frame("train")["loss"]    # with pandas
        print(losses.rolling(20).mean())

A run can be read during training or years later.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data_pipeline.words import run_and_step
from ...plugins import a_kind, nearest
from ...train.config.arguments import checked
from ..job import CONFIG, JOURNAL, METRICS, JobStatus, parse_entries, read_status
from ..stop import request_stop
from ..stop import stop as _stop
from .history import END_BYTES
from .json_lines import KINDS, JsonLinesTail, sampled
from .run_report import find_runs as _find_runs

if TYPE_CHECKING:
    import pandas

Record = dict[str, Any]
OnRecord = Callable[[Record], object]
_TELL_S = 0.2  # between two looks for new records

_ONCE_A_STEP = ("train", "eval", "scores", "samples")


@checked
class RunHistory:
    """Reads one run's records as plain dictionaries, also while the run continues.

    Every record has a `kind` ("start", "train", "eval", "checkpoint", …), a `time` in seconds since
    the epoch, and usually a `step`; docs/formats.md lists the keys. Lines cut off by a kill are
    skipped.
    """

    @checked
    def __init__(self, run_dir: str | PathLike[str]):
        self.run_dir = run_dir = Path(run_dir)
        self._metrics = JsonLinesTail(run_dir / METRICS)
        self._journal = JsonLinesTail(run_dir / JOURNAL)

    def records(self) -> list[Record]:
        """Returns all metrics so far, in the order of writing.

        A run that resumes from a checkpoint records later steps again; the last record of each step
        counts. A million steps take 20 s and 2.7 GiB; for curves of such a run, call `sample`.
        """
        return _last_of_each_step(JsonLinesTail(self.run_dir / METRICS).stream())

    def sample(self) -> list[Record]:
        """Returns enough metrics for curves: all `records` of a short run, a part of a long one's.

        From more than 4 MiB it takes 2,000 steps, the evaluations and restarts near them (all of them up to
        256 MiB), and the end of the file. A million steps take a third of a second.
        """
        end = JsonLinesTail.near_the_end(self.run_dir / METRICS, num_bytes=END_BYTES)
        start = sampled(self.run_dir / METRICS, end=end.offset)
        return _last_of_each_step(itertools.chain(start, end.stream()))

    def frame(self, kind: str = "") -> "pandas.DataFrame":
        """Returns `records` as a table of pandas, which must be installed.

        Args:
            kind: only records of this kind, such as "train" or "eval", with the columns that it
                has; default: all.

        Raises:
            ImportError: pandas is not installed.
            ValueError: no run has records of this kind.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("a table needs pandas: pip install pandas") from None
        records = self.records()
        known = {*KINDS, *(record["kind"] for record in records if "kind" in record)}
        if kind and kind not in known:
            kinds = ", ".join(sorted(known))
            raise ValueError(f"kind {kind!r}: records have the kinds {kinds}{nearest(kind, known)}")
        return pandas.DataFrame([r for r in records if not kind or r.get("kind") == kind])

    def new_records(self) -> Iterator[Record]:
        """Yields the metrics written since the last call, including repeated steps."""
        yield from map(_with_numbers, self._metrics.stream())

    def new_states(self) -> Iterator[Record]:
        """Yields the job's states since the last call.

        Each has the keys `time`, `state` ("RUNNING", "RECOVERING", …), `generation`, `reason` and
        `details`, a dictionary.
        """
        for entry in parse_entries(self._journal.stream()):
            yield {
                "time": entry.time,
                "state": entry.state.value,
                "generation": entry.generation,
                "reason": entry.reason,
                "details": entry.details,
            }


@checked
def history(run_dir: str | PathLike[str]) -> RunHistory:
    """Returns the reader of a run's records; a run that has not begun has none.

    Args:
        run_dir: of the run, or one of its checkpoints (RUN@STEP, or its folder).

    Raises:
        JobError: there is no run in this folder.
    """
    run = run_and_step(run_dir)[0]
    if not any((run / name).exists() for name in (METRICS, JOURNAL, CONFIG)):
        read_status(run)  # says what is there instead
    return RunHistory(run)


@checked
def status(run_dir: str | PathLike[str]) -> JobStatus:
    """Returns how a run is: its state, step and loss, and why it ended.

    Args:
        run_dir: as for `history`.

    Raises:
        JobError: there is no run in this folder.
    """
    return read_status(run_and_step(run_dir)[0])


@checked
def stop(run_dir: str | PathLike[str], *, now: bool = False) -> JobStatus:
    """Ends a run at the next step boundary with a checkpoint, waits, and returns its status.

    Args:
        run_dir: of the run.
        now: end at once, without a checkpoint.

    Raises:
        JobError: there is no run in this folder, or it does not end.
    """
    return _stop(Path(run_dir).absolute(), now=now)


@checked
def find_runs(folder: str | PathLike[str]) -> list[Path]:
    """Returns the run folders up to three levels below a folder, most recently active first.

    A run folder contains only itself, which RUN@STEP names too.
    """
    return sorted(_find_runs(run_and_step(folder)[0]), key=_active_at, reverse=True)


@contextlib.contextmanager
def telling(run_dir: Path, on_record: OnRecord | None) -> Iterator[None]:
    """Calls a function with the run's new records, in a thread; raises its error at the end."""
    if on_record is None:
        yield
        return
    history, ended, errors = RunHistory(run_dir), threading.Event(), list[Exception]()
    for _ in history.new_records():
        pass  # of earlier submissions

    def tell() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(_TELL_S)
            for record in history.new_records():
                if record["kind"] in ("train", "eval") and _is_true(on_record(record)):
                    request_stop(run_dir)

    def tell_and_stop() -> None:
        try:
            tell()
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            request_stop(run_dir)

    thread = threading.Thread(target=tell_and_stop, name="on_record", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


def _is_true(answer: object) -> bool:
    """Returns the truth of what `on_record` returned: None and the falses of numpy and torch are false."""
    try:
        return bool(answer)
    except Exception as error:
        raise TypeError(
            f"on_record returned {answer!r:.100}, {a_kind(answer)}, which is neither true nor "
            f"false ({error}): return True to end the run, for example with .all() or .any()"
        ) from error


def _active_at(run_dir: Path) -> float:
    try:
        return (run_dir / JOURNAL).stat().st_mtime
    except OSError:  # the run has been deleted
        return 0.0


def _last_of_each_step(records: Iterable[Record]) -> list[Record]:
    found: dict[Any, Record] = {}
    for number, record in enumerate(records):
        kind = record.get("kind")
        is_once = kind in _ONCE_A_STEP
        key = (kind, record["step"], record.get("prompt")) if is_once else number
        found.pop(key, None)  # move it to its later position
        found[key] = _with_numbers(record)
    return list(found.values())


def _with_numbers(record: Record) -> Record:
    """Returns a record with a numeric loss; files hold nan as text, because JSON has no nan."""
    if isinstance(record.get("loss"), str):
        record["loss"] = float(record["loss"])
    return record
