"""Classifies the fault of a wrong piece by fitting it to parts of the correct result.

The reference was played for each source rank's gradient and each expert alone (rank.py, `explain`).
Every gradient is therefore a sum of known parts: over source ranks, over owners of experts, and the
part that passes no expert. A wrong piece is compared with multiples of the whole, sums over
subsets, any weighted sum of the parts (least squares), and permutations of its rows. The simplest
fit without a residual is the diagnosis; if there is none, the report says so.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import faults
from .compare import Array, Piece, World, relative_error
from .faults import FaultClass
from .ranks.job import OUTPUT, Arrays
from .scenes import Batch

Flags = NDArray[np.bool_]
TRIED_ROWS, TRIED_SUMS = 4, 20_000  # limits of the search for rows with other rows' outputs
CLOSE = 20  # a fit explains a piece if its residual is at most this times the tolerance
FACTOR = 1e-2  # tolerance for recognizing a fitted factor


@dataclass(frozen=True)
class Verdict:
    """Holds a class of fault and its measurement, worded the same for ranks that fail alike."""

    fault: FaultClass
    detail: str


@dataclass(frozen=True)
class Parts:
    """Holds the reference's results by source rank and expert; None: all experts' weights are zero."""

    results: dict[tuple[int, int | None], Arrays]
    directions: dict[int, Array]  # every expert's output for every row, up to a factor
    router: Array | None  # the router's weight

    @classmethod
    def parse(cls, arrays: Arrays, router: Array | None) -> "Parts":
        """Reads what the ranks wrote for one scene."""
        results: dict[tuple[int, int | None], Arrays] = {}
        directions = {}
        for name, values in arrays.items():
            first, second, *rest = name.split("/", 2)
            if first == "direction":
                directions[int(second)] = values
                continue
            expert = None if second == "None" else int(second)
            results.setdefault((int(first), expert), {})[rest[0]] = values
        return cls(results, directions, router)

    @property
    def sources(self) -> list[int]:
        """Returns the ranks whose gradients were played."""
        return sorted({source for source, _ in self.results})

    @property
    def experts(self) -> list[int]:
        """Returns the experts that were played."""
        return sorted({expert for _, expert in self.results if expert is not None})

    def without(self, piece: Piece, source: int) -> Array:
        """Returns the part of a piece that passes no expert."""
        return piece.take(self.results[source, None])

    def through(self, piece: Piece, source: int, expert: int) -> Array:
        """Returns the part of a piece that passes one expert."""
        return piece.take(self.results[source, expert]) - self.without(piece, source)


def diagnose(piece: Piece, world: World, parts: Parts, batch: Batch) -> Verdict:
    """Returns the class of fault of one wrong piece."""
    counts = np.isfinite(piece.want)
    if piece.got.shape != piece.want.shape:
        return Verdict(faults.UNKNOWN, f"has shape {piece.got.shape} instead of {piece.want.shape}")
    if not np.isfinite(piece.got[counts]).all():
        bad = int((~np.isfinite(piece.got[counts])).sum())
        return Verdict(faults.NOT_FINITE, f"{bad} of {int(counts.sum())} values are not finite")
    if piece.kind == "rows":
        return _of_rows(piece, world, parts, batch)
    if piece.kind == "gates":
        return _of_gates(piece, world, batch)
    return _of_weights(piece, world, parts)


# Weights ------------------------------------------------------------------------------------------


def _of_weights(piece: Piece, world: World, parts: Parts) -> Verdict:
    verdict = (
        _whole(piece, world)
        or _by_source(piece, world, parts)
        or _by_owner(piece, world, parts)
        or _by_pair(piece, world, parts)
        or _two_scales(piece, world, parts)
        or _moved_slices(piece, world)
    )
    if verdict is None and piece.kind == "router":
        return Verdict(
            faults.GATE,
            f"holds terms that belong to no route: {_figures(piece)}, and no weighted sum of what "
            "experts contribute explains it",
        )
    if verdict is None:
        return Verdict(faults.UNKNOWN, _figures(piece))
    return verdict


def _whole(piece: Piece, world: World) -> Verdict | None:
    """Fits zero, or one factor."""
    if np.linalg.norm(piece.got) <= world.rtol * np.linalg.norm(piece.want):
        if piece.kind in ("router", "gates"):
            return Verdict(faults.GATE, "is zero: the gate is detached from the loss")
        return Verdict(faults.PARTIAL, "is zero: no part of it arrived")
    factor = _projection(piece.got, piece.want)
    if _fits(piece, factor * piece.want, world):
        return Verdict(faults.SCALED, f"is {_factor(factor, world.size)} times the correct value")
    return None


def _by_source(piece: Piece, world: World, parts: Parts) -> Verdict | None:
    """Fits the tokens of some ranks, whose gradients were not summed."""
    if len(parts.sources) < 2:
        return None
    sums = {
        source: parts.without(piece, source)
        + sum(parts.through(piece, source, expert) for expert in parts.experts)
        for source in parts.sources
    }
    for chosen in _subsets(parts.sources):
        for factor in (1.0, world.size, 1 / world.size):
            guess = factor * np.sum([sums[source] for source in chosen], axis=0)
            if _fits(piece, guess, world):
                return Verdict(
                    faults.PARTIAL,
                    f"holds what the tokens of {_ranks(chosen, piece.rank)} contribute, and "
                    f"nothing of the others{_times(factor, world.size)}",
                )
    return None


def _by_owner(piece: Piece, world: World, parts: Parts) -> Verdict | None:
    """Fits the experts of some ranks, with or without the part that passes no expert."""
    owners = [world.owner(expert) for expert in parts.experts]
    if piece.kind == "experts" or None in owners or world.size == 1:
        return None
    sums = _owner_sums(piece, world, parts)
    without = np.sum([parts.without(piece, source) for source in parts.sources], axis=0)
    for chosen in _subsets(range(world.size)):
        guess = without + np.sum([sums[owner] for owner in chosen], axis=0)
        if _fits(piece, guess, world):
            fault = faults.GATE if piece.kind == "router" else faults.PARTIAL
            return Verdict(
                fault,
                f"holds what passes the experts of {_ranks(chosen, piece.rank)}, and nothing of "
                "the others",
            )
    return None


def _by_pair(piece: Piece, world: World, parts: Parts) -> Verdict | None:
    """Fits every rank's tokens at its own experts only, or at all others."""
    owners = [world.owner(expert) for expert in parts.experts]
    if len(parts.sources) < 2 or None in owners:
        return None
    own = np.sum(
        [
            parts.through(piece, source, expert)
            for source, expert in itertools.product(parts.sources, parts.experts)
            if world.owner(expert) == source
        ],
        axis=0,
    )
    without = np.sum([parts.without(piece, source) for source in parts.sources], axis=0)
    fault = faults.GATE if piece.kind == "router" else faults.PARTIAL
    if _fits(piece, without + own, world):
        return Verdict(fault, "holds what passes experts on the rows' own rank, and no other")
    if _fits(piece, piece.want - own, world):
        return Verdict(fault, "lacks what passes experts on the rows' own rank")
    return None


