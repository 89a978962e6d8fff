"""Turns wrong pieces into findings: causes, consequences, and the scenes in which they show.

If a scene's output is wrong, so are its gradients, and only the output is diagnosed there. A fault
that shows in many scenes is diagnosed in the first one; scenes with many rows come first.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import faults
from .compare import Piece, World, relative_error
from .diagnose import Parts, Verdict, diagnose
from .faults import FaultClass
from .ranks.job import INPUT, NORM, OUTPUT, PARAMETER, Arrays
from .ranks.values import draw
from .report import Finding
from .scenes import Batch, Scene

Explain = Callable[[Sequence[str]], dict[str, Arrays]]
PROBE, PROBED = "other samples elsewhere", "uneven"


@dataclass(frozen=True)
class Played:
    """Holds one played scene on one number of ranks."""

    scene: Scene
    batch: Batch
    pieces: list[Piece]
    ranks: list[Arrays]

    def wrong(self, rtol: float) -> list[Piece]:
        """Returns the pieces that differ from a single rank's."""
        return [piece for piece in self.pieces if not piece.error <= rtol]


def judge(world: World, played: Mapping[str, Played], explain: Explain) -> list[Finding]:
    """Returns a layer's faults on one number of ranks."""
    wrong = {
        name: scene.wrong(world.rtol)
        for name, scene in played.items()
        if not scene.scene.spoil and scene.wrong(world.rtol)
    }
    findings = [*_of_samples(world, played), *_of_norm(world, played)]
    elsewhere = {piece.quantity for pieces in wrong.values() for piece in pieces}
    findings += _of_spoiled(world, played, elsewhere)
    if not wrong or any(f.fault is faults.SAMPLES and f.quantity == OUTPUT for f in findings):
        return findings
    causes, follows = _causes(wrong)
    first = [(quantity, scenes[0]) for (quantity, _), scenes in causes.items()]
    parts = {
        name: Parts.parse(arrays, _router(world))
        for name, arrays in explain(list(dict.fromkeys(name for _, name in first))).items()
    }
    made: dict[tuple[str, str], Finding] = {}
    for ((quantity, _), scenes), (_, name) in zip(causes.items(), first, strict=True):
        pieces = [piece for piece in wrong[name] if piece.quantity == quantity]
        for finding in _diagnosed(pieces, world, parts.get(name), played[name].batch):
            key = (finding.fault.name, quantity)
            known = made[key].scenes if key in made else ()
            merged = sorted({*known, *scenes}, key=list(played).index)
            made[key] = _with_scenes(made.get(key, finding), merged, wrong)
    return findings + _without_consequences(list(made.values()), follows)


def stopped(size: int, outcome: Mapping[str, Any]) -> Finding:
    """Returns the finding for a world that crashed or hung."""
    hangs = outcome["how"] == "hangs"
    words = {"raised": "raised an error", "died": "died", "hangs": "hangs"}
    others = "; ".join(f"rank {rank}: {doing}" for rank, doing in outcome["others"])
    return Finding(
        faults.HANG if hangs else faults.CRASH,
        size,
        f"rank {outcome['rank']} {words[outcome['how']]} in {outcome['stage']}",
        (outcome["scene"],),
        f"{_short(outcome['text'])}" + (f" ({others})" if others else ""),
        (outcome["rank"],),
        text=outcome["text"],
    )


