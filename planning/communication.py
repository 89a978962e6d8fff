"""Prices collectives: bytes by arithmetic, seconds by Hockney's formula.

P ranks hold contiguous blocks of E experts, and a row chooses K of them. Under even routing a row
reaches exactly

    distinct(n) = Σ over n blocks (1 − C(E − E/n, K) / C(E, K))

of n equal blocks. Dispatchers send, with G ranks per node:

    alltoall       one row per route
    dedup          one row per destination rank
    hierarchical   one row per destination node, then one per rank inside it: slow bytes
                   distinct(N)·(N − 1)/N
    allgather      every row to every rank

An exchange takes start + Σ posting to every peer + λ · max(fast bytes / fast bandwidth, slow bytes
/ slow bandwidth), where λ is the hottest rank's factor. Posting per peer is Hockney's latency: a
message of m bytes reaches B·m / (m + α·B). A dense collective takes (n − 1)/n · bytes / B plus the
latency of n − 1 hops (ring) or of 2·log2 n hops (tree, all-reduce only). On 1,250 nodes with one
rank each, that is 12 ms against 0.2 ms.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, log2, prod

from ..distributed.dispatch.table import entry_of
from .hardware import Hardware
from .workload import Bank, Unit, blocks_of_heads

# Destinations of a row ----------------------------------------------------------------------------


def miss_probability(num_experts: int, block: float, top_k: float) -> float:
    """Returns the probability that a row chooses none of a block of experts.

    Args:
        num_experts: experts to choose among, all equally likely.
        block: experts in the block.
        top_k: experts that the row chooses; a fraction mixes the two neighboring whole numbers.
    """
    whole = int(top_k)
    if whole != top_k:
        share = top_k - whole
        fewer = miss_probability(num_experts, block, whole)
        return (1 - share) * fewer + share * miss_probability(num_experts, block, whole + 1)
    return prod(
        max(0.0, num_experts - block - chosen) / (num_experts - chosen) for chosen in range(whole)
    )


@lru_cache(maxsize=4096)
def row_copies(bank: Bank, unit: Unit, num_groups: int) -> tuple[float, float]:
    """Returns the rows that a token sends when groups of ranks hold contiguous blocks of experts,
    and an upper bound of a group's share over the mean: no group gets a row twice.

    Args:
        bank: the experts.
        unit: what one row stands for.
        num_groups: groups of ranks that share the experts equally.
    """
    if unit == "route":
        return bank.routes, float(num_groups)
    pairs, most = 0.0, 1
    for group in range(num_groups):
        missing = [
            miss_probability(bank.num_experts, block, bank.top_k)
            for block in blocks_of_heads(bank, num_groups, group)
            if block > 0
        ]
        if unit == "row":
            pairs += 1 - prod(missing)
        else:
            pairs += len(missing) - sum(missing)
            most = max(most, len(missing))
    if bank.group_limit is not None and unit == "row":
        groups, kept = bank.group_limit
        pairs = min(pairs, kept * ceil(num_groups / groups))
    return bank.rows * pairs, most * num_groups / pairs


# Exchanges ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Holds what one rank sends in one direction of an exchange."""

    fast_bytes: float
    slow_bytes: float
    fast_peers: int
    slow_peers: int
    held_bytes: float  # including what stays on the rank
    cap: float  # on λ


@dataclass(frozen=True)
class Direction:
    """Describes one half of an exchange: dispatch to the experts, or combine of their outputs."""

    bank: Bank
    unit: Unit
    row_bytes: float
    route_bytes: float  # per route, sent beside the row

    def tokens_bytes(self, rows: float) -> float:
        """Returns the bytes of one token that sends `rows` rows."""
        return rows * self.row_bytes + self.bank.routes * self.route_bytes


def dispatch_direction(bank: Bank, bytes_per_element: int) -> Direction:
    """Returns the half that sends rows and routes to the experts."""
    return Direction(bank, bank.source, bank.d_in * bytes_per_element, bank.route_bytes)


def combine_direction(bank: Bank, bytes_per_element: int) -> Direction:
    """Returns the half that sends the experts' outputs back."""
    return Direction(bank, bank.target, bank.d_out * bytes_per_element, 0.0)


