"""Ranks compare facts before they act; all of them learn of a difference or an absent rank."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from moebius.distributed.layout import Layout
from moebius.distributed.process import agreement
from moebius.distributed.process.agreement import (
    AgreementError,
    agree,
    code_facts,
    flat_facts,
    layout_facts,
    parameter_facts,
    version_facts,
)

ROOT = Path(agreement.__file__).parents[2]
CONFIG = {"train": {"seed": 0, "steps": 10}, "model": {"router": {"kind": "sigmoid"}}}


def together(facts_of_rank, *, timeout_s=10.0, absent=(), late=(), stores=None):
    """What each rank of a world of threads heard: None, or the error's text."""
    heard: list[Any] = [None] * len(facts_of_rank)
    stores = stores or dict.fromkeys(range(len(heard)), HashStore())
    options = {"world_size": len(heard), "timeout_s": timeout_s}

    def live(rank):
        time.sleep(0.3 if rank in late else 0)
        try:
            agree("run", facts_of_rank[rank], store=stores[rank], rank=rank, **options)
        except (AgreementError, dist.DistError) as error:
            heard[rank] = str(error)
        del stores[rank]  # as its process ends

    lives = [
        threading.Thread(target=live, args=(rank,))
        for rank in range(len(heard))
        if rank not in absent
    ]
    for life in lives:
        life.start()
    for life in lives:
        life.join(120)
    return heard


def test_equal_facts_pass_as_often_as_asked():
    facts = {**flat_facts("config", CONFIG), **code_facts(), **version_facts()}
    assert together([facts] * 4) == [None] * 4
    store = HashStore()
    for _ in range(2):
        agree("run", facts, store=store, rank=0, world_size=1, timeout_s=1)


def test_all_ranks_hear_the_difference_though_rank_0_serves_the_store_and_ends(monkeypatch):
    """Without an agent the store ends with rank 0; the others are slow to read what it found."""
    monkeypatch.setattr(agreement, "_LEAVE_S", 60.0)
    await_result = agreement._Comparison.await_result

    def slowly(self, kind):
        time.sleep(0.3 if kind == "facts" else 0)
        return await_result(self, kind)

    monkeypatch.setattr(agreement._Comparison, "await_result", slowly)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(3)]
    stores = dict(enumerate([server, *clients]))
    del server, clients
    facts = [{"seed": str(rank // 3)} for rank in range(4)]
    heard = together(facts, stores=stores, timeout_s=60)
    assert len(set(heard)) == 1
    assert "the ranks differ in the run" in heard[0]
    assert "seed: 0 on ranks 0-2; 1 on rank 3" in heard[0]


CHANGED = flat_facts("config", CONFIG | {"train": {"seed": 1, "steps": 10}})
THREE = parameter_facts(nn.Linear(3, 4))
NO_BIAS = parameter_facts(nn.Linear(3, 4, bias=False))


@pytest.mark.parametrize(
    ("unlike", "alike", "told"),
    [
        (
            CHANGED,
            flat_facts("config", CONFIG),
            ["config train.seed: 0 on ranks 0-1, 3; 1 on rank 2"],
        ),
        (
            code_facts() | {"code model/moe.py": "of another commit"},
            code_facts(),
            ["code model/moe.py: ", "of another commit on rank 2"],
        ),
        (
            layout_facts(Layout(dp_replicate=1, dp_shard=4, ep=2)),
            layout_facts(Layout(dp_replicate=2, dp_shard=2, ep=2)),
            ["layout: world 4 = dp_replicate 2 × dp_shard 2"],
        ),
        (NO_BIAS, THREE, ["parameter bias: [4] float32 on ranks 0-1, 3; absent on rank 2"]),
    ],
    ids=["config", "code", "layout", "more parameters"],
)
def test_every_rank_is_told_who_differs(unlike, alike, told):
    heard = together([alike, alike, unlike, alike])
    assert len(set(heard)) == 1
    for words in told:
        assert words in heard[0]
    assert "none of them starts" in heard[0]
    assert "train.steps" not in heard[0]  # what is equal is left out


@pytest.mark.parametrize(
    ("absent", "named"), [([3], "rank 3"), ([1, 2], "ranks 1-2"), ([0], "rank 0")]
)
def test_a_rank_that_does_not_come_is_named_on_all_others(absent, named, monkeypatch):
    monkeypatch.setattr(agreement, "_GRACE_S", 0.2)
    started = time.monotonic()
    heard = together([{"a": "b"}] * 4, timeout_s=0.5, absent=absent)
    assert time.monotonic() - started < 3
    for rank, text in enumerate(heard):
        assert (text is None) == (rank in absent)
        assert rank in absent or text.startswith(
            f"{named} of 4 did not come within 0.5 s to compare the run"
        )


def test_a_late_leader_is_waited_for(monkeypatch):
    monkeypatch.setattr(agreement, "_GRACE_S", 0.0)
    heard = together([{"a": "b"}] * 3, timeout_s=0.5, late=[0], absent=[2])
    assert heard[0] == heard[1]
    assert "rank 2 of 3 did not come" in heard[0]


def test_the_code_is_what_the_package_runs():
    facts = code_facts()
    assert {
        "code cli/main.py",
        "code __init__.py",
        "code model/moe.py",
        "code distributed/process/agreement.py",
        "code kernels/cpu/brgemm.cpp",
    } <= facts.keys()
    assert not any("tests/" in key or "benchmarks/" in key for key in facts)
    files = [key.removeprefix("code ") for key in facts if key.startswith("code ")]
    assert all((ROOT / file).is_file() for file in files)
    assert len(set(facts.values())) > len(facts) / 2  # digests of the contents
