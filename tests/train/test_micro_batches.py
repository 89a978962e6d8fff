"""Loss masks: only counted targets are in the loss, with equal weights for any micro-batches and
ranks.
"""

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from family import micro_batch_of, tiny_model
from parts import make_config
from small_model import MODEL
from trained import assembled, check_near, different, gradients
from world import run_ranks

from moebius.data_pipeline.errors import NothingToReadError
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.read.loader import Batch, ValidationBatch
from moebius.model.config.model_config import ModelConfig
from moebius.model.execution.precision import forward_in
from moebius.train import evaluate as evaluation
from moebius.train.config.run_config import Config, TrainConfig
from moebius.train.loop import step, train
from moebius.train.loss import micro_batch_loss
from moebius.train.metrics.spikes import SkipPolicy
from moebius.train.micro_batches import DocumentUse, MicroBatch, count_targets, split_batch
from moebius.train.run import Run

SEQUENCES, POSITIONS = 8, 24
BALANCED = MODEL.changed({"feed_forward.router.balance": 0.1, "attention.balance": 0.1})
# world, micro-batch, mesh
LAYOUTS: list[tuple[int, int, dict[str, Any]]] = [
    (1, 8, {}),
    (1, 2, {}),
    (2, 4, {}),
    (4, 1, {"ep": 2}),
]


def config_of(
    data: Path,
    *,
    micro_batch: int = 2,
    documents: bool = False,
    model: ModelConfig = BALANCED,
    **mesh: Any,
) -> Config:
    return make_config(
        data,
        model=model,
        data__seq_len=POSITIONS,
        data__document_attention=documents,
        optim__clip_norm=1e9,
        train__global_batch=SEQUENCES,
        train__micro_batch=micro_batch,
        train__balance_documents=documents,
        mesh=mesh,
    )


def rows() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 257, (SEQUENCES, POSITIONS + 1))


def uneven_mask() -> np.ndarray:
    """Counts nothing of one sequence, all of another, and parts of the others."""
    mask = np.random.default_rng(1).random((SEQUENCES, POSITIONS)) < 0.4
    mask[1], mask[2], mask[5, :-1] = False, True, False
    return mask


def document_ids() -> np.ndarray:
    """Returns documents of any length; two rows end with padding, and one is all padding."""
    ids = np.sort(np.random.default_rng(2).integers(0, 5, (SEQUENCES, POSITIONS + 1)), axis=1)
    ids[3, 20:], ids[4, 1:], ids[6] = -1, -1, -1
    return ids.astype(np.int32)


