"""Routes that were recorded in training, for `moebius simulate --trace`: written by every rank,
read back for any number of them.

    RUN/routing/step_00000040-rank_0003_of_0004.npz       one file per recorded step and rank

Written are the first step of a run and every n-th (`train.record_routing`). A file has four arrays
and no pickle:

    meta      JSON in bytes: step, rank, ranks, tokens of every micro-batch, and of every call its layer, sizes and rule
    expert    uint16, or uint32 where that is too narrow: the experts of all routes, call after call
    source    int32: source rows of the calls whose routes follow no rule (where some were dropped); else nothing
    target    int32: the same of target rows

Calls with `per_expert` (mixtures, expert choice) store nothing but their sizes, for nothing else
decides what travels. Gate weights and rows are not recorded. A MoEUT's route costs 2 bytes before
compression, about 1.5 after.

Recording changes nothing: no collective, no random number, the same loss bit for bit. The host
waits for the device once in a recorded step, and if a file cannot be written the run goes on with a
warning.
"""

import json
import logging
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...model.transformer import Transformer
from .tap import TappedCall, tap

logger = logging.getLogger(__name__)

FORMAT = 1
_FOLDER = "routing"
_NAME = re.compile(r"step_(\d{8})-rank_(\d{4,})_of_(\d{4,})\.npz")


@dataclass(frozen=True)
class RecordedCall:
    """One pass of one rank through one sparse layer; T tokens of a micro-batch have U source and V
    target rows.
    """

    micro_batch: int
    depth: int
    layer: str
    kind: str
    num_experts: int
    num_rows: int  # U
    num_targets: int  # V
    per_source: int
    per_target: int
    per_expert: int
    width_in: int
    width_out: int
    num_routes: int
    expert_N: np.ndarray  # empty where per_expert says it
    source_N: np.ndarray
    target_N: np.ndarray

    @property
    def has_rule(self) -> bool:
        """Source and target rows follow from the number of the route."""
        return self.per_source > 0 and self.per_target > 0


@dataclass(frozen=True)
class RecordedRank:
    """One rank's step."""

    step: int
    rank: int
    num_ranks: int
    tokens: tuple[int, ...]  # of every micro-batch
    calls: tuple[RecordedCall, ...]


_ARRAYS = ("expert_N", "source_N", "target_N")
_PLAIN = tuple(entry.name for entry in fields(RecordedCall) if entry.name not in _ARRAYS)


# Writing ------------------------------------------------------------------------------------------------------------


class StepTrace:
    """Records one optimizer step of one rank, or does nothing where the step is not wanted."""

    def __init__(
        self, model: Transformer, run_dir: Path, *, step: int, every: int, rank: int, num_ranks: int
    ) -> None:
        """`step` counts from 1; `every` 0: never."""
        self.wanted = every > 0 and (step == 1 or step % every == 0)
        self._model, self._run_dir, self._step, self._rank, self._num_ranks = (
            model,
            run_dir,
            step,
            rank,
            num_ranks,
        )
        self._passes: list[tuple[int, list[TappedCall]]] = []

    def micro_batch(self, num_tokens: int) -> AbstractContextManager[None]:
        """Listens to the forward pass of one micro-batch."""
        return self._listen(num_tokens) if self.wanted else nullcontext()

    @contextmanager
    def _listen(self, num_tokens: int) -> Iterator[None]:
        with tap(self._model) as recorded:
            yield
        self._passes.append((num_tokens, recorded))

    def save(self) -> None:
        """Writes what was recorded."""
        if not self.wanted:
            return
        calls = [
            _record(index, call)
            for index, (_, recorded) in enumerate(self._passes)
            for call in recorded
        ]
        tokens = tuple(count for count, _ in self._passes)
        try:
            write_rank(
                self._run_dir,
                RecordedRank(self._step, self._rank, self._num_ranks, tokens, tuple(calls)),
            )
        except OSError as error:
            logger.warning(
                "step %d: its routing could not be recorded (%s); the run goes on",
                self._step,
                error,
            )


