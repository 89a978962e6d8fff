"""Which experts serve which token, asked of a run's recorded routes (`train.record_routing`).

A recorded step has the ids of its tokens beside their routes (train/record/route_trace.py), so the
question needs no model and no data: every route of a token with that id is counted, by depth step.
A token that chooses K experts has K routes at each; in SwitchHead K per head, whose experts are
numbered on from head to head; in Multi-Head MoE K per sub-token.

Mixtures and experts that choose their rows have no routes of single tokens, and cannot be asked.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..train.record.route_tap import RoutedCall
from ..train.record.route_trace import RecordedRank, read_rank, recorded_steps


@dataclass(frozen=True)
class ExpertUse:
    """Says how often one expert served the token at one depth step."""

    expert: int
    count: int  # routes
    share: float  # of all routes of that token at that depth step


def frequent_experts(
    run_dir: Path, token_id: int, *, kind: str = "feed_forward", top: int = 5
) -> dict[int, tuple[ExpertUse, ...]]:
    """Returns the experts that serve a token most often, over all recorded steps and ranks.

    Args:
        run_dir: the run folder.
        token_id: which token.
        kind: of the sparse layer: feed_forward; value or output of SwitchHead; query or output of
            MoMHA.
        top: so many experts at most, the most frequent first, among equals the lower number.

    Returns:
        By depth step, counted from 1; without those at which the token had no expert. Empty where
        no recorded step has that token.

    Raises:
        ValueError: nothing was recorded, or not this; or a file is damaged.
    """
    counts: dict[int, Counter[int]] = {}
    kinds: set[str] = set()
    for files in recorded_steps(run_dir).values():
        for path in files:
            recorded = read_rank(path)
            if not recorded.token_ids:
                raise ValueError(
                    f"{path}: was recorded without the ids of its tokens, by an older version: "
                    "record the run again with train.record_routing"
                )
            kinds |= {call.id.kind for call in recorded.calls}
            for call in recorded.calls:
                if call.id.kind == kind:
                    found = counts.setdefault(call.id.depth, Counter())
                    found.update(_experts_of(call, recorded, token_id))
    if kind not in kinds:
        raise ValueError(
            f"{run_dir}: no {kind!r} was recorded; there are {', '.join(sorted(kinds))}"
        )
    return {depth: _most_frequent(found, top) for depth, found in sorted(counts.items()) if found}


def _experts_of(call: RoutedCall, recorded: RecordedRank, token_id: int) -> list[int]:
    """Returns the expert of every route of tokens with that id, in one pass through one layer."""
    if call.routes.per_expert:
        raise ValueError(
            f"{call.id}: has no routes of single tokens: every expert serves equally many rows or "
            "mixtures, and the recording keeps no more than how many"
        )
    ids_T = recorded.token_ids[call.id.micro_batch]
    rows_per_token = call.num_rows // max(len(ids_T), 1)
    if not rows_per_token or rows_per_token * len(ids_T) != call.num_rows:
        raise ValueError(f"{call.id}: {call.num_rows} rows do not belong to {len(ids_T)} tokens")
    is_token_N = ids_T[call.routes.source_N // rows_per_token] == token_id
    experts: list[int] = call.routes.expert_N[is_token_N].tolist()
    return experts


def _most_frequent(found: Counter[int], top: int) -> tuple[ExpertUse, ...]:
    ordered = sorted(found.items(), key=lambda entry: (-entry[1], entry[0]))
    total = found.total()
    return tuple(ExpertUse(expert, count, count / total) for expert, count in ordered[:top])
