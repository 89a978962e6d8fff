"""Routes that were recorded in training, for `moebius simulate --trace` and for the question which
experts serve which token: written by every rank, read back for any number of them.

    RUN/routing/step_00000040-rank_0003_of_0004.npz       one file per recorded step and rank

Written are the first step of a run and every n-th (`train.record_routing`). A file has four arrays
or up to six, and no pickle:

    meta      JSON in bytes: step, rank, ranks, tokens of every micro-batch, and of every call its
              layer, sizes and rule
    expert    uint16, or uint32 where that is too narrow: the experts of all routes, call after call
    source    int32: source rows of the calls whose routes follow no rule (where some were dropped);
              else nothing
    target    int32: the same of target rows
    token     uint16, or int32 where that is too narrow: the ids of all input tokens, micro-batch
              after micro-batch. Files from before there was such an array have none
    document  int32: the same of the documents that the tokens belong to, −1 padding; only where the
              data says which they are

Calls with `per_expert` (mixtures, expert choice) store nothing but their sizes, for nothing else
decides what travels: read back, each of their routes has a row of its own. Gate weights and rows
are not recorded; read back, every weight is 1. A MoEUT's route costs 2 bytes before compression,
about 1.5 after, and 28 in memory while its step is read.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...model.routing import Routes, slot_routes
from ...model.transformer import Transformer
from .route_tap import CallId, RoutedCall, tap

logger = logging.getLogger(__name__)

FORMAT = 1
_FOLDER = "routing"
_NAME = re.compile(r"step_(\d{8})-rank_(\d{4,})_of_(\d{4,})\.npz")


@dataclass(frozen=True)
class RecordedRank:
    """What one rank routed in one step."""

    step: int
    rank: int
    num_ranks: int
    tokens: tuple[int, ...]  # how many every micro-batch has
    calls: tuple[RoutedCall, ...]
    # int64, of every micro-batch, row after row; empty: they were not recorded
    token_ids: tuple[Tensor, ...] = ()
    document_ids: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _StoredCall:
    """A call's sizes, as the file's `meta` lists them."""

    micro_batch: int
    depth: int
    layer: str
    kind: str
    num_experts: int
    num_rows: int
    num_targets: int
    per_source: int
    per_target: int
    per_expert: int
    width_in: int
    width_out: int
    num_routes: int

    @property
    def lists_experts(self) -> bool:
        """Whether the file lists the expert of every route."""
        return not self.per_expert

    @property
    def lists_rows(self) -> bool:
        """Whether the file lists source and target rows: they do not follow from a rule."""
        has_rule = self.per_source > 0 and self.per_target > 0
        return not self.per_expert and not has_rule


# Writing ------------------------------------------------------------------------------------------


class StepTrace:
    """Records one optimizer step of one rank, or does nothing where the step is not wanted."""

    def __init__(
        self, model: Transformer, run_dir: Path, *, step: int, every: int, rank: int, num_ranks: int
    ) -> None:
        """Decides whether the step is recorded: `step` counts from 1; `every` 0: never."""
        self.wanted = every > 0 and (step == 1 or step % every == 0)
        self._model, self._run_dir = model, run_dir
        self._step, self._rank, self._num_ranks = step, rank, num_ranks
        self._token_ids: list[Tensor] = []  # of every micro-batch
        self._document_ids: list[Tensor] = []
        self._calls: list[RoutedCall] = []

    def micro_batch(
        self, tokens_BS: Tensor, document_ids_BS: Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Records the forward pass of one micro-batch while the context lasts.

        Args:
            tokens_BS: its input.
            document_ids_BS: the documents of these tokens, −1 padding; None: they are not known,
                and then they are for no micro-batch.
        """
        return self._listen(tokens_BS, document_ids_BS) if self.wanted else nullcontext()

    @contextmanager
    def _listen(self, tokens_BS: Tensor, document_ids_BS: Tensor | None) -> Iterator[None]:
        with tap(self._model, step=self._step, micro_batch=len(self._token_ids)) as recorded:
            yield
        self._token_ids.append(tokens_BS.flatten())
        if document_ids_BS is not None:
            self._document_ids.append(document_ids_BS.flatten())
        self._calls += recorded

    def save(self) -> None:
        """Writes what was recorded; a file that cannot be written is a warning."""
        if not self.wanted:
            return
        recorded = RecordedRank(
            self._step,
            self._rank,
            self._num_ranks,
            tuple(len(ids) for ids in self._token_ids),
            tuple(self._calls),
            tuple(self._token_ids),
            tuple(self._document_ids),
        )
        try:
            write_rank(self._run_dir, recorded)
        except OSError as error:
            logger.warning(
                "step %d: its routing could not be recorded (%s); the run goes on",
                self._step,
                error,
            )


def write_rank(run_dir: Path, recorded: RecordedRank) -> Path:
    """Writes one rank's step to one file, whole or not at all, and returns its path.

    Raises:
        OSError: the file cannot be written.
    """
    folder = run_dir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    rank, num_ranks = recorded.rank, recorded.num_ranks
    path = folder / f"step_{recorded.step:08d}-rank_{rank:04d}_of_{num_ranks:04d}.npz"
    stored = [_sizes_of(call) for call in recorded.calls]
    meta = {
        "format": FORMAT,
        "step": recorded.step,
        "rank": rank,
        "ranks": num_ranks,
        "tokens": recorded.tokens,
        "calls": [asdict(sizes) for sizes in stored],
    }
    most_experts = max((sizes.num_experts for sizes in stored), default=0)
    expert_dtype = np.uint16 if most_experts <= 2**16 else np.uint32
    listing_experts = [
        call.routes
        for call, sizes in zip(recorded.calls, stored, strict=True)
        if sizes.lists_experts
    ]
    listing_rows = [
        call.routes for call, sizes in zip(recorded.calls, stored, strict=True) if sizes.lists_rows
    ]
    arrays = {
        "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
        "expert": _joined((routes.expert_N for routes in listing_experts), expert_dtype),
        "source": _joined((routes.source_N for routes in listing_rows), np.int32),
        "target": _joined((routes.target_N for routes in listing_rows), np.int32),
    }
    if recorded.token_ids:
        largest = max((int(ids.max()) for ids in recorded.token_ids if len(ids)), default=0)
        token_dtype = np.uint16 if largest < 2**16 else np.int32
        arrays["token"] = _joined(recorded.token_ids, token_dtype)
    if recorded.document_ids:
        arrays["document"] = _joined(recorded.document_ids, np.int32)
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(partial, path)
    return path


