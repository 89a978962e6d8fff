"""Groups rows into batches that share common beginnings and waste little padding.

Rows come in families, such as the options of one question, which mostly begin with the same tokens.
A common beginning goes through the model once, for all rows that share it. (If the left ends of a
family were cut at different places, this holds for each part.) All beginnings of a batch are cut to
the shortest one, so that a batch with a cache needs no padding on the left; the cut-off tokens are
computed with the ends. Ends are padded on the right, which a causal model does not see.

A pass costs as much as about 200 additional tokens: on a core with AVX-512, a model of 7M
parameters takes 20 ms for one token and 250 ms for 2048. A batch is therefore closed when padding
would cost more than that, and rows of similar length go together.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LEAST_SHARED = 16  # tokens; a shorter beginning costs less than a pass of its own
PASS_TOKENS = 200  # cost of a pass in tokens, on a CPU
_MOST_TOKENS = 2**13  # of one pass
_MOST_CACHED = 2**14  # positions with keys and values, over all rows of a batch


@dataclass(frozen=True)
class Row:
    """Holds input tokens and how many of them, at the end, are scored."""

    tokens: tuple[int, ...]
    num_scored: int
    num_cut: int = 0  # tokens cut off on the left

    def __post_init__(self) -> None:
        if not 1 <= self.num_scored < len(self.tokens):
            raise ValueError(
                f"a row of {len(self.tokens)} tokens cannot score {self.num_scored} of them: score at "
                "least one, each after another token"
            )


Family = Sequence[Row]


def rolling_rows(
    tokens: Sequence[int], prefix: int, context: int, *, stride: int | None = None
) -> list[Row]:
    """Returns rows that together score every token of a text once.

    Args:
        tokens: of the text.
        prefix: the token before the first one.
        context: tokens of a row's input.
        stride: tokens that each row after the first scores; None: as many as the context, so that
            only the last row has more context than it needs.
    """
    line, stride = [prefix, *tokens], stride or context
    rows, done = [], 0
    while done < len(tokens):
        scored = min(context if not rows else stride, len(tokens) - done)
        done += scored
        rows.append(Row(tuple(line[max(0, done - context) : done + 1]), scored))
    return rows


@dataclass(frozen=True)
class RowBatch:
    """Names rows that go through the model together, by family, and the length of their shared
    beginning.
    """

    families: tuple[tuple[int, tuple[int, ...]], ...]  # family number, row numbers
    prefix: int

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Returns the rows as (family number, row number)."""
        return [(family, row) for family, rows in self.families for row in rows]


@dataclass(frozen=True)
class _Cluster:
    """Names rows of a family that begin alike."""

    family: int
    rows: tuple[int, ...]
    prefix: int  # shared tokens at the beginning, none of them scored
    longest: int  # input tokens of the longest row after the prefix

    @property
    def cost(self) -> int:
        """Returns the tokens computed for the cluster alone."""
        return self.prefix + len(self.rows) * self.longest


def rows_alone(families: Sequence[Family], rank: int, num_ranks: int) -> Iterator[RowBatch]:
    """Yields a rank's rows, one per batch."""
    places = [(f, r) for f, family in enumerate(families) for r in range(len(family))]
    for f, r in places[rank::num_ranks]:
        yield RowBatch(((f, (r,)),), 0)


def plan_batches(
    families: Sequence[Family],
    rank: int,
    num_ranks: int,
    *,
    pass_tokens: int = PASS_TOKENS,
) -> Iterator[RowBatch]:
    """Yields a rank's batches: those with common beginnings first, longest rows first.

    Args:
        families: rows that may begin alike.
        rank: this rank.
        num_ranks: ranks that share the rows.
        pass_tokens: cost of a pass, in tokens.
    """
    clusters: list[_Cluster] = []
    single: list[tuple[int, int, int]] = []  # length, family, row
    for f, family in enumerate(families):
        for rows in _alike(family):
            lengths = [len(family[r].tokens) - 1 for r in rows]
            cluster = _cluster(f, family, rows)
            if len(rows) > 1 and cluster.cost < sum(lengths):
                clusters.append(cluster)
            else:
                single += zip(lengths, [f] * len(rows), rows, strict=True)
    clusters.sort(key=_similar_together)
    single.sort(reverse=True)
    yield from _batches_of_clusters(clusters[rank::num_ranks], pass_tokens)
    yield from _batches_of_single(single[rank::num_ranks], pass_tokens)


