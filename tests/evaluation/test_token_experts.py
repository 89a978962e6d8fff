"""Which experts serve a token, by recorded routes against a plain loop over them."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import tiny_model
from torch import Tensor

from moebius.evaluation.token_experts import ExpertUse, frequent_experts
from moebius.model.documents import mark_documents
from moebius.train.record.route_tap import tap
from moebius.train.record.route_trace import RecordedRank, StepTrace, read_rank, write_rank

RANKS, MICRO_BATCHES = 2, 2


def tokens_of(rank: int, micro_batch: int) -> Tensor:
    """Few ids, so that each comes often."""
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    return torch.randint(7, (4, 6), generator=generator)


def record(name: str, run_dir: Path, ids_BS: Tensor | None = None) -> list[tuple[Tensor, Any]]:
    """Two ranks' step of two micro-batches; the tokens and calls of every pass."""
    model = tiny_model(name)
    documents = None
    if ids_BS is not None:
        documents = mark_documents(ids_BS, torch.device("cpu"), attention=False, balance=False)
    passes = []
    for rank in range(RANKS):
        trace = StepTrace(model, run_dir, step=1, every=1, rank=rank, num_ranks=RANKS)
        for micro_batch in range(MICRO_BATCHES):
            tokens_BS = tokens_of(rank, micro_batch)
            with trace.micro_batch(tokens_BS, ids_BS), tap(model) as recorded:
                model(tokens_BS, documents=documents)
            passes.append((tokens_BS.flatten(), recorded))
        trace.save()
    return passes


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("moeut", "feed_forward"),
        ("moeut", "value"),
        ("moeut", "output"),
        ("switch", "feed_forward"),
        ("mh_moe", "feed_forward"),
        ("sut_no_act", "query"),
    ],
)
def test_the_most_frequent_experts_are_those_of_a_plain_count(
    name: str, kind: str, tmp_path: Path
) -> None:
    passes = record(name, tmp_path)
    for token_id in (0, 3):
        counts: dict[int, Counter[int]] = {}
        for ids_T, calls in passes:
            for call in (each for each in calls if each.id.kind == kind):
                each_token = call.num_rows // len(ids_T)
                for row, expert in zip(
                    call.routes.source_N.tolist(), call.routes.expert_N.tolist(), strict=True
                ):
                    if ids_T[row // each_token] == token_id:
                        counts.setdefault(call.id.depth, Counter())[expert] += 1
        found = frequent_experts(tmp_path, token_id, kind=kind, top=3)
        assert found.keys() == counts.keys()
        for depth, uses in found.items():
            ordered = sorted(counts[depth].items(), key=lambda entry: (-entry[1], entry[0]))
            total = counts[depth].total()
            assert uses == tuple(ExpertUse(e, n, n / total) for e, n in ordered[:3])
    assert frequent_experts(tmp_path, 60, kind=kind) == {}


def test_padding_is_never_among_the_served(tmp_path: Path) -> None:
    ids_BS = torch.zeros(4, 6, dtype=torch.int32)
    ids_BS[:, 4:] = -1
    record("moeut", tmp_path, ids_BS)
    count = sum(
        int((tokens_of(rank, micro_batch)[:, :4] == 2).sum())
        for rank in range(RANKS)
        for micro_batch in range(MICRO_BATCHES)
    )
    found = frequent_experts(tmp_path, 2, top=1000)
    top_k = tiny_model("moeut").config.experts.router.top_k  # type: ignore[union-attr]
    assert {sum(use.count for use in uses) for uses in found.values()} == {count * top_k}
    recorded = read_rank(next((tmp_path / "routing").iterdir()))
    assert [ids.tolist() for ids in recorded.document_ids] == [ids_BS.flatten().tolist()] * 2


def test_what_cannot_be_asked_is_said(tmp_path: Path) -> None:
    record("moeut", tmp_path / "moeut")
    with pytest.raises(
        ValueError, match="no 'query' was recorded; there are feed_forward, output, value"
    ):
        frequent_experts(tmp_path / "moeut", 1, kind="query")
    record("soft_moe", tmp_path / "soft")
    with pytest.raises(ValueError, match="has no routes of single tokens"):
        frequent_experts(tmp_path / "soft", 1)
    with pytest.raises(ValueError, match="has no recorded routing"):
        frequent_experts(tmp_path, 1)
    for path in (tmp_path / "moeut" / "routing").iterdir():
        old = dataclasses.replace(read_rank(path), token_ids=(), document_ids=())
        write_rank(tmp_path / "old", old)
    with pytest.raises(
        ValueError, match="recorded without the ids of its tokens, by an older version"
    ):
        frequent_experts(tmp_path / "old", 1)


def test_ids_are_read_as_they_were_written(tmp_path: Path) -> None:
    for ids, dtype in (((0, 65_535, 3), np.uint16), ((0, 65_536, 3), np.int32)):
        recorded = RecordedRank(1, 0, 1, (2, 1), (), torch.tensor(ids).split([2, 1]))
        path = write_rank(tmp_path, recorded)
        with np.load(path) as file:
            assert file["token"].dtype == dtype
            assert "document" not in file.files
        assert [each.tolist() for each in read_rank(path).token_ids] == [list(ids[:2]), [ids[2]]]
        assert read_rank(path).document_ids == ()


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        ((2, 1), {"token": np.zeros(2, np.uint16)}),
        ((2, 1), {"token": np.zeros((3, 1), np.uint16)}),
        ((2, 1), {"token": np.zeros(3, np.float32)}),
        ((2, 1), {"token": np.full(3, -1, np.int32)}),
        ((2, 1), {"document": np.full(3, -2, np.int32)}),
        ((4, -1), {}),
    ],
)
def test_ids_that_cannot_be_are_refused(
    tokens: tuple[int, ...], changes: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = write_rank(
        tmp_path, RecordedRank(1, 0, 1, tokens, (), (torch.zeros(3, dtype=torch.int64),))
    )
    with np.load(path) as file:
        arrays = {name: file[name] for name in file}
    spoiled: Any = arrays | changes
    np.savez_compressed(path, **spoiled)
    with pytest.raises(ValueError, match="is damaged"):
        read_rank(path)
