"""Scores tasks and continues prompts with the model in training (the section `evaluate`).

The ranks share the rows of a task and make equally many passes (scoring.py); all of them continue
every prompt. So experts and sharded weights are exchanged as in a step, and no weight is copied.
Cost: the passes of `moebius eval --tasks --limit`, shared by the ranks, and 100 for each prompt. A
stop request waits for the task or prompt at hand.
"""

import hashlib
import logging
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from ..data_pipeline.manifest import is_prepared
from ..distributed.checkpoint.format import CheckpointError
from ..distributed.checkpoint.together import gathered, together
from ..distributed.process.agreement import AgreementError
from ..model.transformer import Transformer
from ..train.config.run_config import Config, ConfigError
from ..train.record.heartbeat import Phase
from ..train.run import OpenRun
from .group_context import refuse_future_readers
from .restore import Restored, refuse_pairs
from .scoring import NotFiniteError, Scorer, open_scorer
from .tasks.items import TaskItems, read_items, read_records, refuse_nothing_left
from .tasks.task import Encoder, Task
from .text import continued
from .zero_shot import chosen_tasks, encoder_of, first_score

logger = logging.getLogger(__name__)

# of `moebius eval --prompt`
_SAMPLING: dict[str, Any] = {"num_tokens": 100, "temperature": 0.8, "seed": 0}

_Asked = tuple[list[TaskItems], dict[str, list[int]], Encoder]  # tasks, and prompts' tokens


class Examiner:
    """Scores the tasks and continues the prompts of `evaluate`, and logs both; reads them once."""

    def __init__(self) -> None:
        self._asked: _Asked | None = None

    def __call__(self, run: OpenRun) -> None:
        """Examines the model as it is. Collective.

        What fails on all ranks, for example because a task's file is gone, is a warning and does not end
        the run. What fails between passes on one rank alone does, because the others wait for its next.
        """
        restored = Restored(run.model.eval(), run.config, run.progress.step)
        try:
            with torch.compiler.set_stance("force_eager"):  # many lengths, each seen once
                self._examine(run, restored)
        except (AgreementError, CheckpointError, NotFiniteError) as error:
            if run.process.rank == 0:
                logger.warning("step %d was not evaluated: %s", restored.step, error)
        finally:
            run.model.train()

    def _examine(self, run: OpenRun, restored: Restored) -> None:
        asked, scorer = together(
            dist.group.WORLD,
            lambda: (self._asked or _read(restored), open_scorer(restored, run.process)),
        )
        items, prompts, encoder = asked
        rows = {one.name: repr([question.rows for question in one.questions]) for one in items}
        digests = {name: hashlib.blake2b(row.encode()).hexdigest() for name, row in rows.items()}
        run.process.agree("items of evaluate.tasks", digests)
        self._asked = asked
        if items:
            _score(run, items, scorer)
        for prompt, ids in prompts.items():
            if _is_ended(run):
                return
            most = min(_SAMPLING["num_tokens"], encoder.context + 1 - len(ids))
            options = _SAMPLING | {"num_tokens": most}
            pieces = []
            for piece in continued(restored, encoder.tokenizer, [*ids], ends=False, **options):
                run.heartbeat.enter(Phase.EVAL)
                pieces.append(piece)
            run.log.write("samples", restored.step, prompt=prompt, text="".join(pieces))


def _score(run: OpenRun, items: list[TaskItems], scorer: Scorer) -> None:
    began_s, scores = time.monotonic(), dict[str, float]()
    for one in items:
        if _is_ended(run):
            return
        score = first_score(one, scorer, lambda _rows: run.heartbeat.enter(Phase.EVAL))
        if math.isfinite(score):  # else no item has the metric
            scores[one.name] = score
    run.state.measured |= scores
    count, seconds = sum(len(one.questions) for one in items), time.monotonic() - began_s
    run.log.write("scores", run.progress.step, **scores, items=count, seconds=round(seconds, 3))


def _is_ended(run: OpenRun) -> bool:
    """Returns whether the run was asked to end, unless a score decides what it keeps; collective."""
    judges = run.config.checkpoint.keep_best in run.config.evaluate.tasks
    return not judges and any(gathered(dist.group.WORLD, run.end_is_requested))


def _read(restored: Restored) -> _Asked:
    """Returns the items of every task, without those whose answers are longer than the context."""
    asked, encoder = restored.config.evaluate, encoder_of(restored)
    items = [
        read_items(name, task, asked.data, encoder, asked.items)
        for name, task in _tasks_of(restored.config).items()
    ]
    refuse_nothing_left(items, encoder.context)
    prompts = {prompt: encoder.ids(prompt) for prompt in asked.prompts}
    for prompt, ids in prompts.items():
        if not 1 <= len(ids) <= encoder.context:
            raise ConfigError(
                f"evaluate.prompts: {prompt!r:.60} has {len(ids)} tokens, and must have 1 to "
                f"{encoder.context} (data.seq_len): change it"
            )
    return items, prompts, encoder


def _tasks_of(config: Config) -> dict[str, Task]:
    names = config.evaluate.tasks
    return chosen_tasks(names, config.evaluate.data) if names else {}


def check_evaluation(config: Config) -> None:
    """Checks, before ranks start, that a run can do what `evaluate` asks for.

    Items and prompts are read with the tokenizer of the data, so only once they are prepared.

    Raises:
        ValueError: a task is unknown, lacks its data or has no items; a prompt does not fit; or the
            model cannot be asked.
    """
    tasks, best = _tasks_of(config), config.checkpoint.keep_best
    if best not in (None, "validation", *tasks):
        raise ConfigError(f"checkpoint.keep_best={best!r} must be a task, as {', '.join(tasks)}")
    for name, task in tasks.items():
        next(read_records(config.evaluate.data, name, task), None)  # fetches a published set
    with torch.device("meta"):  # shapes only
        restored = Restored(Transformer(config.model), config, 0)
    refuse_pairs(restored)
    refuse_future_readers(restored.model, "be evaluated while it trains: leave evaluate out")
    if config.data.dataset or is_prepared(config.data.directory):
        _read(restored)
