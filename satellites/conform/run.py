"""Plays every scene on one rank and on several, compares them, and diagnoses what is wrong.

1. One rank describes the layer: shapes, router, and which scenes fit (rank.py). 2. One rank plays
the reference; then 1, 2 and 4 ranks play the same scenes (launch.py). A world that
   crashes or hangs is restarted for the remaining scenes.
3. Everything is compared (compare.py). The reference plays failed scenes again in parts, and wrong
   pieces are fitted to these (diagnose.py).
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .compare import World, pieces
from .contract import ContractError, Layer, Shard, spec_of
from .ranks.job import Arrays, Job, read
from .ranks.processes import Launcher
from .report import Finding, Report
from .scenes import SCENES, Facts, batch
from .verdicts import Played, judge, stopped

RANKS = (1, 2, 4)
LIMIT_S = 60.0  # without progress on any rank
FAILURES = 3  # crashes or hangs per size before the remaining scenes are skipped

Subject = str | Layer | Callable[..., Any]


def check(
    subject: Subject,
    *,
    ranks: Sequence[int] = RANKS,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    limit_s: float = LIMIT_S,
    preload: Sequence[str] = (),
) -> Report:
    """Checks a layer on several numbers of ranks and returns the faults.

    Args:
        subject: "MODULE:NAME" or "FILE.py:NAME", or the `Layer` or function itself if it is an
            attribute of a module in a file, because ranks are other processes and must find it
            there.
        ranks: sizes of the expert-parallel group.
        skip: scenes to skip, in addition to those that the layer skips itself.
        only: the only scenes to play.
        limit_s: a world without progress on any rank for this time counts as hung.
        preload: modules to import once, before ranks are forked; they must start no thread.

    Raises:
        ContractError: the layer cannot be checked as described.
    """
    with Launcher(limit_s, preload) as launcher:
        return check_with(launcher, subject, ranks=ranks, skip=skip, only=only)


def check_with(
    launcher: Launcher,
    subject: Subject,
    *,
    ranks: Sequence[int] = RANKS,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
) -> Report:
    """Checks a layer like `check`, with a launcher that can serve many checks."""
    begun = time.monotonic()
    spec = subject if isinstance(subject, str) else spec_of(subject)
    unknown = [name for name in (*skip, *only) if name not in SCENES]
    if unknown:
        raise ContractError(f"no scene {unknown[0]!r}; there are: {', '.join(SCENES)}")
    with tempfile.TemporaryDirectory(prefix="conform-") as folder:
        trial = _Trial(spec, Path(folder), launcher)
        trial.describe(skip, only)
        for size in ranks:
            trial.try_size(size)
        return replace(trial.report(), seconds=time.monotonic() - begun)


def assert_conforms(subject: Subject, **settings: Any) -> Report:
    """Checks a layer like `check`.

    Raises:
        AssertionError: a fault was found; the message is the report.
    """
    report = check(subject, **settings)
    if not report.ok:
        raise AssertionError(f"\n{report.text()}")
    return report


@dataclass
class _Trial:
    """Holds the state of one check."""

    spec: str
    folder: Path
    launcher: Launcher
    plan: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    errors: dict[tuple[int, str], float | str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    worlds: int = 0

    def describe(self, skip: Sequence[str], only: Sequence[str]) -> None:
        """Determines shapes, router and scenes."""
        folder, outcome = self._run(Job("describe", self.spec, "", 1))
        _refuse(outcome, "while it was described on one rank")
        self.plan = json.loads((folder / "plan.json").read_text())
        names = [name for name in self.plan["scenes"] if not only or name in only]
        self.plan["scenes"] = [name for name in names if name not in skip]
        if not self.plan["contract"]["own_reference"]:
            self.notes.append(
                "the reference is this layer on one rank: what is wrong there as well, such as a "
                "detached gate, cannot be seen (say Layer(reference=…))"
            )
        if not self.facts.steered:
            self.notes.append(
                "the router's weight was not found, so routes are what they are: scenes that "
                "steer them are left out (say Layer(router=…))"
            )

    @property
    def facts(self) -> Facts:
        return Facts(**self.plan["facts"])

    def try_size(self, size: int) -> None:
        """Plays and judges all scenes on `size` ranks."""
        if self.facts.num_experts % size:
            self.notes.append(f"{size} ranks do not divide {self.facts.num_experts} experts")
            return
        if size == 1 and not self.plan["contract"]["own_reference"]:
            return  # it is the reference
        references = self._references(size)
        results = self._ranks(size, list(references))
        shards = self._shards(size)
        if shards is None or not results:
            return
        world = World(size, self.plan, shards)
        played = {}
        for name, ranks in results.items():
            rows = batch(SCENES[name], size, self.facts)
            found = pieces(world, rows, references[name], ranks)
            played[name] = Played(SCENES[name], rows, found, ranks)
            self.errors[size, name] = max((piece.error for piece in found), default=0.0)
        explain = self._explainer(world)
        self.findings += judge(world, played, explain)

    def _references(self, size: int) -> dict[str, Arrays]:
        """Returns a single rank's results; notes scenes that it cannot play."""
        found: dict[str, Arrays] = {}
        for folder, names, outcome in self._worlds("reference", 1, self.plan["scenes"], size):
            found |= {name: read(folder, f"reference-{size}-{name}") for name in names}
            if outcome["how"] != "done":
                last = outcome["text"].strip().splitlines()[-1]
                self.notes.append(f"one rank cannot play {outcome['scene']!r} itself: {last}")
                self.errors[size, outcome["scene"]] = "left out"
        return found

    def _ranks(self, size: int, names: list[str]) -> dict[str, list[Arrays]]:
        found: dict[str, list[Arrays]] = {}
        for folder, done, outcome in self._worlds("ranks", size, names, size):
            found |= {
                name: [read(folder, f"ranks-{size}-{name}-{rank}") for rank in range(size)]
                for name in done
            }
            if outcome["how"] != "done":
                self.findings.append(stopped(size, outcome))
                self.errors[size, outcome["scene"]] = outcome["how"]
        return found

    def _worlds(
        self, kind: str, processes: int, names: Sequence[str], size: int
    ) -> Iterator[tuple[Path, list[str], dict[str, Any]]]:
        """Yields folder, played scenes and outcome of one world after the other."""
        left = list(names)
        for _ in range(FAILURES):
            if not left:
                return
            job = self._job(kind, processes, left, size)
            folder, outcome = self._run(job)
            scene = outcome["scene"]
            if outcome["how"] == "contract" or scene is None:
                _refuse(outcome, f"with {processes} ranks")
            done = left if scene is None or outcome["how"] == "done" else left[: left.index(scene)]
            yield folder, done, outcome
            left = left[len(done) + 1 :]
        if left:
            self.notes.append(f"{size} ranks: not tried after {FAILURES} failures: {left}")

    def _shards(self, size: int) -> list[dict[str, Shard | None]] | None:
        """Returns how the last world of that size sharded the parameters."""
        folder = self.folder / str(self.worlds - 1)
        found = []
        for rank in range(size):
            path = folder / f"shards-{size}-{rank}.json"
            if not path.exists():
                return None
            shards = json.loads(path.read_text())
            found.append({name: shard and Shard(**shard) for name, shard in shards.items()})
        return found

    def _explainer(self, world: World) -> Callable[[Sequence[str]], dict[str, Arrays]]:
        def explain(names: Sequence[str]) -> dict[str, Arrays]:
            job = self._job("explain", 1, names, world.size, experts=world.experts())
            folder, outcome = self._run(job)
            if outcome["how"] != "done":
                last = outcome["text"].strip().splitlines()[-1]
                self.notes.append(f"the diagnosis could not play the reference in parts: {last}")
                return {}
            return {name: read(folder, f"explain-{world.size}-{name}") for name in names}

        return explain

    def _job(
        self,
        kind: str,
        processes: int,
        names: Sequence[str],
        size: int,
        experts: dict[str, int | None] | None = None,
    ) -> Job:
        return Job(
            kind,
            self.spec,
            "",
            processes,
            tuple((name, size) for name in names),
            self.plan["full"],
            experts,
            self.plan["router"],
            self.plan["facts"],
        )

    def _run(self, job: Job) -> tuple[Path, dict[str, Any]]:
        folder = self.folder / str(self.worlds)
        folder.mkdir()
        self.worlds += 1
        return folder, self.launcher.run(replace(job, folder=str(folder)))

    def report(self) -> Report:
        """Returns the findings."""
        return Report(
            self.spec,
            tuple(self.findings),
            self.errors,
            tuple(dict.fromkeys(self.notes)),
            tuple(self.plan["left_out"]),
            World(1, self.plan, ()).rtol,
        )


def _refuse(outcome: Mapping[str, Any], when: str) -> None:
    """Raises ContractError unless a world succeeded."""
    if outcome["how"] == "contract":
        raise ContractError(outcome["text"])
    if outcome["how"] != "done":
        raise ContractError(
            f"rank {outcome['rank']} {outcome['how']} {when} (at: {outcome['stage']})\n"
            f"{outcome['text']}"
        )
