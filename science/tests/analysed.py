"""Analyses of tiny models without a run folder, and what plain loops count in the same passes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.evaluation.restore import Restored
from moebius.model.documents import mark_documents
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config, TrainConfig
from moebius.train.record.route_tap import tap
from moebius.train.record.routed_call import RoutedCall
from moebius_science.analysis.analyse import Analysis, new_analysis
from moebius_science.analysis.hidden import tap_hidden
from moebius_science.analysis.slices import Item
from moebius_science.analysis.stream import AnalysedPass
from moebius_science.analysis.updates import tap_residual

ITEMS = (Item(3, "three"), Item(5, "$five\n"))
GROUP = 32  # sequences, which whole groups of every recipe are


@torch.no_grad()
def pass_of(
    model: Transformer, tokens_BS: Tensor, counted_BS: Tensor | None = None
) -> AnalysedPass:
    """One recorded pass of these tokens; what does not count is padding."""
    documents = None
    if counted_BS is not None:
        ids_BS = torch.where(counted_BS, 0, -1)
        documents = mark_documents(ids_BS, torch.device("cpu"), attention=False, balance=False)
    else:
        counted_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
    with tap(model) as calls, tap_residual(model) as updates, tap_hidden(model) as hidden:
        model(tokens_BS, documents=documents)
    rows = len(tokens_BS)
    return AnalysedPass(
        tokens_BS.flatten(), counted_BS.flatten(), calls, updates, hidden, 1.0, rows, rows
    )


def passes_of(
    model: Transformer, *, count: int = 2, rows: int = 4, length: int = 6, padded: bool = False
) -> list[AnalysedPass]:
    """Passes of few token ids, so that each comes often; the last positions are padding or not."""
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tokens_BS = torch.randint(9, (rows, length), generator=generator)
        counted_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
        counted_BS[: 1 + rows // 2, length - 2 :] = False
        found.append(pass_of(model.eval(), tokens_BS, counted_BS if padded else None))
    return found


def analysis_of(model: Transformer, passes: list[AnalysedPass], *, run: str = "tiny") -> Analysis:
    """The analysis of these passes."""
    vocab_size = model.config.vocab_size
    config = Config.model_construct(
        model=model.config,
        data=DataConfig(directory="data"),
        prepare=PrepareConfig.model_construct(vocab_size=vocab_size),
        train=TrainConfig(),
    )
    found = new_analysis(Restored(model, config, 7), Path(run), split="validation", items=ITEMS)
    for seen in passes:
        found.add(seen)
    return found


@dataclass
class Counted:
    """What plain loops find in the calls of one bank."""

    # by repeat, then by token in the order of the passes: (expert, gate weight) of every choice
    choices: list[list[list[tuple[int, float]]]]
    token_ids: list[int] = field(default_factory=list)  # of the same tokens


def count_by_loops(passes: list[AnalysedPass], layer: str) -> Counted:
    """Goes through every route of one sparse layer."""
    found: Counted | None = None
    for seen in passes:
        calls = [call for call in seen.calls if call.id.layer == layer]
        found = found or Counted([[] for _ in calls])
        counted = seen.counted_T.tolist()
        found.token_ids += [
            token
            for token, counts in zip(seen.token_ids_T.tolist(), counted, strict=True)
            if counts
        ]
        for repeat, call in enumerate(calls):
            of_token: dict[int, list[tuple[int, float]]] = {
                token: [] for token, counts in enumerate(counted) if counts
            }
            for token, expert, weight in _routes(call, len(counted)):
                if counted[token]:
                    of_token[token].append((expert, weight))
            found.choices[repeat] += of_token.values()
    assert found is not None
    return found


def _routes(call: RoutedCall, num_tokens: int) -> Iterator[tuple[int, int, float]]:
    rows_per_token = call.num_rows // num_tokens
    for source, expert, weight in zip(
        call.routes.source_N.tolist(),
        call.routes.expert_N.tolist(),
        call.routes.weight_N.tolist(),
        strict=True,
    ):
        yield source // rows_per_token, expert, weight
