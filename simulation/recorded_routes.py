"""Reads routes that a run recorded (train/record/route_trace.py): the files are untrusted.

Gate weights and rows are not in them; read back, every weight is 1. Calls whose routes have known
counts get a row of its own for each of their routes.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..model.routing import Routes, slot_routes
from ..train.record.route_tap import CallId, RoutedCall
from ..train.record.route_trace import FOLDER, FORMAT, RecordedRank, StoredCall

_NAME = re.compile(r"step_(\d{8})-rank_(\d{4,})_of_(\d{4,})\.npz")


def recorded_steps(run_dir: Path) -> dict[int, list[Path]]:
    """Returns the files of every step of which all ranks are there, in the order of ranks.

    A step that was recorded on several worlds (before and after a run was continued on another) is
    taken from the newest.

    Raises:
        ValueError: there is no such step.
    """
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for path in (run_dir / FOLDER).glob("step_*.npz"):
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
        sizes = StoredCall(**plain)
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


def _read_routes(sizes: StoredCall, read: Callable[[str, int, int], Tensor]) -> Routes:
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


def _slots(sizes: StoredCall) -> Routes:
    """Returns equally many routes for every expert, each with a row of its own."""
    count = sizes.per_expert * sizes.num_experts
    if count != sizes.num_routes:
        raise ValueError(f"{sizes.num_routes} routes are not {sizes.per_expert} per expert")
    return slot_routes(count, num_experts=sizes.num_experts, device=torch.device("cpu"))
