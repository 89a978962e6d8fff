"""Recordings and corpora that are beside the project but not part of it."""

import os
from pathlib import Path


def shared_folder() -> Path | None:
    """Returns the folder of recordings and corpora, or None.

    It is MOEBIUS_SHARED, or `shared` beside the repository.
    """
    folder = Path(
        os.environ.get("MOEBIUS_SHARED") or Path(__file__).resolve().parents[2] / "shared"
    )
    return folder if folder.is_dir() else None
