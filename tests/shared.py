"""Recorded data and corpora that lie beside the project and do not travel with it."""

import os
from pathlib import Path


def shared_folder() -> Path | None:
    """The folder of recorded runs and corpora (MOEBIUS_SHARED, else `shared` beside the
    repository), or None.
    """
    folder = Path(
        os.environ.get("MOEBIUS_SHARED") or Path(__file__).resolve().parents[2] / "shared"
    )
    return folder if folder.is_dir() else None
