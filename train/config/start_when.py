"""When a run's ranks start while its data is still being prepared.

This does not affect what the run reads: a growing folder has the whole one's order
(`data_pipeline/read/order.py`), and a step whose segment is not sealed yet waits.
"""

import re
from decimal import Decimal
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, field_validator, model_validator

from ...data_pipeline.manifest import DatasetManifest

_SHORT = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([kKMBGT]?)")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


class StartWhen(BaseModel):
    """Configures how much data must be sealed before ranks start; both limits apply."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    segments: PositiveInt | None = None
    """Sealed segments over all sources."""

    tokens: PositiveInt | None = None
    """Sealed training tokens over all sources; also written as "50M" or "2.5B"."""

    @field_validator("tokens", mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = _SHORT.fullmatch(value.strip())
        if match is None:
            raise ValueError('write a number of tokens such as 50000000, "50M" or "2.5B"')
        number = Decimal(match[1].replace("_", "")) * _UNITS[match[2]]
        if number != int(number):
            raise ValueError("tokens are counted in whole numbers")
        return int(number)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.segments is None and self.tokens is None:
            raise ValueError("give segments, tokens or both; leave start_when out to prepare first")
        return self

    def is_met(self, manifest: DatasetManifest) -> bool:
        """Returns whether ranks may start on the sealed data; every source needs a segment."""
        if manifest.complete:
            return True
        if not all(manifest.segments(source.name) for source in manifest.sources):
            return False  # validation reads each source's first segment
        enough_segments = len(manifest.sealed) >= (self.segments or 0)
        return enough_segments and manifest.num_tokens("train") >= (self.tokens or 0)

    def __str__(self) -> str:
        parts = []
        if self.segments is not None:
            parts.append(f"{self.segments:,} segment{'s' if self.segments > 1 else ''}")
        if self.tokens is not None:
            parts.append(f"{self.tokens:,} tokens")
        return " and ".join(parts)
