"""Adds up what a checkpoint does over a stream of validation tokens.

    restore ─► passes over the split ─► counters, one of each family per bank of experts ─► Analysis

Every pass is recorded by the tap that `train.record_routing` uses, and forgotten once the counters
have it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moebius.data_pipeline.read.token_store import prepared_tokenizer
from moebius.distributed.process.process import start_process
from moebius.evaluation.restore import Restored, restore
from moebius.model.config.model_config import ModelConfig
from moebius.train.config.run_config import Config
from moebius.train.record.routed_call import RoutedCall

from .banks import FEED_FORWARD, Bank, ChosenBy, banks_of, choices_of, chosen_by
from .cosines import RowCosine, row_cosines
from .hidden import HiddenCounter
from .items import ItemCounter
from .similarity import SimilarityCounter
from .slices import Item, SliceCounter, usual_items
from .stream import AnalysedPass, analysed_passes, count_items, count_rows, rows_of
from .updates import UpdateCounter
from .usage import UsageCounter

OnRows = Callable[[int, int], None]
"""Told how many more rows are done, of how many in all."""


@dataclass
class BankAnalysis:
    """Holds the counters of one bank of experts."""

    bank: Bank
    usage: UsageCounter
    similarity: SimilarityCounter
    items: ItemCounter | None  # of feed-forwards
    slices: SliceCounter | None  # of feed-forwards
    chosen_by: ChosenBy = "tokens"

    def add(self, calls: list[RoutedCall], seen: AnalysedPass) -> None:
        """Adds one pass: this bank's calls, one for each repeat."""
        self.chosen_by = chosen_by(calls[0])
        if self.chosen_by == "nobody":
            return
        found = [choices_of(call, seen.counted_T) for call in calls]
        for repeat, choices in enumerate(found):
            self.usage.add(repeat, choices)
            token_ids_T = seen.token_ids_T[seen.counted_T]
            if self.items is not None:
                self.items.add(repeat, choices, token_ids_T)
            if self.slices is not None:
                self.slices.add(repeat, choices, token_ids_T)
        self.similarity.add(found)

    @property
    def takes_all(self) -> bool:
        """Returns whether every token went through every expert, so that nothing was chosen."""
        usage = self.usage
        everything = (usage.counts_RE >= usage.tokens_R[:, None]).all()
        return bool(everything and usage.tokens_R.any())


@dataclass
class Analysis:
    """Holds all statistics of one checkpoint."""

    run_dir: Path
    config: Config
    step: int
    split: str
    banks: tuple[BankAnalysis, ...]
    updates: UpdateCounter
    hidden: HiddenCounter
    cosines: list[RowCosine]  # of the weights
    items: tuple[Item, ...]  # that are looked at one by one
    item_counts_V: np.ndarray  # int64: how often an item was an input
    num_rows: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    loss_sum: float = field(default=0.0, repr=False)

    @property
    def model(self) -> ModelConfig:
        """Returns the model's configuration."""
        return self.config.model

    @property
    def loss(self) -> float:
        """Returns the mean cross-entropy of the analysed rows, nats per token."""
        return self.loss_sum / self.num_targets if self.num_targets else float("nan")

    def of_kind(self, kind: str) -> tuple[BankAnalysis, ...]:
        """Returns the banks of one kind, by member of the group."""
        return tuple(each for each in self.banks if each.bank.kind == kind)

    def add(self, seen: AnalysedPass) -> None:
        """Adds one pass."""
        calls: dict[str, list[RoutedCall]] = {}
        for call in seen.calls:
            calls.setdefault(call.id.layer, []).append(call)
        for each in self.banks:
            each.add(calls[each.bank.layer], seen)
        self.updates.add(seen.updates, seen.counted_T)
        self.hidden.add(seen.hidden, seen.counted_T)
        ids = seen.token_ids_T[seen.counted_T].cpu().numpy()
        self.item_counts_V += np.bincount(ids, minlength=len(self.item_counts_V))
        self.num_rows += seen.num_rows
        self.num_tokens += len(ids)
        self.num_targets += seen.num_targets
        self.loss_sum += seen.loss_sum

    @property
    def facts(self) -> dict[str, Any]:
        """Returns what every figure has to be read with: model, step, tokens, seed."""
        return {
            "run": self.run_dir.resolve().name,
            "step": self.step,
            "split": self.split,
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "seed": self.config.train.seed,
            "loss": round(self.loss, 6),
        }