def batch_of(run: Run, mask: np.ndarray | None) -> Batch:
    """Returns this rank's share of the step, in micro-batches."""
    world, micro = run.process.world_size, run.config.train.micro_batch
    own = slice(*(SEQUENCES // world * each for each in (run.process.rank, run.process.rank + 1)))
    return Batch(
        rows()[own].reshape(-1, micro, POSITIONS + 1),
        first_sample=0,
        digest=0,
        loss_mask=None if mask is None else mask[own].reshape(-1, micro, POSITIONS),
        document_ids=(
            document_ids()[own].reshape(-1, micro, POSITIONS + 1)
            if run.config.data.document_attention
            else None
        ),
    )


def one_step(config: Config, run_dir: Path, mask: np.ndarray | None) -> dict[str, Any]:
    with assembled(config, run_dir) as run:
        result = step(run, batch_of(run, mask), 0.0)
        sums = result.meter.reduce()
        return {
            "loss": sums["loss"].item(),
            "regularisation": sums["regularisation"].item(),
            "counted": result.counted_targets,
            "norm": result.grad_norm,
            "routes": {name: load.sum().item() for name, load in sums.items() if "/load" in name},
            "gradients": {} if config.mesh.sharding == "fsdp" else gradients(run),
        }


def on_layouts(
    layouts: list[tuple[int, int, dict[str, Any]]],
    data: Path,
    folder: Path,
    mask: np.ndarray | None,
    **options: Any,
) -> list[dict[str, Any]]:
    found = []
    for number, (world, micro_batch, mesh) in enumerate(layouts):
        config = config_of(data, micro_batch=micro_batch, **options, **mesh)
        found += run_ranks(one_step, world, config, folder / str(number), mask)
    for each in found:
        check_near(each["gradients"], found[0]["gradients"] if each["gradients"] else {}, 1e-5)
    return found


def one_document_at_a_time(
    config: Config, run_dir: Path, mask: np.ndarray
) -> tuple[float, float, int]:
    """Computes loss, regularisation and targets by a loop over documents, each alone, and over
    every target, on full logits.
    """
    every = document_ids() if config.data.document_attention else np.zeros_like(document_ids())
    with assembled(config, run_dir) as run:
        model = run.model
        model.before_step(0)
        total, count, regularisation = 0.0, 0, 0.0
        for row, ids, counts in zip(torch.from_numpy(rows()), every, mask, strict=True):
            lengths, losses = [], []
            for document in sorted(set(ids[:-1].tolist()) - {-1}):
                [places] = np.nonzero(ids[:-1] == document)
                output = model(row[None, places])
                for place, logits_V in zip(places, output.logits_BSV[0], strict=True):
                    if counts[place] and ids[place + 1] >= 0:
                        total -= logits_V.log_softmax(-1)[row[place + 1]].item()
                        count += 1
                lengths.append(len(places))
                losses.append(output.regularisation_B.item())
            if lengths:
                regularisation += float(np.average(losses, weights=lengths)) / SEQUENCES
        return total / count, regularisation, count


@pytest.mark.slow
def test_the_loss_is_the_mean_over_counted_targets_on_every_layout(
    data: Path, tmp_path: Path
) -> None:
    mask, config = uneven_mask(), config_of(data, micro_batch=SEQUENCES)
    [expected] = run_ranks(one_document_at_a_time, 1, config, tmp_path, mask)
    for each in on_layouts(LAYOUTS, data, tmp_path, mask):
        assert (each["loss"], each["regularisation"]) == pytest.approx(expected[:2], rel=1e-6)
        assert each["counted"] == expected[2] == mask.sum()


@pytest.mark.slow
def test_drawn_numbers_are_the_same_on_every_layout(data: Path, tmp_path: Path) -> None:
    """Noise before the loops, a depth of every sequence's own, and dropped experts."""
    dropping = {"kind": "sigmoid", "top_k": 4, "balance": 0.0, "expert_dropout": 0.3}
    model = tiny_model("parcae_moe", {"feed_forward.router": dropping, "vocab_size": 257}).config
    layouts = [*LAYOUTS[:3], (2, 1, {"ep": 2})]
    found = on_layouts(layouts, data, tmp_path, None, model=model)
    losses = [each["loss"] for each in found]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)


@pytest.mark.slow
def test_a_balance_pooled_over_layers_weighs_the_same_on_every_layout(
    data: Path, tmp_path: Path
) -> None:
    """In transformers its weight grows with the number of micro-batches, and with the ranks."""
    router = {"kind": "token_choice", "top_k": 2, "renormalise": True, "balance": 0.1}
    router |= {"balance_pool": True, "balance_scope": "sequence"}
    model = MODEL.changed({"feed_forward.router": router, "attention.balance": 0.0})
    found = on_layouts([*LAYOUTS, (1, 1, {}), (2, 1, {})], data, tmp_path, None, model=model)
    values = [each["regularisation"] for each in found]
    assert min(values) > 0.1
    assert values == pytest.approx([values[0]] * len(values), rel=1e-6)


@pytest.mark.slow
def test_documents_train_as_if_each_were_alone_on_every_layout(data: Path, tmp_path: Path) -> None:
    """Covers attention, positions, balancing and padding, also with EP and sharded weights."""
    mask, config = uneven_mask(), config_of(data, micro_batch=SEQUENCES, documents=True)
    [expected] = run_ranks(one_document_at_a_time, 1, config, tmp_path, mask)
    real = int((document_ids()[:, :-1] >= 0).sum())
    sharded = {"ep": 2, "sharding": "fsdp", "dp_shard": 2}
    layouts = [*LAYOUTS[:2], (2, 2, {"ep": 2}), (2, 4, sharded)]
    found = on_layouts(layouts, data, tmp_path, mask, documents=True)
    for each in found:
        assert (each["loss"], each["regularisation"]) == pytest.approx(expected[:2], rel=1e-5)
        assert each["counted"] == expected[2]
        assert each["norm"] == pytest.approx(found[0]["norm"], rel=1e-5)
        assert each["routes"]["feed_forward/load"] == 3 * 4 * real
        assert each["routes"]["value/load"] == 4 * 4 * real


def test_documents_are_asked_for_where_there_are_none(data: Path) -> None:
    batch = Batch(rows().reshape(2, 4, -1), first_sample=0, digest=0)
    with pytest.raises(ValueError, match=r"document_attention=True and .*balance_documents=False"):
        split_batch(batch, torch.device("cpu"), DocumentUse(attention=True, balance=False))
    with pytest.raises(ValueError, match="needs document ids"):
        Config(train=TrainConfig(balance_documents=True))
    assert config_of(data, documents=True).train.balance_documents


@pytest.mark.parametrize("equal", [True, False])
def test_only_a_batch_that_says_so_promises_equal_rows(equal: bool) -> None:
    for ids, expected in ((None, equal), (document_ids().reshape(2, 4, -1), False)):
        batch = Batch(rows().reshape(2, 4, -1), 0, 0, document_ids=ids, equal_shapes=equal)
        found = split_batch(batch, torch.device("cpu"), DocumentUse(ids is not None, False))
        assert [micro_batch.equal_rows for micro_batch in found] == [expected] * 2


def test_a_mask_that_masks_nothing_changes_no_bit(data: Path, tmp_path: Path) -> None:
    everything = np.ones((SEQUENCES, POSITIONS), bool)
    [masked], [plain] = (
        run_ranks(one_step, 1, config_of(data), tmp_path / name, mask)
        for name, mask in (("masked", everything), ("plain", None))
    )
    assert (plain["counted"], masked["counted"]) == (None, SEQUENCES * POSITIONS)
    assert masked["loss"] == plain["loss"]
    assert different(masked["gradients"], plain["gradients"]) == []


def steps_without_targets(
    config: Config, run_dir: Path, masks: list[np.ndarray]
) -> tuple[list[int], list[bool], list[str]]:
    """Returns updates after each step, whether the gradient was finite, and the log."""
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("moebius.train.metrics.spikes").addHandler(listener)
    with assembled(config, run_dir) as run:
        updates, finite = [], []
        for mask in masks:
            before = [p.detach().clone() for p in run.model.parameters()]
            result = step(run, batch_of(run, mask), 1e-3)
            finite.append(
                all(p.grad.isfinite().all() for p in run.model.parameters() if p.grad is not None)
            )
            finite[-1] &= np.isfinite(result.grad_norm).item()
            changed = any(map(lambda a, b: not torch.equal(a, b), before, run.model.parameters()))
            assert changed == mask.any()
            updates.append(run.progress.updates)
        return updates, finite, said


def test_a_step_without_a_target_is_skipped_and_says_so(data: Path, tmp_path: Path) -> None:
    """Its balancing losses have gradients, but must not train alone."""
    nothing = np.zeros((SEQUENCES, POSITIONS), bool)
    masks = [uneven_mask(), nothing, uneven_mask()]
    found = run_ranks(steps_without_targets, 2, config_of(data), tmp_path, masks)
    warning = "step 2 had no target that counts in the loss, and its update was skipped"
    assert found == [([1, 1, 2], [True] * 3, [warning]), ([1, 1, 2], [True] * 3, [])]


def test_a_run_goes_on_where_no_target_counts_and_logs_no_loss(tmp_path: Path, caplog) -> None:
    text, folder = tmp_path / "text.jsonl", tmp_path / "shards"
    records = [{"q": f"{n}" * 999, "a": "y"} for n in range(30)]
    text.write_text("".join(json.dumps(record) + "\n" for record in records))
    values: dict[str, Any] = {"prompt_field": "q", "answer_field": "a", "tokenizer": "bytes"}
    prepare(PrepareConfig(input=(str(text),), validation_fraction=0.3, **values), folder)
    sizes = {"steps": 2, "global_batch": 1, "micro_batch": 1, "eval_rows": 1}
    config = make_config(folder, train=sizes)
    with pytest.raises(NothingToReadError, match="no target of the split 'validation'"):
        evaluation.check_validation(config)  # before a rank starts
    assert train(config, tmp_path / "run") == "finished"
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [(line["loss"], line["counted_targets"]) for line in steps] == [(None, 0)] * 2
    assert not [line for line in lines if line["kind"] == "eval"]
    assert "step 0 has no validation loss: " in caplog.text


def test_a_run_that_only_skips_ends_with_a_reason() -> None:
    judge = SkipPolicy(None)
    why, _ = judge.why_skipped(1.0, 0, [])
    assert judge.why_skipped(1.0, 3, []) == judge.why_skipped(1.0, None, []) == (None, None)
    not_finite = judge.why_skipped(float("nan"), 0, [])
    assert not_finite == judge.why_skipped(float("inf"), None, []) != (why, None)
    advised = {why: "check the data's loss mask", not_finite[0]: "lower optim.learning_rate"}
    for reason, advice in advised.items():
        judge.count(0, None, is_rank_0=False)
        for number in range(1, 100):
            judge.count(number, reason, is_rank_0=False)
        told = f"100 steps in a row up to step 100 were skipped, the last for {reason}: {advice}"
        with pytest.raises(ValueError, match=told):
            judge.count(100, reason, is_rank_0=False)


def test_without_a_mask_no_rank_is_asked() -> None:
    """There is no process group, so a collective would raise."""
    batch = Batch(rows().reshape(2, 4, -1), first_sample=0, digest=0)
    micro_batches = split_batch(batch, torch.device("cpu"), DocumentUse(False, False))
    assert [each.loss_mask_BS for each in micro_batches] == [None, None]
    assert count_targets(micro_batches, torch.device("cpu")) is None
    with pytest.raises(ValueError, match="process group"):
        count_targets(
            [MicroBatch(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))],
            torch.device("cpu"),
        )