def shared_length(family: Family) -> int:
    """Returns how many tokens all rows of a family share at the beginning, before any scored one."""
    first = family[0].tokens
    longest = min(len(row.tokens) - 1 - row.num_scored for row in family)
    for place in range(longest):
        if any(row.tokens[place] != first[place] for row in family):
            return place
    return longest


def _alike(family: Family) -> list[list[int]]:
    """Returns the row numbers of a family, grouped by equal beginnings."""
    found: dict[object, list[int]] = {}
    for r, row in enumerate(family):
        has_room = len(row.tokens) - 1 - row.num_scored >= LEAST_SHARED
        found.setdefault(row.tokens[:LEAST_SHARED] if has_room else r, []).append(r)
    return list(found.values())


def _cluster(number: int, family: Family, rows: Sequence[int]) -> _Cluster:
    chosen = [family[r] for r in rows]
    prefix = shared_length(chosen)
    longest = max(len(row.tokens) for row in chosen) - 1 - prefix
    return _Cluster(number, tuple(rows), prefix, longest)


def _similar_together(cluster: _Cluster) -> tuple[int, int, int]:
    """Returns the sort key of clusters: length of the beginning in steps of an eighth, then of the
    ends.
    """
    step = round(math.log(cluster.prefix) / math.log(1.125))
    return -step, -cluster.longest, cluster.family


@dataclass
class _Open:
    """Collects clusters for the batch being filled."""

    pass_tokens: int
    clusters: list[_Cluster] = field(default_factory=list)
    num_rows: int = 0
    prefix: int = 0
    total: int = 0  # tokens of the longest row
    cost: int = 0  # of its clusters as separate batches

    def takes(self, more: _Cluster) -> bool:
        """Adds a cluster and returns True, unless it does not fit or is cheaper in a batch of its
        own.
        """
        rows = self.num_rows + len(more.rows)
        prefix = min(self.prefix or more.prefix, more.prefix)
        total = max(self.total, more.prefix + more.longest)
        count = len(self.clusters) + 1
        cost = count * prefix + rows * (total - prefix)
        fits = (
            count * prefix <= _MOST_TOKENS
            and rows * total <= _MOST_CACHED
            and cost <= self.cost + more.cost + 2 * self.pass_tokens
        )
        if self.clusters and not fits:
            return False
        self.clusters.append(more)
        self.num_rows, self.prefix, self.total = rows, prefix, total
        self.cost += more.cost
        return True

    def closed(self) -> RowBatch:
        """Returns the batch of the collected clusters."""
        return RowBatch(tuple((one.family, one.rows) for one in self.clusters), self.prefix)


def _batches_of_clusters(clusters: Sequence[_Cluster], pass_tokens: int) -> Iterator[RowBatch]:
    batch = _Open(pass_tokens)
    for cluster in clusters:
        if not batch.takes(cluster):
            yield batch.closed()
            batch = _Open(pass_tokens)
            batch.takes(cluster)
    if batch.clusters:
        yield batch.closed()


def _batches_of_single(
    single: Sequence[tuple[int, int, int]], pass_tokens: int
) -> Iterator[RowBatch]:
    """Yields batches of (length, family, row), sorted longest first."""
    first = 0
    while first < len(single):
        longest, padding, last = single[first][0], 0, first + 1
        while last < len(single) and (last + 1 - first) * longest <= _MOST_TOKENS:
            padding += longest - single[last][0]
            if padding > pass_tokens:
                break
            last += 1
        yield RowBatch(tuple((f, (r,)) for _, f, r in single[first:last]), 0)
        first = last