def _two_scales(piece: Piece, world: World, parts: Parts) -> Verdict | None:
    """Fits one factor for what passes experts, another for the rest."""
    without = np.sum([parts.without(piece, source) for source in parts.sources], axis=0)
    through = piece.want - without
    columns = [without, through]
    if any(np.linalg.norm(column) < 1e-9 for column in columns):
        return None
    factors, residual = _least_squares(piece.got, columns)
    if residual > CLOSE * world.rtol:
        return None
    words = (
        f"what passes no expert is {_factor(factors[0], world.size)} times, what passes experts "
        f"{_factor(factors[1], world.size)} times the correct value"
    )
    lacking = min(abs(factors)) < FACTOR
    return Verdict(faults.PARTIAL if lacking else faults.SCALED, words)


def _moved_slices(piece: Piece, world: World) -> Verdict | None:
    """Finds experts' gradients that are in each other's places."""
    if piece.kind != "experts" or len(piece.want) < 2:
        return None
    matched = _match_rows(piece.got, piece.want, world)
    moved = [(here, there) for here, there in matched.items() if here != there]
    if len(matched) < len(piece.want) or not moved:
        return None
    pairs = ", ".join(f"{here} holds that of {there}" for here, there in moved[:3])
    return Verdict(faults.ORDER, f"slices lie in each other's places: {pairs}")


def _owner_sums(piece: Piece, world: World, parts: Parts) -> list[Array]:
    sums = [np.zeros_like(piece.want) for _ in range(world.size)]
    for source, expert in itertools.product(parts.sources, parts.experts):
        owner = world.owner(expert)
        assert owner is not None
        sums[owner] = sums[owner] + parts.through(piece, source, expert)
    return sums


