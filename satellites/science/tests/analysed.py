"""Analyses of tiny models without a run folder, and plain-loop counts of the same passes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moebius
from moebius_science.analysis.analyse import Analysis
from moebius_science.analysis.slices import Item

ITEMS = (Item(3, "three"), Item(5, "$five\n"))


def tiny_model(name: str, *overrides: str) -> moebius.LoadedModel:
    """Returns a recipe's model with small widths and strong router preferences: uneven loads,
    halting.
    """
    small = {"model.d_model": 24, "model.attention.d_head": 6}
    if moebius.recipe(name).model.experts is None:
        small["model.feed_forward.d_feed_forward"] = 20
    else:
        small["model.feed_forward.d_expert"] = 8
    texts = [f"{key}={value}" for key, value in small.items()]
    texts += ["prepare.tokenizer=bytes", "prepare.vocab_size=257", "model.vocab_size=257"]
    config = moebius.recipe(name, *texts, *overrides)
    model: Any = moebius.build(config).eval()
    make_uneven(model)
    return moebius.LoadedModel(model, None, config, 7)  # type: ignore[arg-type]


@torch.no_grad()
def make_uneven(model: Any) -> None:
    """Adds noise to routers, and a common component to all rows."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "router" in name or "halting" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    embedding = model.embedding
    embedding.add_(embedding.std() * torch.randn(embedding.shape[1], generator=generator))


def traces_of(
    loaded: moebius.LoadedModel, *, count: int = 2, rows: int = 4, length: int = 6, padded: bool
) -> list[moebius.Trace]:
    """Returns passes with few token ids, so that each occurs often; the last positions may not
    count.
    """
    rows = max(rows, loaded.config.model.evaluation_group_sequences)
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tokens_BS = torch.randint(9, (rows, length + 1), generator=generator)
        seen = loaded.trace(tokens_BS)
        if padded:
            counted_BS = seen.rows.counted_BS.clone()
            counted_BS[: 1 + rows // 2, length - 2 :] = False
            seen = replace(seen, rows=replace(seen.rows, counted_BS=counted_BS))
        found.append(seen)
    return found


def analysis_of(
    loaded: moebius.LoadedModel, traces: Sequence[moebius.Trace], *, run: str = "tiny"
) -> Analysis:
    """Returns the analysis of these passes."""
    found = Analysis(Path(run), loaded.config, 7, "validation", ITEMS)
    for seen in traces:
        found.add(seen)
    return found


def analysed(name: str, *overrides: str, **settings: Any) -> tuple[list[moebius.Trace], Analysis]:
    """Returns the passes of a tiny model and their analysis."""
    loaded = tiny_model(name, *overrides)
    traces = traces_of(loaded, **({"padded": False} | settings))
    return traces, analysis_of(loaded, traces)


@dataclass
class Counted:
    """Holds the counts of plain loops over the routes of one bank."""

    # by repeat, then by token in the order of the passes: (expert, gate weight) of every choice
    choices: list[list[list[tuple[int, float]]]]
    token_ids: list[int] = field(default_factory=list)  # of the same tokens


def count_by_loops(traces: Sequence[moebius.Trace], layer: str) -> Counted:
    """Loops over every route of one sparse layer."""
    found: Counted | None = None
    for seen in traces:
        passes = [routes for routes in seen.routes if routes.layer == layer]
        found = found or Counted([[] for _ in passes])
        counted = seen.rows.counted_BS.flatten().tolist()
        ids = seen.rows.tokens_BS.flatten().tolist()
        found.token_ids += [token for token, counts in zip(ids, counted, strict=True) if counts]
        for repeat, routes in enumerate(passes):
            of_token: dict[int, list[tuple[int, float]]] = {
                token: [] for token, counts in enumerate(counted) if counts
            }
            for token, expert, weight in _listed(routes.token_N, routes.expert_N, routes.weight_N):
                if counted[token]:
                    of_token[token].append((expert, weight))
            found.choices[repeat] += of_token.values()
    assert found is not None
    return found


def _listed(*columns: Tensor) -> list[tuple[Any, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))
