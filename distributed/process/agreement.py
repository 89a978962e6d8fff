"""Do all ranks mean the same? They compare what they are about to do before they do it together,
through the rendezvous store.

Ranks that differ would wait for each other for ever, or train something that nobody asked for. So
each leaves a digest of its facts (key -> value, all text) in the store; rank 0 compares, and if one
differs all facts are laid side by side and every rank raises the same AgreementError, which says
who has what. A rank that does not come is named after the timeout. Where they differ rank 0 leaves
last: it may be the one that serves the store.

Cost where all agree: four small messages per rank and one wait, 2 ms on one machine. No process
group is needed.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ...own_parts import own_digests
from ..layout import Layout, spell_ranks
from ..local_shard import local_shard_of

_GRACE_S = 5.0  # what rank 0's result may be later than its own wait
_LEAVE_S = 2.0  # how long rank 0, whose process may serve the store, waits for others to have heard
_MOST_KEYS = 20
_ROOT = Path(__file__).resolve().parents[2]
# Packages that lie beside the core in a checkout; no rank runs them.
_BESIDE = {"benchmarks", "conform", "dashboard", "science"}


class AgreementError(ValueError):
    """Raised where ranks cannot run together: some differ, or some did not come.

    It has the same text on every rank.
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
    """Compares facts (key to value) between all ranks, and returns if they are the same everywhere.

    Every rank must call it, with the same `what` ("run", "parameters").

    Raises:
        AgreementError: which key has which value on which ranks; or which ranks did not come within
            `timeout_s`.
    """
    if world_size == 1:
        return
    turn = store.add(f"agreement/{what}/turn/{rank}", 1)  # the same question may be asked again
    comparison = _Comparison(
        store,
        f"agreement/{what}/{turn}",
        what,
        rank=rank,
        world_size=world_size,
        timeout_s=timeout_s,
    )
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
    """Returns a digest of every module of the package that this process runs, in C++ too.

    And one of every module with parts of the user's own.
    """
    files = list(_ROOT.glob("*.py"))
    for package in {file.parent.name for file in _ROOT.glob("*/__init__.py")} - _BESIDE:
        files += (_ROOT / package).rglob("*.py")
        files += (_ROOT / package).rglob("*.cpp")
    return {
        f"code {file.relative_to(_ROOT).as_posix()}": _digest(file.read_bytes())
        for file in sorted(files)
    } | {f"module {name}": digest for name, digest in own_digests().items()}


def layout_facts(layout: Layout) -> dict[str, str]:
    """Returns the layout as text; its tables follow from it and the code."""
    return {"layout": str(layout)}


def parameter_facts(model: nn.Module) -> dict[str, str]:
    """Returns names, types and global shapes, which are equal on ranks that store unlike shards."""
    facts = {}
    for name, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        facts[f"parameter {name}"] = f"{list(local_shard_of(parameter).global_shape)} {dtype}"
    return facts


def flat_facts(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Flattens nested plain values, as of a configuration, to facts with dotted keys.

    `flat_facts("config", {"train": {"seed": 0}})` is `{"config train.seed": "0"}`.
    """
    return {f"{prefix} {'.'.join(path)}": json.dumps(value) for path, value in _leaves(values, ())}


def version_facts() -> dict[str, str]:
    """Returns the versions that must be equal before anything else can be compared."""
    from ... import __version__

    return {"torch version": torch.__version__, "moebius version": __version__}


class _Comparison:
    """One comparison between all ranks: the keys of the store that they write and read for it."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        what: str,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        self._store, self._prefix, self._what = store, prefix, what
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s

    def settle(self, kind: str, own: str, compare: Callable[[list[str]], str]) -> str:
        """Posts this rank's text of that kind; returns what rank 0 finds in the texts of all."""
        self._store.set(f"{self._prefix}/{kind}/{self._rank}", own)
        if self._rank:
            return self.await_result(kind)
        keys = [f"{self._prefix}/{kind}/{rank}" for rank in range(self._world_size)]
        if _wait_for(self._store, keys, self._timeout_s):
            found = compare([text.decode() for text in self._store.multi_get(keys)])
        else:
            came = [self._store.check([key]) for key in keys]
            found = self._absence([rank for rank, has_come in enumerate(came) if not has_come])
        self._store.set(f"{self._prefix}/{kind}", found)
        return found

    def await_result(self, kind: str) -> str:
        """Waits for what rank 0 finds, and returns it."""
        key = f"{self._prefix}/{kind}"
        for _ in range(2):  # rank 0 may have come late, and then waits as long as we did
            if _wait_for(self._store, [key], self._timeout_s + _GRACE_S):
                return self._store.get(key).decode()
            if not self._store.check([f"{self._prefix}/digest/0"]):
                return self._absence([0])
        return (
            f"rank 0 came, but did not say within {2 * self._timeout_s:g} s whether the ranks "
            f"agree on the {self._what}"
        )

    def leave(self) -> None:
        """Lets rank 0 leave after all that came, for with its process the store may end.

        The others would get an error of the network in place of what rank 0 found.
        """
        if self._rank:
            with contextlib.suppress(dist.DistError):  # rank 0 waits no longer than _LEAVE_S
                self._store.set(f"{self._prefix}/heard/{self._rank}", "")
            return
        came = [
            other
            for other in range(1, self._world_size)
            if self._store.check([f"{self._prefix}/digest/{other}"])
        ]
        _wait_for(self._store, [f"{self._prefix}/heard/{other}" for other in came], _LEAVE_S)

    def _absence(self, missing: list[int]) -> str:
        return (
            f"{_spell(missing)} of {self._world_size} did not come within {self._timeout_s:g} s to "
            f"compare the {self._what}: see the logs of "
            f"{'it' if len(missing) == 1 else 'these'} first (train.timeout_s is how long the "
            "others wait)"
        )


def spell_difference(what: str, facts: list[dict[str, str]]) -> str:
    """Spells which key has which value on which ranks, one key per line; `facts` are by rank."""
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


def _spell(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spell_ranks(ranks)}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
