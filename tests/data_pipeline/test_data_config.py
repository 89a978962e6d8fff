"""Checks of the section `data`: what makes no mixture, and what makes no row."""

from typing import Any

import pytest
from pydantic import ValidationError

from moebius.data_pipeline.data_config import DataConfig


def _stages(*starts: int, **weights: Any) -> dict[str, Any]:
    return {"stages": [{"at_tokens": start, "weights": weights} for start in starts]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": {"web": 0}}, "weights.web"),
        ({"weights": {"web": "inf"}}, "weights.web"),
        ({"weights": {"../x": 1}}, "weights"),
        ({"max_epochs": {"web": -1}}, "max_epochs.web"),
        (_stages(5, 5, web=1), r"stages begin at \[5, 5\] tokens"),
        (_stages(5, web=0, code=-1), r"weights \{'web': 0.0, 'code': -1.0\}"),
        (_stages(5, web="nan"), "stages.0"),
        ({"targets": "paired", "seq_len": 33}, "set seq_len=34"),
        ({"sequence_length": 3}, "sequence_length"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate(values)
