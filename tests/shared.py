"""Recordings and corpora that are beside the project but not part of it."""

import os
from pathlib import Path

import pytest


def shared_folder() -> Path:
    """Returns the folder of recordings and corpora, or skips the test where there is none.

    It is MOEBIUS_SHARED, or `shared` beside the repository. tests/conftest.py asks before every test
    that is marked `needs_shared`.
    """
    folder = Path(
        os.environ.get("MOEBIUS_SHARED") or Path(__file__).resolve().parents[2] / "shared"
    )
    if not folder.is_dir():
        pytest.skip("the recorded data is not beside the project (set MOEBIUS_SHARED)")
    return folder