# Rows ---------------------------------------------------------------------------------------------


def _of_rows(piece: Piece, world: World, parts: Parts, batch: Batch) -> Verdict:
    verdict = _whole(piece, world) or _by_routes(piece, world, parts)
    if verdict is None and piece.quantity != OUTPUT and parts.router is not None:
        verdict = _beside_the_router(piece, world, parts)
    if verdict is None:
        verdict = _moved_rows(piece, world) or _moved_routes(piece, world, parts)
    if verdict is None and piece.quantity == OUTPUT:
        verdict = _wrong_experts(piece, world, parts, batch)
    return verdict or Verdict(faults.UNKNOWN, _figures(piece))


def _by_routes(piece: Piece, world: World, parts: Parts) -> Verdict | None:
    """Fits rows as weighted sums of their experts' parts."""
    coefficients = _row_coefficients(piece, world, parts)
    return None if coefficients is None else _of_coefficients(coefficients, piece, world)


def _beside_the_router(piece: Piece, world: World, parts: Parts) -> Verdict | None:
    """Fits the rows' gradient without the router's part, which lies along the router's rows.

    If the orthogonal part, which came only through experts, is correct, only the router's part is
    wrong.
    """
    assert parts.router is not None
    basis, _ = np.linalg.qr(parts.router.T)
    coefficients = _row_coefficients(piece, world, parts, basis)
    if coefficients is None:
        return None
    held = ~np.isnan(coefficients)
    if (abs(coefficients[held] - 1) < FACTOR).all():
        return Verdict(faults.GATE, "is correct except for the part through the router")
    verdict = _of_coefficients(coefficients, piece, world)
    return Verdict(verdict.fault, f"{verdict.detail} (ignoring the part through the router)")


def _row_coefficients(
    piece: Piece, world: World, parts: Parts, aside: Array | None = None
) -> Array | None:
    """Returns (rows, experts) factors of each expert's part in each row; NaN if there is no such
    part.

    None if a row is not a weighted sum of its experts' parts. `aside` is an orthonormal basis of
    directions to ignore.
    """
    through, got = _row_parts(piece, parts), piece.got - _row_rest(piece, parts)
    if aside is not None:
        through, got = through - through @ aside @ aside.T, got - got @ aside @ aside.T
    found = np.full((len(piece.want), len(parts.experts)), np.nan)
    scale = np.linalg.norm(piece.want) / np.sqrt(max(1, len(piece.want)))
    for row in np.flatnonzero(np.isfinite(piece.want).all(axis=-1)):
        norms = np.linalg.norm(through[:, row], axis=-1)
        held = np.flatnonzero(norms > 1e-6 * max(1e-9, norms.max(initial=0)))
        if len(held) == 0:
            if np.linalg.norm(got[row]) > CLOSE * world.rtol * scale:
                return None
            continue
        factors, residual = _least_squares(got[row], list(through[held, row]), scale=scale)
        if residual > CLOSE * world.rtol:
            return None
        found[row, held] = factors
    return found


def _row_parts(piece: Piece, parts: Parts) -> Array:
    """Returns what passes each expert, (experts, rows, width)."""
    sources = parts.sources[:1] if piece.quantity == OUTPUT else parts.sources
    return np.stack(
        [
            np.sum([parts.through(piece, source, expert) for source in sources], axis=0)
            for expert in parts.experts
        ]
    )


def _row_rest(piece: Piece, parts: Parts) -> Array:
    """Returns what passes no expert, (rows, width)."""
    sources = parts.sources[:1] if piece.quantity == OUTPUT else parts.sources
    return np.sum([parts.without(piece, source) for source in sources], axis=0)


