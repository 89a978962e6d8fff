"""Do all ranks mean the same? They compare what they are about to do before they do it together,
through the rendezvous store.

Ranks that differ would wait for each other for ever, or train something that nobody asked for. So
each leaves a digest of its facts (key -> value, all text) in the store; rank 0 compares, and if one
differs all facts are laid side by side and every rank raises the same AgreementError, which says
who has what. A rank that does not come is named after the timeout.

Cost where all agree: four small messages per rank and one wait, 2 ms on one machine. No process
group is needed.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..layout import Layout, rank_tables, spell_ranks
from ..local_shard import local_shard_of

_GRACE_S = 5.0  # what rank 0's verdict may be later than its own wait
_MOST_KEYS = 20
_ROOT = Path(__file__).resolve().parents[2]


class AgreementError(ValueError):
    """The ranks cannot run together: some differ, or some did not come. The same text on every
    rank.
    """


def agree(
    what: str,
    facts: Mapping[str, str],
    *,
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
) -> None:
    """Returns if all ranks have the same facts. Every rank must call it, with the same `what`
    ("run", "parameters").

    Raises:
        AgreementError: which key has which value on which ranks; or which ranks did not come within
            `timeout_s`.
    """
    if world_size == 1:
        return
    turn = store.add(f"agreement/{what}/turn/{rank}", 1)  # the same question may be asked again
    board = _Board(store, f"agreement/{what}/{turn}", world_size, timeout_s)
    board.post("digest", rank, _digest(json.dumps(dict(facts), sort_keys=True).encode()))
    verdict = board.judge(what) if rank == 0 else board.read("verdict", what)
    if verdict == "differ":
        board.post("facts", rank, json.dumps(dict(facts)))
        verdict = board.compare(what) if rank == 0 else board.read("difference", what)
    if verdict != "agreed":
        raise AgreementError(verdict)


def code_facts() -> dict[str, str]:
    """A digest of every module of the package that this process runs, those in C++ too."""
    in_rooms = (
        file
        for room in _rooms()
        for end in ("py", "cpp")
        for file in (_ROOT / room).rglob(f"*.{end}")
    )
    files = sorted([*_ROOT.glob("*.py"), *in_rooms])
    return {
        f"code {file.relative_to(_ROOT).as_posix()}": _digest(file.read_bytes()) for file in files
    }


def layout_facts(layout: Layout) -> dict[str, str]:
    """The layout, and a digest of all its groups."""
    return {"layout": str(layout), "rank tables": _digest(json.dumps(rank_tables(layout)).encode())}


def parameter_facts(model: nn.Module) -> dict[str, str]:
    """Names, types and whole shapes, which are the same on ranks that hold unlike parts."""
    return {
        f"parameter {name}": f"{list(local_shard_of(parameter).global_shape)} {str(parameter.dtype).removeprefix('torch.')}"
        for name, parameter in model.named_parameters()
    }


def flat_facts(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Nested plain values, as of a configuration, as one level: {"config": {"train": {"seed": 0}}}
    -> "config train.seed".
    """
    return {f"{prefix} {'.'.join(path)}": json.dumps(value) for path, value in _leaves(values, ())}


def version_facts() -> dict[str, str]:
    """What has to be the same before anything else can be compared."""
    from ... import __version__

    return {"torch version": torch.__version__, "moebius version": __version__}


class _Board:
    """Where the ranks of one question leave their answers."""

    def __init__(self, store: Store, prefix: str, world_size: int, timeout_s: float) -> None:
        self._store, self._prefix, self._world_size, self._timeout_s = (
            store,
            prefix,
            world_size,
            timeout_s,
        )

    def post(self, kind: str, rank: int, text: str) -> None:
        self._store.set(f"{self._prefix}/{kind}/{rank}", text)

    def judge(self, what: str) -> str:
        """Rank 0: waits for all digests and tells all ranks what comes of them."""
        if missing := self._missing("digest"):
            return self._publish("verdict", self._absence(missing, what))
        digests = set(self._collect("digest"))
        return self._publish("verdict", "agreed" if len(digests) == 1 else "differ")

    def compare(self, what: str) -> str:
        """Rank 0: lays all facts side by side."""
        if missing := self._missing("facts"):
            return self._publish("difference", self._absence(missing, what))
        return self._publish(
            "difference",
            spell_difference(what, [json.loads(text) for text in self._collect("facts")]),
        )

    def read(self, kind: str, what: str) -> str:
        """What rank 0 says."""
        key = f"{self._prefix}/{kind}"
        for _ in range(2):  # rank 0 may have come late, and then waits as long as we did
            if _arrive(self._store, [key], self._timeout_s + _GRACE_S):
                return self._store.get(key).decode()
            if not self._store.check([f"{self._prefix}/digest/0"]):
                return self._absence([0], what)
        return f"rank 0 came, but did not say within {2 * self._timeout_s:g} s whether the ranks agree on the {what}"

    def _missing(self, kind: str) -> list[int]:
        keys = [f"{self._prefix}/{kind}/{rank}" for rank in range(self._world_size)]
        if _arrive(self._store, keys, self._timeout_s):
            return []
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def _collect(self, kind: str) -> list[str]:
        keys = [f"{self._prefix}/{kind}/{rank}" for rank in range(self._world_size)]
        return [answer.decode() for answer in self._store.multi_get(keys)]

    def _publish(self, kind: str, text: str) -> str:
        self._store.set(f"{self._prefix}/{kind}", text)
        return text

    def _absence(self, missing: list[int], what: str) -> str:
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {spell_ranks(missing)}"
        return (
            f"{who} of {self._world_size} did not come within {self._timeout_s:g} s to compare the "
            f"{what}: see the logs of "
            f"{'it' if len(missing) == 1 else 'these'} first (train.timeout_s is how long the "
            "others wait)"
        )


def spell_difference(what: str, facts: list[dict[str, str]]) -> str:
    """Which key has which value on which ranks, one key per line; facts by rank."""
    keys = dict.fromkeys(key for own in facts for key in own)
    unlike = [key for key in keys if len({own.get(key) for own in facts}) > 1]
    lines = [f"the ranks differ in the {what}, so none of them starts:"]
    for key in unlike[:_MOST_KEYS]:
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(facts):
            ranks.setdefault(_short(own.get(key, "absent")), []).append(rank)
        lines.append(
            f"  {key}: " + "; ".join(f"{value} on {_spell(who)}" for value, who in ranks.items())
        )
    if len(unlike) > _MOST_KEYS:
        lines.append(f"  and {len(unlike) - _MOST_KEYS} more")
    return "\n".join([*lines, "start all ranks with the same run folder, code and environment"])


def _arrive(store: Store, keys: list[str], timeout_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return False
    return True


def _rooms() -> Iterable[str]:
    """Folders of the package; what lies beside it in a checkout (tests, benchmarks) does not run."""
    folders = {file.parent.name for file in _ROOT.glob("*/__init__.py")}
    return sorted(folders - {"benchmarks"})


def _leaves(
    values: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _spell(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spell_ranks(ranks)}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