def new_analysis(
    restored: Restored, run_dir: Path, *, split: str, items: Sequence[Item] = ()
) -> Analysis:
    """Returns an analysis with empty counters for every bank of a model."""
    model = restored.model
    vocab_size = model.config.vocab_size
    token_ids = [item.token_id for item in items]
    banks = tuple(
        BankAnalysis(
            bank,
            UsageCounter(bank),
            SimilarityCounter(bank),
            ItemCounter(bank, vocab_size) if bank.kind == FEED_FORWARD else None,
            SliceCounter(bank, token_ids) if bank.kind == FEED_FORWARD else None,
        )
        for bank in banks_of(model)
    )
    return Analysis(
        run_dir,
        restored.config,
        restored.step,
        split,
        banks,
        UpdateCounter(model.config.num_layers),
        HiddenCounter(model.config.num_layers),
        row_cosines(model),
        tuple(items),
        np.zeros(vocab_size, dtype=np.int64),
    )


def analyse(
    run_dir: Path,
    *,
    step: int | None = None,
    split: str = "validation",
    num_tokens: int | None = None,
    item_texts: Sequence[str] = (),
    on_rows: OnRows = lambda more, total: None,
) -> Analysis:
    """Returns the statistics of one checkpoint over a split of its data.

    Args:
        run_dir: the run folder.
        step: of the checkpoint; None: the newest.
        split: train or validation.
        num_tokens: how many tokens, rounded up to whole rows; None: the whole split.
        item_texts: tokens to be looked at one by one; none: some of the most frequent.
        on_rows: told of progress.

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read, no token counts, or an
            item's text is not one token.
    """
    rows_of(num_tokens, 1)  # before anything is loaded
    with start_process("auto") as process:
        if process.world_size > 1:
            raise ValueError(
                f"an analysis runs in one process, and {process.world_size} were started: start "
                "`moebius analyze` by itself, without torchrun"
            )
        restored = restore(run_dir, process, step=step)
        max_rows = rows_of(num_tokens, restored.config.data.seq_len)
        items = _items(restored, item_texts, split, max_rows)
        found = new_analysis(restored, run_dir, split=split, items=items)
        total = count_rows(restored.config, split, max_rows)
        on_rows(0, total)
        for seen in analysed_passes(restored, split=split, max_rows=max_rows):
            found.add(seen)
            on_rows(seen.num_rows, total)
    if not found.num_tokens:
        raise ValueError(
            f"{restored.config.data.directory}: no token of the split {split!r} counts, so there is "
            "nothing to analyse: are all of its rows padding?"
        )
    return found


def _items(
    restored: Restored, texts: Sequence[str], split: str, max_rows: int | None
) -> list[Item]:
    """Returns the items that are looked at one by one.

    Raises:
        ValueError: a text is not one token.
    """
    tokenizer = prepared_tokenizer(restored.config.data.directory)
    if not texts:
        usual = usual_items(count_items(restored.config, split, max_rows))
        return [Item(token_id, tokenizer.decode([token_id])) for token_id in usual]
    found = []
    for text in texts:
        token_ids = tokenizer.encode_batch([text])[0].tolist()
        if len(token_ids) != 1:
            parts = ", ".join(repr(tokenizer.decode([one])) for one in token_ids)
            raise ValueError(
                f"--item {text!r} is {len(token_ids)} tokens ({parts}); name one token: a word "
                "mostly begins with the blank before it"
            )
        found.append(Item(token_ids[0], text))
    return found