def _short(text: str) -> str:
    """Returns the last line of a traceback, or the innermost frame of every stack."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if "Traceback" in text else lines[0]


def _router(world: World) -> np.ndarray | None:
    name = world.plan["router"]
    if name is None or world.plan["facts"]["given"]:
        return None
    return draw(name, tuple(world.plan["full"][name]), name)


# Causes -------------------------------------------------------------------------------------------


def _causes(
    wrong: Mapping[str, list[Piece]],
) -> tuple[dict[tuple[str, bool], list[str]], set[str]]:
    """Returns the scenes in which each quantity is wrong by itself, and the consequences.

    Scenes in which it is finite and scenes in which it is not are kept apart.
    """
    causes: dict[tuple[str, bool], list[str]] = {}
    follows: set[str] = set()
    for name, pieces in wrong.items():
        quantities = dict.fromkeys(piece.quantity for piece in pieces)
        if OUTPUT in quantities:
            follows |= set(quantities) - {OUTPUT}
            quantities = {OUTPUT: None}
        for quantity in quantities:
            errors = [piece.error for piece in pieces if piece.quantity == quantity]
            causes.setdefault((quantity, bool(np.isfinite(errors).all())), []).append(name)
    return causes, follows - {quantity for quantity, _ in causes}


def _diagnosed(
    pieces: list[Piece], world: World, parts: Parts | None, batch: Batch
) -> list[Finding]:
    """Returns one finding for every class among the ranks' pieces of one quantity."""
    verdicts = [
        (piece, Verdict(faults.UNKNOWN, "not diagnosed: see the notes"))
        if parts is None
        else (piece, diagnose(piece, world, parts, batch))
        for piece in pieces
    ]
    classes = dict.fromkeys(verdict.fault for _, verdict in verdicts)
    if len(classes) > 1:
        classes.pop(faults.UNKNOWN, None)
    return [
        _finding([(piece, v) for piece, v in verdicts if v.fault is fault], fault, world)
        for fault in classes
    ]


def _finding(alike: list[tuple[Piece, Verdict]], fault: FaultClass, world: World) -> Finding:
    details = list(dict.fromkeys(verdict.detail for _, verdict in alike))
    ranks = tuple(piece.rank for piece, _ in alike if piece.rank is not None)
    return Finding(
        fault,
        world.size,
        alike[0][0].quantity.removeprefix(PARAMETER),
        (),
        _one_detail(details, ranks, world.size),
        ranks,
    )


def _one_detail(details: list[str], ranks: tuple[int, ...], size: int) -> str:
    where = "" if not ranks or len(ranks) == size else f" (rank {', '.join(map(str, ranks))})"
    more = f"; {len(details) - 1} other ranks differ in detail" if len(details) > 1 else ""
    return f"{details[0]}{more}{where}"


def _with_scenes(
    finding: Finding, scenes: Sequence[str], wrong: Mapping[str, list[Piece]]
) -> Finding:
    name = finding.quantity
    errors = [
        piece.error
        for scene in scenes
        for piece in wrong[scene]
        if piece.quantity.removeprefix(PARAMETER) == name
    ]
    finite = [error for error in errors if np.isfinite(error)]
    if finding.fault is not faults.NOT_FINITE and finite:
        errors = finite
    return replace(finding, scenes=tuple(scenes), worst=max(errors))


def _without_consequences(made: list[Finding], follows: set[str]) -> list[Finding]:
    """Turns unrecognized quantities into consequences if another of their scenes has a name."""
    named = [finding for finding in made if finding.fault is not faults.UNKNOWN]
    kept = []
    for finding in made:
        scenes = {scene for other in named for scene in other.scenes}
        if finding.fault is faults.UNKNOWN and set(finding.scenes) <= scenes:
            follows = follows | {finding.quantity}
        else:
            kept.append(finding)
    words = tuple(sorted(name.removeprefix(PARAMETER) for name in follows))
    return [replace(finding, follows=words) for finding in kept]


# Faults that are measured by themselves -----------------------------------------------------------


def _of_samples(world: World, played: Mapping[str, Played]) -> list[Finding]:
    """Checks that rank 0's rows, equal in two scenes, give equal results."""
    if PROBE not in played or PROBED not in played:
        return []
    here, there = played[PROBED], played[PROBE]
    rows = here.batch.rows_of(0)
    for quantity in (OUTPUT, INPUT):
        changed = relative_error(there.ranks[0][quantity][rows], here.ranks[0][quantity][rows])
        if np.isfinite(changed) and changed > world.rtol:
            where = "of other ranks" if world.own_tokens else "of the batch"
            return [
                Finding(
                    faults.SAMPLES,
                    world.size,
                    quantity,
                    (PROBED, PROBE),
                    f"rank 0's {len(here.batch.x_TD[rows])} rows change by {changed:.2g} when the "
                    f"other rows {where} are others",
                    (0,),
                    worst=changed,
                )
            ]
    return []


