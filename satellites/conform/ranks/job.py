"""Defines what the kit's processes exchange: jobs as lines of JSON, results as files of arrays."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float64]]
OUTPUT, INPUT, GATES, NORM, PARAMETER = "output", "input", "gates", "norm", "parameter "


@dataclass(frozen=True)
class Job:
    """Describes the work of one world's ranks."""

    kind: str  # "describe", "reference", "ranks", "explain"
    spec: str
    folder: str
    world_size: int
    scenes: tuple[tuple[str, int], ...] = ()  # (name, ranks that share its rows)
    full: Mapping[str, tuple[int, ...]] | None = None  # the reference's shapes
    experts: Mapping[str, int | None] | None = None  # the reference's expert parameters
    router: str | None = None
    facts: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, line: str) -> "Job":
        """Parses the output of `text`."""
        fields = json.loads(line)
        fields["scenes"] = tuple((name, ranks) for name, ranks in fields["scenes"])
        if fields["full"] is not None:
            fields["full"] = {name: tuple(shape) for name, shape in fields["full"].items()}
        return cls(**fields)

    def text(self) -> str:
        """Returns the job as one line of JSON."""
        return json.dumps(asdict(self))


class Events:
    """Writes one line to a file for everything that a rank begins, so that a hang can be located."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = open(Path(folder) / f"events-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115

    def note(self, stage: str, **more: object) -> None:
        """Writes what begins now."""
        self._file.write(json.dumps({"stage": stage, **more}) + "\n")


def save(folder: Path, name: str, arrays: Mapping[str, NDArray[np.float64]]) -> None:
    """Writes arrays into the job's folder, under numbers because names contain slashes."""
    names = list(arrays)
    path = folder / file_name(name)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.npz")
    numbered: dict[str, Any] = {f"a{i}": arrays[key] for i, key in enumerate(names)}
    np.savez(temporary, names=np.array(names), **numbered)
    temporary.rename(path)


def read(folder: Path, name: str) -> Arrays:
    """Reads what `save` wrote."""
    with np.load(folder / file_name(name), allow_pickle=False) as saved:
        return {str(key): saved[f"a{i}"] for i, key in enumerate(saved["names"])}


def file_name(name: str) -> str:
    """Returns the name of the file for one result."""
    return name.replace(" ", "_").replace("'", "") + ".npz"
