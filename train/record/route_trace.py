"""Records routes in training, for `moebius simulate --trace` and for the analysis of experts and
tokens.

Every rank writes its own file, and simulation/recorded_routes.py reads them:

    RUN/routing/step_00000040-rank_0003_of_0004.npz       one file per recorded step and rank

Recorded are the first step of a run and every n-th (`train.record_routing`). A file has four to six
arrays, without pickle:

    meta      JSON in bytes: step, rank, ranks, tokens of every micro-batch, and every call's layer, sizes and rule
    expert    uint16, or uint32 if too narrow: the experts of all routes, call after call
    source    int32: source rows of calls whose routes follow no rule (some were dropped); otherwise empty
    target    int32: the same of target rows
    token     uint16, or int32 if too narrow: the ids of all input tokens, micro-batch after micro-batch;
              absent in older files
    document  int32: the same of the tokens' documents, −1 padding; only if the data has document
    ids

Calls with `per_expert` (mixtures, expert choice) store only their sizes, which fully determine the
traffic: when read, each of their routes gets its own row. Gate weights and rows are not recorded;
when read, every weight is 1. A MoEUT's route costs 2 bytes before compression, about 1.5 after, and
28 in memory when its step is read.

Recording changes nothing: no collective, no random number, the same loss bit for bit. The host
waits for the device once per recorded step. If a file cannot be written, the run continues with a
warning.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...model.transformer import Transformer
from .route_tap import RoutedCall, tap

logger = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "routing"


@dataclass(frozen=True)
class RecordedRank:
    """Holds one rank's routes in one step."""

    step: int
    rank: int
    num_ranks: int
    tokens: tuple[int, ...]  # number in every micro-batch
    calls: tuple[RoutedCall, ...]
    # int64, of every micro-batch, row after row; empty: not recorded
    token_ids: tuple[Tensor, ...] = ()
    document_ids: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class StoredCall:
    """Holds a call's sizes, as in the file's `meta`."""

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
        """Returns whether the file lists the expert of every route."""
        return not self.per_expert

    @property
    def lists_rows(self) -> bool:
        """Returns whether the file lists source and target rows, which follow no rule."""
        has_rule = self.per_source > 0 and self.per_target > 0
        return not self.per_expert and not has_rule


class StepTrace:
    """Records one optimizer step of one rank, if the step is wanted."""

    def __init__(
        self, model: Transformer, run_dir: Path, *, step: int, every: int, rank: int, num_ranks: int
    ) -> None:
        """Decides whether to record the step: `step` counts from 1; `every` 0: never."""
        self.wanted = every > 0 and (step == 1 or step % every == 0)
        self._model, self._run_dir = model, run_dir
        self._step, self._rank, self._num_ranks = step, rank, num_ranks
        self._token_ids: list[Tensor] = []  # of every micro-batch
        self._document_ids: list[Tensor] = []
        self._calls: list[RoutedCall] = []

    def micro_batch(
        self, tokens_BS: Tensor, document_ids_BS: Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Records one micro-batch's forward pass while the context is open.

        Args:
            tokens_BS: its input.
            document_ids_BS: these tokens' documents, −1 padding; None: unknown, for all
                micro-batches.
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
        """Writes the record; a failed write is only a warning."""
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
                "step %d: its routing could not be recorded (%s); the run continues",
                self._step,
                error,
            )


def write_rank(run_dir: Path, recorded: RecordedRank) -> Path:
    """Writes one rank's step atomically to one file, and returns its path.

    Raises:
        OSError: the file cannot be written.
    """
    folder = run_dir / FOLDER
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


def _sizes_of(call: RoutedCall) -> StoredCall:
    routes = call.routes
    return StoredCall(
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