def _of_coefficients(coefficients: Array, piece: Piece, world: World) -> Verdict:
    held = ~np.isnan(coefficients)
    values = coefficients[held]
    lost = held & (abs(np.nan_to_num(coefficients, nan=1.0)) < FACTOR)
    doubled = held & (np.nan_to_num(coefficients, nan=1.0) > 2 - 2 * FACTOR)
    plain = held & (abs(np.nan_to_num(coefficients, nan=0.0) - 1) < FACTOR)
    words = "of the output" if piece.quantity == OUTPUT else "of the rows' gradients"
    if (lost | doubled | plain)[held].all() and np.allclose(
        coefficients[doubled], np.round(coefficients[doubled]), atol=2 * FACTOR
    ):
        owners = np.array([world.owner(expert) for expert in range(coefficients.shape[1])])
        foreign = held & (owners != piece.rank)[None, :]
        if lost.any() and (lost == foreign).all() and None not in owners:
            return Verdict(
                faults.PARTIAL,
                "holds what passes the experts of its own rank, and nothing of the others",
            )
        return Verdict(
            faults.LOST,
            f"{int(lost.sum())} of {len(values)} routes are missing and {int(doubled.sum())} "
            f"counted more than once{_whose(lost | doubled, owners)} ({words})",
        )
    return Verdict(
        faults.ORDER,
        f"routes have other gate weights than their own: factors from {values.min():.2f} to "
        f"{values.max():.2f}",
    )


def _whose(lost: Flags, owners: NDArray[np.object_]) -> str:
    experts = np.flatnonzero(lost.any(axis=0))
    rows = np.flatnonzero(lost.any(axis=1))
    if len(experts) == 1:
        return f", all of expert {experts[0]}"
    hit = {owner for owner in owners[experts] if owner is not None}
    if len(hit) == 1 and len(experts) > 1:
        return f", all to experts of rank {hit.pop()}"
    if len(rows) == 1:
        return f", all of row {rows[0]}"
    return ""


def _moved_rows(piece: Piece, world: World) -> Verdict | None:
    matched = _match_rows(piece.got, piece.want, world)
    moved = [(here, there) for here, there in matched.items() if here != there]
    wrong = _wrong_rows(piece.got, piece.want, world)
    if not moved or len(moved) < len(wrong) / 2:
        return None
    pairs = ", ".join(f"{here} holds that of {there}" for here, there in moved[:3])
    return Verdict(
        faults.ORDER,
        f"{len(moved)} of {len(piece.want)} rows are other rows of the same rank: row {pairs}",
    )


def _moved_routes(piece: Piece, world: World, parts: Parts) -> Verdict | None:
    """Finds rows that hold experts' outputs for other rows of the rank."""
    through, got = _row_parts(piece, parts), piece.got - _row_rest(piece, parts)
    experts, rows = np.nonzero(np.linalg.norm(through, axis=-1) > 1e-6)
    top_k = world.plan["facts"]["top_k"]
    wrong = _wrong_rows(piece.got, piece.want, world)[:TRIED_ROWS]
    if not wrong or math.comb(len(rows), top_k) > TRIED_SUMS:
        return None
    found = {}
    for row in wrong:
        for chosen in itertools.combinations(range(len(rows)), top_k):
            columns = [through[experts[route], rows[route]] for route in chosen]
            if _least_squares(got[row], columns)[1] <= CLOSE * world.rtol:
                found[row] = sorted({int(rows[route]) for route in chosen})
                break
    if len(found) < len(wrong):
        return None
    pairs = ", ".join(f"row {row} holds those of {others}" for row, others in found.items())
    return Verdict(faults.ORDER, f"answers to other rows of the same rank: {pairs}")


def _wrong_experts(piece: Piece, world: World, parts: Parts, batch: Batch) -> Verdict | None:
    """Finds rows that were computed by experts not chosen for them."""
    rows = batch.rows_of(piece.rank or 0) if world.own_tokens else slice(None)
    without = _row_rest(piece, parts)
    if not parts.directions or len(parts.directions) >= piece.want.shape[-1]:
        return None
    directions = np.stack([parts.directions[e][rows] for e in sorted(parts.directions)]) - without
    asked = np.linalg.norm(_row_parts(piece, parts), axis=-1) > 1e-9
    strays = 0
    wrong = _wrong_rows(piece.got, piece.want, world)
    for row in wrong:
        factors, residual = _least_squares(piece.got[row] - without[row], list(directions[:, row]))
        if residual > CLOSE * world.rtol:
            return None
        strays += int(((abs(factors) > FACTOR) & ~asked[:, row]).any())
    if not strays:
        return None
    return Verdict(
        faults.ORDER, f"{strays} of {len(piece.want)} rows were answered by experts not theirs"
    )


# Gates --------------------------------------------------------------------------------------------


