"""Writes an analysis: for each picture a PNG and a Parquet file, and one page with all of them."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moebius.data_pipeline.atomic import atomic_write
from moebius.data_pipeline.parquet import write_parquet

from ..pictures import (
    choice_pictures,
    drawing,
    slice_picture,
    update_picture,
    usage_pictures,
    weight_pictures,
)
from ..pictures.picture import Picture
from .analyse import Analysis, BankAnalysis
from .hidden import PARTS
from .page import facts_line, page

PAGE = "analysis.html"

PICTURES: tuple[Callable[[Analysis], Picture], ...] = (
    usage_pictures.expert_usage,
    usage_pictures.layer_preference,
    choice_pictures.unique_experts,
    choice_pictures.frequent_items,
    slice_picture.item_slices,
    choice_pictures.similarity,
    update_picture.update_magnitude,
    usage_pictures.balance,
    choice_pictures.repeat_overlap,
    choice_pictures.co_occurrence,
    usage_pictures.attention_heads,
    weight_pictures.relu_pass_rate,
    weight_pictures.row_cosine,
)
"""All pictures, in the order of the page."""


def check_folder(folder: Path) -> None:
    """Checks, before hours of counting, that an analysis can be written there; makes nothing.

    Raises:
        ValueError: a file is in the way.
        OSError: nobody may write there.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"--out {folder}: {place} is a file, and the pictures need a folder")
    with tempfile.TemporaryFile(dir=place):
        pass


def write_analysis(analysis: Analysis, folder: Path) -> list[dict[str, Any]]:
    """Writes all files, replaces older ones, and returns what there is of each picture.

    Raises:
        PrepareError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {name: str(value) for name, value in analysis.facts.items()}
    drawn: list[tuple[Picture, bytes]] = []
    written = []
    for make in PICTURES:
        picture = make(analysis)
        written.append({"name": picture.name, "title": picture.title, "absent": picture.absent})
        image, table = folder / f"{picture.name}.png", folder / f"{picture.name}.parquet"
        if picture.draw is None or picture.absent:
            image.unlink(missing_ok=True)  # of an older analysis
            table.unlink(missing_ok=True)
            drawn.append((picture, b""))
            continue
        pixels = drawing.png(picture.draw(), facts_line(analysis))
        with atomic_write(image) as file:
            file.write(pixels)
        write_parquet(table, picture.table(), metadata=metadata | {"picture": picture.title})
        written[-1] |= {"png": str(image), "parquet": str(table)}
        drawn.append((picture, pixels))
    with atomic_write(folder / PAGE) as file:
        file.write(page(analysis, drawn).encode())
    return written


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Returns the figures of an analysis that a script would ask for; unknown ones are null."""
    return {
        **analysis.facts,
        "banks": [_bank_json(each) for each in analysis.banks],
        "updates": {
            name: _numbers(column)
            for name, column in zip(
                ("update_norm", "input_norm", "ratio", "abs_cosine"),
                analysis.updates.means_LC.T,
                strict=True,
            )
        },
        "relu_pass_rate": {
            part: _numbers(rates)
            for part, rates in zip(PARTS, analysis.hidden.rate_LP.T, strict=True)
            if np.isfinite(rates).any()
        },
        "row_cosine": [
            {"member": one.member, "matrix": one.matrix}
            | dict(
                zip(
                    ("same_expert", "different_experts", "all_pairs"),
                    _numbers([one.same_expert, one.different_experts, one.all_pairs]),
                    strict=True,
                )
            )
            for one in analysis.cosines
        ],
    }


def _bank_json(each: BankAnalysis) -> dict[str, Any]:
    bank, usage = each.bank, each.usage
    found: dict[str, Any] = {
        "kind": bank.kind,
        "member": bank.member,
        "depths": list(bank.depths),
        "experts": bank.num_experts,
        "heads": bank.num_heads,
        "chosen_by": each.chosen_by,
    }
    if each.chosen_by == "nobody":
        return found
    return found | {
        "tokens": usage.tokens_R.tolist(),
        "routes": usage.counts_RE.sum(1).tolist(),
        "usage_perplexity": _numbers(usage.perplexity_R),
        "dead_share": _numbers(usage.dead_R),
        "never_used": round(usage.dead_everywhere, 6),
        "kept_share": _numbers(each.similarity.consecutive_R),
        "universal_score": _numbers([usage.universal_score])[0],
    }


def _numbers(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [round(float(value), 6) if np.isfinite(value) else None for value in values]