def _of_spoiled(world: World, played: Mapping[str, Played], elsewhere: set[str]) -> list[Finding]:
    """Checks that NaN in one token leaves finite what must stay finite."""
    findings = []
    for name, scene in played.items():
        wrong = scene.wrong(world.rtol) if scene.scene.spoil else []
        spread = [piece for piece in wrong if piece.quantity not in elsewhere]
        if not spread:
            continue
        quantities = list(dict.fromkeys(p.quantity.removeprefix(PARAMETER) for p in spread))
        findings.append(
            Finding(
                faults.SAMPLES,
                world.size,
                ", ".join(quantities),
                (name,),
                "NaN in one token changes what does not depend on it",
                tuple(sorted({p.rank for p in spread if p.rank is not None})),
                worst=float("inf"),
            )
        )
    return findings


def _of_norm(world: World, played: Mapping[str, Played]) -> list[Finding]:
    """Checks the norm of the gradients that the ranks have, whether correct or not."""
    scenes, details, worst = [], [], 0.0
    for name, scene in played.items():
        if any(NORM not in rank for rank in scene.ranks):
            continue
        norms = [float(rank[NORM]) for rank in scene.ranks]
        replicated, experts = _squares(world, scene.ranks)
        want = np.sqrt(np.array(replicated) + sum(experts))
        error = float((abs(norms - want) / np.maximum(want, 1e-2)).max())
        if error > max(world.rtol, 1e-6):  # not where gradients are NaN
            scenes.append(name)
            worst = max(worst, error)
            details.append(_norm_words(norms, want[0], replicated[0], experts))
    if not scenes:
        return []
    found = Finding(
        faults.NORM, world.size, "gradient norm", tuple(scenes), details[0], (), worst=worst
    )
    return [found]


def _squares(world: World, ranks: Sequence[Arrays]) -> tuple[list[float], list[float]]:
    """Returns, by rank, the squared norms of replicated parameters and of its experts."""
    replicated, experts = [0.0] * world.size, [0.0] * world.size
    for rank, played in enumerate(ranks):
        for key, values in played.items():
            if key.startswith(PARAMETER):
                shard = world.shards[rank][key.removeprefix(PARAMETER)]
                (replicated if shard is None else experts)[rank] += float((values**2).sum())
    return replicated, experts


def _norm_words(norms: list[float], want: float, replicated: float, experts: list[float]) -> str:
    size, total = len(norms), sum(experts)
    own = [math.sqrt(replicated + square) for square in experts]
    guesses: list[tuple[str, Sequence[float]]] = [
        ("every rank counts its own experts alone", own),
        ("the mean of norms that count each rank's own experts alone", [sum(own) / size] * size),
        ("experts are left out", [math.sqrt(replicated)] * size),
        ("what is replicated is left out", [math.sqrt(total)] * size),
        (f"what is replicated counts {size} times", [math.sqrt(size * replicated + total)] * size),
        (
            "everything is divided by the ranks",
            [math.sqrt((size * replicated + total) / size)] * size,
        ),
        ("experts count divided by the ranks", [math.sqrt(replicated + total / size)] * size),
        (f"experts count {size} times", [math.sqrt(replicated + size * total)] * size),
    ]
    said = ", ".join(f"{norm:.4g}" for norm in norms)
    figures = f"ranks say {said}, the gradients' norm is {want:.4g}"
    for words, guess in guesses:
        if np.allclose(norms, guess, rtol=1e-3):
            return f"{words}: {figures}"
    return figures