def exchange_traffic(
    direction: Direction, *, tokens: int, ep: int, ranks_per_node: int, dispatcher: str
) -> Traffic:
    """Returns the mean traffic of one rank under balanced routing.

    Args:
        direction: what is sent.
        tokens: tokens per rank.
        ep: ranks that share the experts.
        ranks_per_node: ranks joined by fast links.
        dispatcher: how rows are sent.
    """
    local = ranks_sharing_a_node(ep, ranks_per_node)
    bank, unit, nodes = direction.bank, direction.unit, ep // local
    pattern = entry_of(dispatcher).pattern
    rows, cap = row_copies(bank, "route" if pattern.row_per_route else unit, ep)
    held = tokens * direction.tokens_bytes(rows)
    if pattern.to_all:
        held, cap = ep * tokens * direction.tokens_bytes(bank.units(unit)), 1.0
    if pattern.node_first and nodes > 1:
        reached = tokens * direction.tokens_bytes(row_copies(bank, unit, nodes)[0])
        fast, slow = held * (local - 1) / local, reached * (nodes - 1) / nodes
        return Traffic(fast, slow, local - 1, nodes - 1, held, cap)
    fast, slow = held * (local - 1) / ep, held * (ep - local) / ep
    return Traffic(fast, slow, local - 1, ep - local, held, cap)


def exchange_s(
    traffic: Traffic, hardware: Hardware, *, dispatcher: str, skew: float = 1.0
) -> float:
    """Returns the seconds of one direction of an exchange of rows; 0 for a single rank.

    `hierarchical` sends between nodes first, copies, then sends inside nodes; others do both at
    once.

    Args:
        traffic: the mean rank's.
        hardware: the links.
        dispatcher: how rows are sent.
        skew: λ, the hottest rank's factor.
    """
    peers, pattern = traffic.fast_peers + traffic.slow_peers, entry_of(dispatcher).pattern
    if peers == 0:
        return 0.0
    if pattern.to_all:
        group = strided_group(peers + 1, 1, hardware.ranks_per_node)
        # One pass gathers and the other scatters: dispatch forward, combine backward.
        ops = ("all_gather", "reduce_scatter")
        return sum(collective_s(op, traffic.held_bytes, group, hardware) for op in ops) / 2
    load = min(skew, traffic.cap)
    fast_s = load * traffic.fast_bytes / hardware.fast
    slow_s = load * traffic.slow_bytes / hardware.slow
    fixed_s = hardware.exchange_start_s + traffic.fast_peers * hardware.fast_post_s
    if not pattern.node_first:
        return fixed_s + traffic.slow_peers * hardware.slow_post_s + max(fast_s, slow_s)
    copied_bytes = 2 * load * traffic.held_bytes if traffic.slow_peers else 0.0
    fixed_s += log2(1 + traffic.slow_peers) * hardware.slow_hop_s
    return fixed_s + fast_s + slow_s + copied_bytes / hardware.memory_bandwidth


# Dense collectives --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankGroup:
    """Describes the ranks of a collective and their placement."""

    size: int
    per_node: int  # ranks on a node, at least
    nodes: int


def strided_group(size: int, stride: int, ranks_per_node: int) -> RankGroup:
    """Returns a group of `size` ranks, every `stride`-th one.

    Among groups that start inside a node, this is the one with the fewest ranks per node.
    """
    block = size * stride
    per_node = min(size, max(1, ranks_sharing_a_node(block, ranks_per_node) // stride))
    span = ceil(block / ranks_per_node) + (block > ranks_per_node and block % ranks_per_node > 0)
    return RankGroup(size, per_node, min(ceil(size / per_node), span))


def ranks_sharing_a_node(size: int, ranks_per_node: int) -> int:
    """Returns how many of `size` consecutive ranks share a node, on the emptiest node."""
    return min(size, ranks_per_node) if size % ranks_per_node == 0 else gcd(size, ranks_per_node)


def collective_s(op: str, num_bytes: float, group: RankGroup, hardware: Hardware) -> float:
    """Returns the seconds of one dense collective; 0 for a single rank.

    Between nodes every rank uses its own adapter.

    Args:
        op: all_gather, reduce_scatter or all_reduce.
        num_bytes: of the whole tensor on one rank.
        group: its ranks.
        hardware: the links.
    """
    if group.size == 1 or num_bytes == 0:
        return 0.0
    bandwidth = hardware.fast
    if group.nodes > 1:
        bandwidth = min(bandwidth, group.per_node * hardware.slow)
    rounds = 2 if op == "all_reduce" else 1
    fast, slow = hardware.fast_hop_s, hardware.slow_hop_s
    latency = rounds * ((group.nodes - 1) * slow + (group.size - group.nodes) * fast)
    if op == "all_reduce":
        tree = 2 * (log2(group.nodes) * slow + log2(group.size / group.nodes) * fast)
        latency = min(latency, tree)
    transfer = rounds * num_bytes * (group.size - 1) / group.size / bandwidth
    return hardware.collective_start_s + latency + transfer