def _of_gates(piece: Piece, world: World, batch: Batch) -> Verdict:
    """Classifies gradients of given gate weights, (rows, K)."""
    whole = _whole(piece, world)
    if whole is not None:
        return whole
    rows = batch.rows_of(piece.rank or 0) if world.own_tokens else slice(None)
    experts_TK = batch.experts_TK[rows]
    owners = np.array([world.owner(e) for e in range(world.plan["facts"]["num_experts"])])
    if None not in owners:
        own = np.where(owners[experts_TK] == piece.rank, piece.want, 0)
        if _fits(piece, own, world):
            return Verdict(
                faults.GATE,
                "is there for routes to experts of the row's own rank, and zero for the others",
            )
    if _fits(piece, np.sort(piece.want, axis=-1), world, np.sort(piece.got, axis=-1)):
        return Verdict(faults.ORDER, "a row's gradients lie in each other's places")
    zero = abs(piece.got) <= 1e-12
    right = abs(piece.got - piece.want) <= CLOSE * world.rtol * abs(piece.want).max()
    if (zero | right).all():
        return Verdict(faults.GATE, f"is zero for {int((zero & ~right).sum())} of {zero.size}")
    flat_got, flat_want = np.sort(piece.got, axis=None), np.sort(piece.want, axis=None)
    if _fits(piece, flat_want, world, flat_got):
        return Verdict(faults.ORDER, "the right gradients, on other routes")
    return Verdict(faults.GATE, f"is neither scaled, nor partial, nor permuted: {_figures(piece)}")


# Fits ---------------------------------------------------------------------------------------------


def _fits(piece: Piece, guess: Array, world: World, got: Array | None = None) -> bool:
    return relative_error(piece.got if got is None else got, guess) <= CLOSE * world.rtol


def _projection(got: Array, want: Array) -> float:
    counts = np.isfinite(want)
    square = float((want[counts] ** 2).sum())
    return float((got[counts] * want[counts]).sum()) / square if square else 0.0


def _least_squares(
    target: Array, columns: Sequence[Array], *, scale: float | None = None
) -> tuple[Array, float]:
    """Returns the factors, and the residual relative to the target (or to `scale`)."""
    matrix = np.stack([column.ravel() for column in columns], axis=-1)
    factors, *_ = np.linalg.lstsq(matrix, target.ravel(), rcond=1e-7)
    left = float(np.linalg.norm(matrix @ factors - target.ravel()))
    return np.asarray(factors, np.float64), left / max(
        scale or float(np.linalg.norm(target)), 1e-12
    )


def _wrong_rows(got: Array, want: Array, world: World) -> list[int]:
    return [row for row in range(len(want)) if relative_error(got[row], want[row]) > world.rtol]


def _match_rows(got: Array, want: Array, world: World) -> dict[int, int]:
    """Returns, for every row or slice, the one that it equals, if any."""
    matched = {}
    for here, row in enumerate(got):
        errors = [relative_error(row, other) for other in want]
        best = int(np.argmin(errors))
        if errors[best] <= CLOSE * world.rtol and np.linalg.norm(want[best]) > 1e-9:
            matched[here] = here if errors[here] <= CLOSE * world.rtol else best
    return matched


def _subsets(ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """Yields all proper non-empty subsets, smallest first; `_whole` covers the empty one."""
    ranks = list(ranks)
    return [
        chosen for size in range(1, len(ranks)) for chosen in itertools.combinations(ranks, size)
    ]


# Words --------------------------------------------------------------------------------------------


def _factor(factor: float, size: int) -> str:
    for number, words in ((size, f"{size} (the number of ranks)"), (1 / size, f"1/{size}")):
        if size > 1 and abs(factor - number) < FACTOR * number:
            return words
    return f"{factor:.3f}"


def _times(factor: float, size: int) -> str:
    return "" if factor == 1.0 else f", {_factor(factor, size)} times"


def _ranks(chosen: Sequence[int], own: int | None) -> str:
    if own is not None and list(chosen) == [own]:
        return "its own rank"
    return f"rank{'s' if len(chosen) > 1 else ''} {', '.join(map(str, chosen))}"


def _figures(piece: Piece) -> str:
    """Returns relative error, ratio of norms and cosine, for faults without a name."""
    counts = np.isfinite(piece.want)
    got, want = piece.got[counts], piece.want[counts]
    norms = float(np.linalg.norm(got)), float(np.linalg.norm(want))
    cosine = float((got * want).sum()) / max(norms[0] * norms[1], 1e-30)
    return (
        f"relative error {relative_error(piece.got, piece.want):.2g}, "
        f"{norms[0] / max(norms[1], 1e-30):.3g} times as long, cosine {cosine:.4f}"
    )