def test_a_mask_without_the_number_of_targets_is_refused() -> None:
    forward = partial(forward_in, tiny_model("dense"), torch.float32)
    row, mask = torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="given: a mask and global_targets=None"):
        micro_batch_loss(forward, micro_batch_of(row, loss_mask_BS=mask), global_sequences=1)
    with pytest.raises(ValueError, match="given: no mask and global_targets=4"):
        micro_batch_loss(forward, micro_batch_of(row), global_sequences=1, global_targets=4)


# Evaluation -----------------------------------------------------------------------------------------------------------


def evaluate_masked(config: Config, run_dir: Path, mask: np.ndarray) -> tuple[float, int, float]:
    """Returns validation loss and number of targets, and the loss by a loop over targets."""

    def validation_batches(
        *_: object, rank: int, num_ranks: int, **__: object
    ) -> Iterator[ValidationBatch]:
        for first in range(0, SEQUENCES, 2 * num_ranks):
            own = slice(first + 2 * rank, first + 2 * rank + 2)
            valid = np.array([True, own.start < SEQUENCES - 2])  # the very last is a copy
            yield ValidationBatch(rows()[own], valid, mask[own])

    evaluation.validation_batches = validation_batches  # type: ignore[assignment]
    with assembled(config, run_dir) as run:
        model = run.model
        found = evaluation.evaluate(model, config, run.process)
        total = 0.0
        with torch.no_grad():
            for row, counts in zip(torch.from_numpy(rows()[:-1]), mask[:-1], strict=True):
                logits_SV = model.eval()(row[None, :-1]).logits_BSV[0]
                losses_S = F.cross_entropy(logits_SV, row[1:], reduction="none")
                total += losses_S[torch.from_numpy(counts)].sum().item()
        return found.loss, found.tokens, total / mask[:-1].sum()