def write_rank(run_dir: Path, recorded: RecordedRank) -> Path:
    """One file, whole or not at all."""
    folder = run_dir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = (
        folder
        / f"step_{recorded.step:08d}-rank_{recorded.rank:04d}_of_{recorded.num_ranks:04d}.npz"
    )
    meta = {
        "format": FORMAT,
        "step": recorded.step,
        "rank": recorded.rank,
        "ranks": recorded.num_ranks,
        "tokens": recorded.tokens,
        "calls": [{name: getattr(call, name) for name in _PLAIN} for call in recorded.calls],
    }
    most = max((call.num_experts for call in recorded.calls), default=0)
    arrays = {
        "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
        "expert": _joined(
            (call.expert_N for call in recorded.calls), np.uint16 if most <= 2**16 else np.uint32
        ),
        "source": _joined((call.source_N for call in recorded.calls), np.int32),
        "target": _joined((call.target_N for call in recorded.calls), np.int32),
    }
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(partial, path)
    return path


def _joined(arrays: Iterator[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *(array.astype(dtype) for array in arrays)])


def _record(micro_batch: int, call: TappedCall) -> RecordedCall:
    routes, none = call.routes, np.empty(0, np.int64)
    has_rule = routes.per_source > 0 and routes.per_target > 0
    return RecordedCall(
        micro_batch,
        call.depth,
        call.layer,
        call.kind,
        routes.num_experts,
        call.num_rows,
        routes.num_targets,
        routes.per_source,
        routes.per_target,
        routes.per_expert,
        call.width_in,
        call.width_out,
        len(routes.expert_N),
        none if routes.per_expert else routes.expert_N.cpu().numpy(),
        none if routes.per_expert or has_rule else routes.source_N.cpu().numpy(),
        none if routes.per_expert or has_rule else routes.target_N.cpu().numpy(),
    )


# Reading ------------------------------------------------------------------------------------------------------------


def recorded_steps(run_dir: Path) -> dict[int, list[Path]]:
    """The files of every step of which all ranks are there, in the order of ranks.

    A step that was recorded on several worlds (before and after a run was continued on another) is
    taken from the newest.

    Raises:
        ValueError: there is no such step.
    """
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for path in (run_dir / _FOLDER).glob("step_*.npz"):
        if match := _NAME.fullmatch(path.name):
            step, rank, ranks = map(int, match.groups())
            found.setdefault((step, ranks), {})[rank] = path
    whole = {
        key: [files[rank] for rank in range(key[1])]
        for key, files in found.items()
        if len(files) == key[1]
    }
    steps: dict[int, list[Path]] = {}
    for (step, _), files in sorted(
        whole.items(), key=lambda entry: (entry[0][0], entry[1][0].stat().st_mtime)
    ):
        steps[step] = files
    if not steps:
        missing = f": {len(found)} steps lack the files of some ranks" if found else ""
        raise ValueError(
            f"{run_dir}: has no recorded routing{missing}; train with train.record_routing=N, "
            "which records every N-th step"
        )
    return steps


def read_rank(path: Path) -> RecordedRank:
    """One file.

    Raises:
        ValueError: it is not what `write_rank` writes.
    """
    try:
        with np.load(path, allow_pickle=False) as held:
            arrays = {name: held[name] for name in ("meta", "expert", "source", "target")}
        meta = json.loads(arrays["meta"].tobytes())
    except (
        OSError,
        EOFError,
        KeyError,
        ValueError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(f"{path}: is no recorded routing ({error})") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{path}: is not of format {FORMAT}: it was recorded by another version")
    try:
        return RecordedRank(
            meta["step"],
            meta["rank"],
            meta["ranks"],
            tuple(meta["tokens"]),
            tuple(_split(meta["calls"], arrays)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is damaged ({error})") from None


def _split(
    plain: Sequence[dict[str, Any]], arrays: dict[str, np.ndarray]
) -> Iterator[RecordedCall]:
    read = {"expert": 0, "source": 0, "target": 0}

    def take(name: str, count: int, end: int) -> np.ndarray:
        values = arrays[name][read[name] : read[name] + count].astype(np.int64)
        read[name] += count
        if len(values) < count or (count and not 0 <= values.min() <= values.max() < end):
            raise ValueError(f"{name} numbers are missing or out of range")
        return values

    for values in plain:
        call = RecordedCall(**values, **dict.fromkeys(_ARRAYS, np.empty(0, np.int64)))
        listed = 0 if call.has_rule or call.per_expert else call.num_routes
        yield RecordedCall(
            **values,
            expert_N=take("expert", 0 if call.per_expert else call.num_routes, call.num_experts),
            source_N=take("source", listed, call.num_rows),
            target_N=take("target", listed, call.num_targets),
        )
    left = {
        name: len(arrays[name]) - count
        for name, count in read.items()
        if len(arrays[name]) != count
    }
    if left:
        raise ValueError(f"numbers that belong to no call: {left}")
