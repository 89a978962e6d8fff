"""Compares facts between all ranks through the rendezvous store before they act on them.

Ranks that differ would wait for each other forever, or train something unintended. Each rank
therefore posts a digest of its facts (key -> value, all text) and rank 0 compares them. If one
differs, all ranks post their facts and raise the same AgreementError, which says which rank has what.
After the timeout it names the ranks that did not come. On a difference rank 0 leaves last, because
its process may serve the store.

Cost if all agree: four small messages per rank and one wait, 2 ms on one machine. No process group
is needed.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ...plugins import own_digests
from ..layout import Layout, named_ranks
from ..local_shard import local_shard_of

_GRACE_S = 5.0  # extra wait for rank 0's result
_LEAVE_S = 2.0  # how long rank 0, whose process may serve the store, waits for the others to read
_MOST_KEYS = 20
_ROOT = Path(__file__).resolve().parents[2]
# Packages beside the core in a checkout, which no rank runs.
_BESIDE = {"benchmarks", "conform", "dashboard", "science"}


class AgreementError(ValueError):
    """Raised, with the same text on every rank, if ranks differ or some did not come."""


def agree(
    what: str,
    facts: Mapping[str, str],
    *,
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
) -> None:
    """Compares facts (key to value) between all ranks.

    Every rank must call it with the same `what` ("run", "parameters").

    Raises:
        AgreementError: the facts differ, or ranks did not come within `timeout_s`; names keys, values
            and ranks.
    """
    if world_size == 1:
        return
    turn = store.add(f"agreement/{what}/turn/{rank}", 1)  # `what` may be compared again
    prefix = f"agreement/{what}/{turn}"
    comparison = _Comparison(store, prefix, what, rank, world_size, timeout_s)
    result = comparison.settle(
        "digest",
        _digest(json.dumps(dict(facts), sort_keys=True).encode()),
        lambda digests: "agreed" if len(set(digests)) == 1 else "differ",
    )
    if result == "differ":
        result = comparison.settle(
            "facts",
            json.dumps(dict(facts)),
            lambda texts: spell_difference(what, [json.loads(text) for text in texts]),
        )
    if result != "agreed":
        comparison.leave()
        raise AgreementError(result)


def code_facts() -> dict[str, str]:
    """Returns digests of the package's Python and C++ files, and of modules with the user's own parts."""
    files = list(_ROOT.glob("*.py"))
    for package in {file.parent.name for file in _ROOT.glob("*/__init__.py")} - _BESIDE:
        files += (_ROOT / package).rglob("*.py")
        files += (_ROOT / package).rglob("*.cpp")
    return {
        f"code {file.relative_to(_ROOT).as_posix()}": _digest(file.read_bytes())
        for file in sorted(files)
    } | {f"module {name}": digest for name, digest in own_digests().items()}


def layout_facts(layout: Layout) -> dict[str, str]:
    """Returns the layout as text, which determines all its tables."""
    return {"layout": str(layout)}


def parameter_facts(model: nn.Module) -> dict[str, str]:
    """Returns the parameters' names, dtypes and global shapes, which do not depend on the shard."""
    facts = {}
    for name, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        facts[f"parameter {name}"] = f"{list(local_shard_of(parameter).global_shape)} {dtype}"
    return facts


def flat_facts(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Flattens nested values to facts: ("config", {"train": {"seed": 0}}) to {"config train.seed": "0"}."""
    return {f"{prefix} {'.'.join(path)}": json.dumps(value) for path, value in _leaves(values, ())}


def version_facts() -> dict[str, str]:
    """Returns the versions of torch and moebius, which must be equal on all ranks."""
    from ... import __version__

    return {"torch version": torch.__version__, "moebius version": __version__}


@dataclass(frozen=True)
class _Comparison:
    """One comparison between all ranks, through its own keys in the store."""

    store: Store
    prefix: str
    what: str
    rank: int
    world_size: int
    timeout_s: float

    def settle(self, kind: str, own: str, compare: Callable[[list[str]], str]) -> str:
        """Posts this rank's text; returns rank 0's result of comparing all texts."""
        self.store.set(f"{self.prefix}/{kind}/{self.rank}", own)
        if self.rank:
            return self.await_result(kind)
        keys = [f"{self.prefix}/{kind}/{rank}" for rank in range(self.world_size)]
        if _wait_for(self.store, keys, self.timeout_s):
            found = compare([text.decode() for text in self.store.multi_get(keys)])
        else:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            found = self._absence(missing)
        self.store.set(f"{self.prefix}/{kind}", found)
        return found

    def await_result(self, kind: str) -> str:
        """Waits for rank 0's result and returns it."""
        key = f"{self.prefix}/{kind}"
        for _ in range(2):  # rank 0 may come late and then waits as long as this rank did
            if _wait_for(self.store, [key], self.timeout_s + _GRACE_S):
                return self.store.get(key).decode()
            if not self.store.check([f"{self.prefix}/digest/0"]):
                return self._absence([0])
        return (
            f"rank 0 came, but did not report within {2 * self.timeout_s:g} s whether the ranks agree on the "
            f"{self.what}"
        )

    def leave(self) -> None:
        """Makes rank 0 leave last, because the store may end with its process.

        The others would otherwise get a network error instead of rank 0's result.
        """
        if self.rank:
            with contextlib.suppress(dist.DistError):  # rank 0 waits no longer than _LEAVE_S
                self.store.set(f"{self.prefix}/heard/{self.rank}", "")
            return
        others = range(1, self.world_size)
        came = [rank for rank in others if self.store.check([f"{self.prefix}/digest/{rank}"])]
        _wait_for(self.store, [f"{self.prefix}/heard/{rank}" for rank in came], _LEAVE_S)

    def _absence(self, missing: list[int]) -> str:
        return (
            f"{named_ranks(missing)} of {self.world_size} did not come within {self.timeout_s:g} s to compare the "
            f"{self.what}: see {'its' if len(missing) == 1 else 'their'} logs first (train.timeout_s is how "
            "long the others wait)"
        )


def spell_difference(what: str, facts: list[dict[str, str]]) -> str:
    """Lists which key has which value on which ranks, one key per line; `facts` are by rank."""
    keys = dict.fromkeys(key for own in facts for key in own)
    unlike = [key for key in keys if len({own.get(key) for own in facts}) > 1]
    lines = [f"the ranks differ in the {what}, so none of them starts:"]
    for key in unlike[:_MOST_KEYS]:
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(facts):
            ranks.setdefault(_short(own.get(key, "absent")), []).append(rank)
        lines.append(
            f"  {key}: "
            + "; ".join(f"{value} on {named_ranks(who)}" for value, who in ranks.items())
        )
    if len(unlike) > _MOST_KEYS:
        lines.append(f"  and {len(unlike) - _MOST_KEYS} more")
    return "\n".join([*lines, "start all ranks with the same run folder, code and environment"])


def _wait_for(store: Store, keys: list[str], timeout_s: float) -> bool:
    if not keys:
        return True
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return False
    return True


def _leaves(
    values: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