def _joined(numbers: Iterable[Tensor], dtype: Any) -> np.ndarray:
    arrays = [number_N.cpu().numpy().astype(dtype) for number_N in numbers]
    return np.concatenate([np.empty(0, dtype), *arrays])


def _sizes_of(call: RoutedCall) -> _StoredCall:
    routes = call.routes
    return _StoredCall(
        micro_batch=call.id.micro_batch,
        depth=call.id.depth,
        layer=call.id.layer,
        kind=call.id.kind,
        num_experts=routes.num_experts,
        num_rows=call.num_rows,
        num_targets=routes.num_targets,
        per_source=routes.per_source,
        per_target=routes.per_target,
        per_expert=routes.per_expert,
        width_in=call.width_in,
        width_out=call.width_out,
        num_routes=len(routes.expert_N),
    )


# Reading ------------------------------------------------------------------------------------------


def recorded_steps(run_dir: Path) -> dict[int, list[Path]]:
    """Returns the files of every step of which all ranks are there, in the order of ranks.

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
    """Reads what one rank recorded in one step.

    Raises:
        ValueError: the file is not what `write_rank` writes.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            optional = [name for name in ("token", "document") if name in file.files]
            names = ["meta", "expert", "source", "target", *optional]
            arrays = {name: file[name] for name in names}
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
        calls = tuple(_read_calls(meta["step"], meta["calls"], arrays))
        tokens = tuple(meta["tokens"])
        return RecordedRank(
            meta["step"],
            meta["rank"],
            meta["ranks"],
            tokens,
            calls,
            _read_ids(arrays, "token", tokens, least=0),
            _read_ids(arrays, "document", tokens, least=-1),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is damaged ({error})") from None


def _read_ids(
    arrays: dict[str, np.ndarray], name: str, tokens: Sequence[int], *, least: int
) -> tuple[Tensor, ...]:
    """Returns the ids of every micro-batch's tokens, or nothing where the file has none."""
    if name not in arrays:
        return ()
    ids = arrays[name]
    if any(count < 0 for count in tokens):
        raise ValueError(f"{tokens} are no numbers of tokens")
    if ids.shape != (sum(tokens),) or ids.dtype.kind not in "iu" or (ids < least).any():
        raise ValueError(
            f"{name} ids of shape {ids.shape} and type {ids.dtype} are not those of {tokens} tokens"
        )
    return torch.from_numpy(ids.astype(np.int64)).split(list(tokens))


def _read_calls(
    step: int, stored: Sequence[dict[str, Any]], arrays: dict[str, np.ndarray]
) -> Iterator[RoutedCall]:
    num_read = {"expert": 0, "source": 0, "target": 0}

    def read(name: str, count: int, end: int) -> Tensor:
        first = num_read[name]
        values = arrays[name][first : first + count].astype(np.int64)
        num_read[name] += count
        if not 0 <= count <= len(values) or (count and not 0 <= values.min() <= values.max() < end):
            raise ValueError(f"{name} numbers are missing or out of range")
        return torch.from_numpy(values)

    for plain in stored:
        sizes = _StoredCall(**plain)
        routes = _read_routes(sizes, read) if sizes.lists_experts else _slots(sizes)
        yield RoutedCall(
            CallId(step, sizes.micro_batch, sizes.depth, sizes.layer),
            routes,
            num_rows=sizes.num_rows if sizes.lists_experts else len(routes.expert_N),
            width_in=sizes.width_in,
            width_out=sizes.width_out,
        )
    left = {
        name: len(arrays[name]) - count
        for name, count in num_read.items()
        if len(arrays[name]) != count
    }
    if left:
        raise ValueError(f"numbers that belong to no call: {left}")


def _read_routes(sizes: _StoredCall, read: Callable[[str, int, int], Tensor]) -> Routes:
    """Returns a call's routes with gate weights of 1, rows from the file or from their rule."""
    count = sizes.num_routes
    expert_N = read("expert", count, sizes.num_experts)
    if sizes.lists_rows:
        source_N = read("source", count, sizes.num_rows)
        target_N = read("target", count, sizes.num_targets)
    else:
        source_N = torch.arange(count) // sizes.per_source
        target_N = torch.arange(count) // sizes.per_target
    return Routes(
        source_N,
        expert_N,
        torch.ones(count),
        target_N,
        sizes.num_experts,
        sizes.num_targets,
        sizes.per_source,
        sizes.per_target,
    )


def _slots(sizes: _StoredCall) -> Routes:
    """Returns equally many routes for every expert, each with a row of its own."""
    count = sizes.per_expert * sizes.num_experts
    if count != sizes.num_routes:
        raise ValueError(f"{sizes.num_routes} routes are not {sizes.per_expert} per expert")
    return slot_routes(count, num_experts=sizes.num_experts, device=torch.device("cpu"))
