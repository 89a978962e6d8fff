"""Writes an analysis: a PNG and a Parquet file for each picture."""

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..analysis.analyse import Analysis, BankAnalysis
from ..analysis.updates import COLUMNS
from ..files import write_whole
from . import choice_pictures, drawing, slice_picture, update_picture, usage_pictures
from .picture import Picture, Table

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
)


def check_folder(folder: Path) -> None:
    """Checks, before hours of counting, that an analysis can be written there; creates nothing.

    Raises:
        ValueError: a file is in the way.
        OSError: the folder is not writable.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"--out {folder}: {place} is a file, and the pictures need a folder")
    with tempfile.TemporaryFile(dir=place):
        pass


def write_analysis(analysis: Analysis, folder: Path) -> list[dict[str, str]]:
    """Writes all files, replacing older ones, and returns what exists of each picture."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {name: str(value) for name, value in analysis.facts.items()}
    written = []
    for make in PICTURES:
        picture = make(analysis)
        found = {"name": picture.name, "title": picture.title, "absent": picture.absent}
        image, table = folder / f"{picture.name}.png", folder / f"{picture.name}.parquet"
        if picture.draw is None or picture.absent:
            image.unlink(missing_ok=True)  # of an older analysis
            table.unlink(missing_ok=True)
        else:
            write_whole(image, drawing.png(picture.draw(), footer_of(analysis)))
            write_whole(table, parquet(picture.table(), metadata | {"picture": picture.title}))
            found |= {"png": str(image), "parquet": str(table)}
        written.append(found)
    return written


def footer_of(analysis: Analysis) -> str:
    """Returns the footer of a picture: run, step, tokens, loss and seed."""
    facts = analysis.facts
    return (
        f"{facts['run']}, step {facts['step']:,}; {facts['tokens']:,} {facts['split']} tokens in "
        f"{facts['rows']:,} rows, loss {facts['loss']:.4f} nats; seed {facts['seed']}"
    )


def parquet(columns: Table, metadata: Mapping[str, str]) -> bytes:
    """Returns a table as a Parquet file, with values common to all rows in its metadata."""
    arrays: dict[str, Any] = {name: pa.array(values) for name, values in columns.items()}
    table = pa.table(arrays).replace_schema_metadata(dict(metadata))
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    return file.getvalue()


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Returns an analysis' figures for scripts; unknown ones are null."""
    means_LC = analysis.updates.means_LC
    return {
        **analysis.facts,
        "banks": [_bank_json(each) for each in analysis.banks],
        "updates": {name: _numbers(means_LC[:, place]) for place, name in enumerate(COLUMNS)},
    }


def _bank_json(each: BankAnalysis) -> dict[str, Any]:
    bank, usage = each.bank, each.usage
    found: dict[str, Any] = {
        "kind": bank.kind,
        "member": bank.member,
        "depths": list(bank.depths),
        "experts": bank.num_experts,
        "heads": bank.num_heads,
        "chosen_by": bank.chosen_by,
    }
    if bank.chosen_by == "nobody":
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
