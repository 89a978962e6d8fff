"""Scores tasks and continues prompts with the model in training (the section `evaluate`).

The ranks share the rows of a task and make equally many passes (scoring.py); all of them continue
every prompt. So experts and sharded weights are exchanged as in a step, and no weight is copied.
Cost: the passes of `moebius eval --tasks --limit`, shared by the ranks, and 100 for each prompt.
"""

import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..data_pipeline.manifest import is_prepared
from ..distributed.checkpoint.format import CheckpointError
from ..distributed.checkpoint.together import together
from ..distributed.process.agreement import AgreementError
from ..model.transformer import Transformer
from ..plugins import nearest
from ..train.config.run_config import Config, ConfigError
from ..train.record.heartbeat import Phase
from ..train.run import OpenRun
from .group_context import refuse_future_readers
from .restore import Restored, refuse_pairs, tokenizer_of_run
from .scoring import NotFiniteError, open_scorer
from .tasks.items import HUB, TaskItems, read_items, read_records
from .tasks.table import TASKS
from .text import write_text
from .zero_shot import encoder_of, first_score, has_data

logger = logging.getLogger(__name__)

# of `moebius eval --prompt`
_SAMPLING: dict[str, Any] = {"num_tokens": 100, "temperature": 0.8, "seed": 0}


class Examiner:
    """Scores the tasks and continues the prompts of `evaluate`, and logs both; reads items once."""

    def __init__(self) -> None:
        self._items: list[TaskItems] = []

    def __call__(self, run: OpenRun) -> None:
        """Examines the model as it is. Collective.

        What fails on all ranks, for example because a task's file is gone, is a warning and does not end
        the run. What fails between passes on one rank alone does, because the others wait for its next.
        """
        restored = Restored(run.model.eval(), run.config, run.progress.step)
        try:
            with torch.compiler.set_stance("force_eager"):  # many lengths, each seen once
                if run.config.evaluate.tasks:
                    self._score(run, restored)
                if run.config.evaluate.prompts:
                    _write(run, restored)
        except (AgreementError, CheckpointError, NotFiniteError) as error:
            if run.process.rank == 0:
                logger.warning("step %d was not evaluated: %s", restored.step, error)
        finally:
            run.model.train()

    def _score(self, run: OpenRun, restored: Restored) -> None:
        began_s = time.monotonic()
        items, scorer = together(
            dist.group.WORLD,
            lambda: (self._items or _read_tasks(restored), open_scorer(restored, run.process)),
        )
        run.process.agree("items of evaluate.tasks", {one.name: _digest(one) for one in items})
        self._items = items
        scores = {
            one.name: first_score(one, scorer, lambda _rows: run.heartbeat.enter(Phase.EVAL))
            for one in items
        }
        run.state.measured |= scores
        count, seconds = sum(len(one.questions) for one in items), time.monotonic() - began_s
        run.log.write("scores", restored.step, **scores, items=count, seconds=round(seconds, 3))


def _write(run: OpenRun, restored: Restored) -> None:
    together(dist.group.WORLD, lambda: _check_prompts(restored))  # else a rank would fail alone
    for prompt in run.config.evaluate.prompts:
        pieces = []
        for piece in write_text(restored, prompt, **_SAMPLING):
            run.heartbeat.enter(Phase.EVAL)
            pieces.append(piece)
        run.log.write("samples", restored.step, prompt=prompt, text="".join(pieces[1:]))


def _read_tasks(restored: Restored) -> list[TaskItems]:
    """Returns the items of every task, without those whose answers are longer than the context."""
    asked, encoder = restored.config.evaluate, encoder_of(restored)
    items = [
        read_items(name, TASKS[name], place, encoder, asked.items)
        for name, place in asked.tasks.items()
    ]
    for one in items:
        if not one.questions:
            raise ConfigError(
                f"evaluate.tasks.{one.name}: all {len(one.too_long)} items have answers longer than "
                f"data.seq_len={encoder.context}: leave the task out"
            )
    return items


def _digest(items: TaskItems) -> str:
    rows = [question.rows for question in items.questions]
    return hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()


def check_evaluation(config: Config) -> None:
    """Checks, before ranks start, that a run can do what `evaluate` asks for.

    Items and prompts are read with the tokenizer of the data, so only once they are prepared.

    Raises:
        ValueError: a task is unknown, lacks its data or has no items; a prompt does not fit; or the
            model cannot be asked.
    """
    for name, place in config.evaluate.tasks.items():
        _check_task(name, place)
    with torch.device("meta"):  # shapes only
        restored = Restored(Transformer(config.model), config, 0)
    refuse_pairs(restored)
    refuse_future_readers(restored.model, "be evaluated while it trains: leave evaluate out")
    if config.data.dataset or is_prepared(config.data.directory):
        _read_tasks(restored)
        _check_prompts(restored)


def _check_task(name: str, place: str) -> None:
    if name not in TASKS:
        hint = nearest(name, TASKS) or "."
        raise ConfigError(
            f"evaluate.tasks: there is no task {name!r:.200}{hint} Tasks are {', '.join(TASKS)}"
        )
    if not has_data(name, place if place == HUB else Path(place)):
        raise ConfigError(
            f"evaluate.tasks.{name}={place}: has no data of this task: name the folder of "
            f"{name}.jsonl or {name}.jsonl.zst, or hub, which has every task but cbt_style"
        )
    if place == HUB:  # fetch it
        next(read_records(place, name, TASKS[name]), None)


def _check_prompts(restored: Restored) -> None:
    config, tokenizer = restored.config, tokenizer_of_run(restored)
    most = config.data.seq_len
    if (learned := config.model.attention.max_positions) is not None:
        most = min(most, learned - _SAMPLING["num_tokens"] + 1)
    for prompt in config.evaluate.prompts:
        if not 1 <= (count := len(tokenizer.encode_batch([prompt])[0])) <= most:
            raise ConfigError(
                f"evaluate.prompts: {prompt!r:.60} has {count} tokens, and the model takes 1 to {most} "
                f"(data.seq_len={config.data.seq_len}"
                f"{'' if learned is None else f', {learned} learned positions'}): change it"
            )
