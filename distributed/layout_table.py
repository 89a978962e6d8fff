"""Renders a layout as plain text: coordinates of ranks, experts, and the links of groups."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .layout import (
    AXES,
    DENSE_AXES,
    SPARSE_AXES,
    Layout,
    check_experts,
    coordinates,
    group_of,
    local_experts,
    rank_tables,
    spell_product,
    spell_ranks,
    spell_span,
)

_PLACES = (*DENSE_AXES, "efsdp", "ep")


def render_layout(
    layout: Layout, ranks_per_node: int, num_experts: Mapping[str, int] | None = None
) -> str:
    """Renders a layout; `num_experts` is the number of experts by layer name, None to omit them.

    Raises:
        ValueError: the ranks of a node do not divide the world, or a layer has too few experts.
    """
    if ranks_per_node < 1 or layout.world_size % ranks_per_node:
        raise ValueError(
            f"{ranks_per_node} ranks per node do not divide a world of {layout.world_size} ranks: choose a "
            "divisor"
        )
    check_experts(layout, num_experts or {})
    num_nodes = layout.world_size // ranks_per_node
    lines = [
        f"world of {_plural(layout.world_size, 'rank')}: {_plural(num_nodes, 'node')} of "
        f"{_plural(ranks_per_node, 'rank')}",
        f"  dense view   {spell_product(layout, DENSE_AXES)}",
        f"  sparse view  {spell_product(layout, SPARSE_AXES)}",
        "",
        *_columns(_place_rows(layout, ranks_per_node)),
    ]
    if num_experts:
        lines += ["", "experts", *_columns(_expert_rows(layout, num_experts))]
    return "\n".join([*lines, "", "groups", *_columns(_group_rows(layout, ranks_per_node))])


def _place_rows(layout: Layout, ranks_per_node: int) -> list[list[str]]:
    """Returns one row per run of consecutive ranks on a node whose coordinates form spans.

    Along a run each coordinate is constant or counts up with the rank.
    """
    rows = [["node", "ranks", *_PLACES]]
    for first, last in _runs(layout, ranks_per_node):
        ends = [coordinates(layout, rank) for rank in (first, last)]
        spans = [[getattr(place, axis) for place in ends] for axis in _PLACES]
        node = str(first // ranks_per_node)
        rows.append([node, spell_span(first, last), *(spell_span(*span) for span in spans)])
    return rows


def _runs(layout: Layout, ranks_per_node: int) -> Iterator[tuple[int, int]]:
    """Yields the first and last rank of every run that fits one row."""
    first, run_steps = 0, None
    before = coordinates(layout, 0)
    for rank in range(1, layout.world_size):
        here = coordinates(layout, rank)
        steps = tuple(getattr(here, axis) - getattr(before, axis) for axis in _PLACES)
        before = here
        is_regular = set(steps) <= {0, 1} and steps == (run_steps or steps)
        if rank % ranks_per_node == 0 or not is_regular:
            yield first, rank - 1
            first, run_steps = rank, None
        else:
            run_steps = steps
    yield first, layout.world_size - 1


def _expert_rows(layout: Layout, num_experts: Mapping[str, int]) -> list[list[str]]:
    rows = [["ep", *num_experts, "on ranks"]]
    for rank in group_of(layout, "ep", 0):
        blocks = [local_experts(layout, rank, count, name) for name, count in num_experts.items()]
        holders = group_of(layout, "expert_replicas", rank)
        spans = (spell_span(block[0], block[-1]) for block in blocks)
        rows.append([str(rank), *spans, spell_ranks(holders)])
    return rows


def _group_rows(layout: Layout, ranks_per_node: int) -> list[list[str]]:
    rows = [["axis", "size", "groups", "links", "the first"]]
    tables = rank_tables(layout)
    for axis in AXES:
        groups = tables[axis]
        links = _links(groups, ranks_per_node)
        rows.append([axis, str(len(groups[0])), str(len(groups)), links, spell_ranks(groups[0])])
    return rows


def _links(groups: Sequence[Sequence[int]], ranks_per_node: int) -> str:
    """Describes which links the groups of an axis use."""
    nodes = [Counter(rank // ranks_per_node for rank in group) for group in groups]
    crossing = sum(len(touched) > 1 for touched in nodes)
    if len(groups[0]) == 1:
        return "nothing to send"
    if crossing == 0:
        return "inside a node"
    if crossing < len(groups):
        return f"{crossing} of {len(groups)} between nodes"
    shares = {share for touched in nodes for share in touched.values()}
    per_node = f" ({len(nodes[0])} × {_plural(shares.pop(), 'rank')})" if len(shares) == 1 else ""
    return f"between nodes{per_node}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns columns: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    are_words = [title in ("axis", "links", "the first", "on ranks") for title in rows[0]]
    lines = []
    for row in rows:
        line = ""
        for cell, width, is_word in zip(row, widths, are_words, strict=True):
            line += "  " + (cell.ljust(width) if is_word else cell.rjust(width))
        lines.append(line.rstrip())
    return lines


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