def test_evaluation_is_per_counted_target_on_every_number_of_ranks(
    data: Path, tmp_path: Path
) -> None:
    mask = uneven_mask()
    for world in (1, 2):
        results = run_ranks(evaluate_masked, world, config_of(data), tmp_path / str(world), mask)
        for loss, tokens, expected in results:
            assert tokens == mask[:-1].sum()
            assert loss == pytest.approx(expected, rel=1e-6)


def test_an_evaluation_of_nothing_is_refused(data: Path, tmp_path: Path) -> None:
    mask = np.zeros((SEQUENCES, POSITIONS), bool)
    with pytest.raises(AssertionError, match=r"no target of the split 'validation' counts"):
        run_ranks(evaluate_masked, 1, config_of(data), tmp_path, mask)


def test_of_pairs_every_second_token_is_the_target_of_the_one_before() -> None:
    use = DocumentUse(attention=False, balance=False, paired=True)
    for width in (6, 7):  # rows that are cut have one token more than whole pairs
        rows_BS1 = torch.arange(2 * width).view(2, width)
        inputs_BS, targets_BS = use.split(rows_BS1)
        assert inputs_BS.tolist() == [[0, 2, 4], [width, width + 2, width + 4]]
        assert torch.equal(targets_BS, inputs_BS + 1)


def test_of_pairs_the_mask_and_the_documents_are_those_of_their_tokens() -> None:
    """Three pairs, the first a prompt, then padding; the mask covers tokens 1 to 8."""
    use = DocumentUse(attention=False, balance=False, paired=True)
    mask = np.array([[False, False, True, False, True, True, False, False]])  # token 4: an input
    ids = np.array([[5, 5, 5, 5, 5, 5, -1, -1, -1]], dtype=np.int32)
    mask_BS, documents = use.read(mask, ids, torch.device("cpu"))
    assert mask_BS is not None
    assert mask_BS.tolist() == [[False, True, True, False]]
    assert documents is not None
    assert documents.real_BS is not None
    assert documents.real_BS.tolist() == [[True, True, True, False]]
