"""What every benchmark says beside its figures: hardware, versions, commit, command."""

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import environment as place

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("torch", "numpy", "pyarrow", "ray", "triton")
_ABOUT = ("environment", "measured", "note")  # of a file with parts, beside these


def environment() -> dict[str, Any]:
    """The machine and the software that a figure was measured on."""
    return place.environment(*LIBRARIES) | {"command": _command()}


def save(name: str, figures: dict[str, Any], *, folder: Path = RESULTS) -> Path:
    """Writes FOLDER/NAME.json: the environment and the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps({"environment": environment(), **figures}, indent=2) + "\n", encoding="utf-8"
    )
    return path


def save_parts(
    name: str,
    parts: Mapping[str, Any],
    others: Mapping[str, Any],
    *,
    under: str = "",
    folder: Path = RESULTS,
) -> Path:
    """Writes parts of FOLDER/NAME.json anew, and leaves its other parts as they are.

    `measured` says of every part on what, from which commit, with which command and when; of parts
    that were written before there was such a note, what the whole file said.

    Args:
        name: of the file.
        parts: what was measured, by names.
        others: what is said beside it, which replaces what was said before.
        under: the entry that the parts stand in; "": the file itself.
        folder: where it is.
    """
    path = folder / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    now = environment() | {"date": datetime.now(UTC).strftime("%Y-%m-%d")}
    known = before.get(under, {}) if under else before
    kept = {key: value for key, value in known.items() if under or key not in (*_ABOUT, *others)}
    unsigned = dict.fromkeys(kept, before.get("environment", {}))
    measured = unsigned | before.get("measured", {}) | dict.fromkeys(parts, now)
    about = {key: before[key] for key in _ABOUT if key in before}
    merged = kept | dict(parts)
    figures = {under: merged} if under else merged
    folder.mkdir(parents=True, exist_ok=True)
    whole = about | {"environment": now, "measured": measured, **others, **figures}
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return path


def _command() -> str:
    """How this program was started, without where it lies: `python -m benchmarks.data --rounds 7`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    # of a package, `python -m PACKAGE` runs PACKAGE.__main__
    module = spec.name.removesuffix(".__main__") if spec else None
    program = ["-m", module] if module else [Path(sys.argv[0]).name]
    return " ".join(["python", *program, *sys.argv[1:]])
