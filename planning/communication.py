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

from dataclasses import dataclass, replace
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


def distinct_destinations(num_groups: int, *, num_experts: int, top_k: float) -> float:
    """Returns how many of `num_groups` equal blocks of experts a row reaches on average."""
    return num_groups * (1 - miss_probability(num_experts, num_experts / num_groups, top_k))


@dataclass(frozen=True)
class RowCopies:
    """Counts the rows that one token sends to groups of ranks."""

    rows: float  # (row, group) pairs
    cap: float  # upper bound of a group's share over the mean: no group gets a row twice


@lru_cache(maxsize=4096)
def row_copies(bank: Bank, unit: Unit, num_groups: int) -> RowCopies:
    """Returns what a token sends when groups of ranks hold contiguous blocks of experts.

    Args:
        bank: the experts.
        unit: what one row stands for.
        num_groups: groups of ranks that share the experts equally.
    """
    if unit == "route":
        return RowCopies(bank.routes, float(num_groups))
    pairs, most = 0.0, 0.0
    for group in range(num_groups):
        missing = [
            miss_probability(bank.num_experts, block, bank.top_k)
            for block in blocks_of_heads(bank, num_groups, group)
            if block > 0
        ]
        pairs += 1 - prod(missing) if unit == "row" else sum(1 - chance for chance in missing)
        most = max(most, 1.0 if unit == "row" else float(len(missing)))
    if bank.group_limit is not None and unit == "row":
        groups, kept = bank.group_limit
        pairs = min(pairs, kept * ceil(num_groups / groups))
    return RowCopies(bank.rows * pairs, most * num_groups / pairs)


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

    @property
    def num_bytes(self) -> float:
        """Returns the bytes that leave the rank."""
        return self.fast_bytes + self.slow_bytes


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
    direction: Direction,
    *,
    tokens: int,
    ep: int,
    ranks_per_node: int,
    dispatcher: str,
) -> Traffic:
    """Returns the mean traffic of one rank under balanced routing.

    Args:
        direction: what is sent.
        tokens: tokens per rank.
        ep: ranks that share the experts.
        ranks_per_node: ranks joined by fast links.
        dispatcher: any but allgather, which is a dense collective.
    """
    local = ranks_sharing_a_node(ep, ranks_per_node)
    bank, unit, nodes = direction.bank, direction.unit, ep // local
    pattern = entry_of(dispatcher).pattern
    copies = row_copies(bank, "route" if pattern.row_per_route else unit, ep)
    held = tokens * direction.tokens_bytes(copies.rows)
    fast, slow, slow_peers = held * (local - 1) / ep, held * (ep - local) / ep, ep - local
    if pattern.node_first and nodes > 1:
        reached = tokens * direction.tokens_bytes(row_copies(bank, unit, nodes).rows)
        fast, slow, slow_peers = (
            held * (local - 1) / local,
            reached * (nodes - 1) / nodes,
            nodes - 1,
        )
    return Traffic(
        fast_bytes=fast,
        slow_bytes=slow,
        fast_peers=local - 1,
        slow_peers=slow_peers,
        held_bytes=held,
        cap=copies.cap,
    )


def exchange_s(
    traffic: Traffic,
    hardware: Hardware,
    *,
    dispatcher: str,
    skew: float = 1.0,
    staged: bool = False,
) -> float:
    """Returns the seconds of one direction of an exchange of rows; 0 for a single rank.

    Args:
        traffic: the mean rank's.
        hardware: the links.
        dispatcher: how rows are sent.
        skew: λ, the hottest rank's factor.
        staged: `hierarchical` sends between nodes first, copies, then sends inside nodes, as
            moebius does; otherwise the two overlap, as in DeepEP.
    """
    if traffic.fast_peers + traffic.slow_peers == 0:
        return 0.0
    load = min(skew, traffic.cap)
    node_first = entry_of(dispatcher).pattern.node_first
    fast_s = load * traffic.fast_bytes / hardware.fast
    slow_s = load * traffic.slow_bytes / hardware.slow
    fixed_s = hardware.exchange_start_s + traffic.fast_peers * hardware.fast_post_s
    if node_first:
        fixed_s += log2(1 + traffic.slow_peers) * hardware.slow_hop_s
    else:
        fixed_s += traffic.slow_peers * hardware.slow_post_s
    if not (node_first and staged):
        return fixed_s + max(fast_s, slow_s)
    copied_bytes = 2 * load * traffic.held_bytes if traffic.slow_peers else 0.0
    return fixed_s + (fast_s + slow_s) + copied_bytes / hardware.memory_bandwidth


# Dense collectives --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Describes the ranks of a collective and their placement."""

    size: int
    per_node: int  # ranks on a node, at least
    nodes: int
    span_nodes: int  # from the first node to the last; decides whether it leaves a pod


def strided_group(size: int, stride: int, ranks_per_node: int) -> Group:
    """Returns a group of `size` ranks, every `stride`-th one.

    Among groups that start inside a node, this is the one with the fewest ranks per node.
    """
    block = size * stride
    per_node = min(size, max(1, ranks_sharing_a_node(block, ranks_per_node) // stride))
    span = ceil(block / ranks_per_node) + (block > ranks_per_node and block % ranks_per_node > 0)
    return Group(size, per_node, min(ceil(size / per_node), span), span)


def ranks_sharing_a_node(size: int, ranks_per_node: int) -> int:
    """Returns how many of `size` consecutive ranks share a node, on the emptiest node."""
    return min(size, ranks_per_node) if size % ranks_per_node == 0 else gcd(size, ranks_per_node)


def collective_s(op: str, num_bytes: float, group: Group, hardware: Hardware) -> float:
    """Returns the seconds of one dense collective; 0 for a single rank.

    Args:
        op: all_gather, reduce_scatter or all_reduce.
        num_bytes: of the whole tensor on one rank.
        group: its ranks.
        hardware: the links.
    """
    if group.size == 1 or num_bytes == 0:
        return 0.0
    rounds = 2 if op == "all_reduce" else 1
    transfer = rounds * num_bytes * (group.size - 1) / group.size / bandwidth_of(group, hardware)
    latency = rounds * ring_latency_s(group, hardware)
    if op == "all_reduce":
        latency = min(latency, tree_latency_s(group, hardware))
    return hardware.collective_start_s + latency + transfer


def bandwidth_of(group: Group, hardware: Hardware) -> float:
    """Returns a ring's bytes/s per rank; between nodes every rank uses its own adapter."""
    if group.nodes == 1:
        return hardware.fast
    leaves_pod = group.span_nodes > hardware.pod_nodes
    slow = hardware.slow / (hardware.oversubscription if leaves_pod else 1)
    return min(hardware.fast, group.per_node * slow)


def ring_latency_s(group: Group, hardware: Hardware) -> float:
    """Returns a ring's latency: n − 1 hops, one of them slow for every further node."""
    slow_hops, fast_hops = group.nodes - 1, group.size - group.nodes
    return slow_hops * hardware.slow_hop_s + fast_hops * hardware.fast_hop_s


def tree_latency_s(group: Group, hardware: Hardware) -> float:
    """Returns a tree's latency, up and down."""
    inside = max(1.0, group.size / group.nodes)
    return 2 * (log2(group.nodes) * hardware.slow_hop_s + log2(inside) * hardware.fast_hop_s)


def leaving_pod(hardware: Hardware, ep: int) -> Hardware:
    """Returns the hardware as an exchange of `ep` consecutive ranks sees it.

    If the ranks do not fit into a pod, the links between nodes are oversubscribed.
    """
    if ceil(ep / hardware.ranks_per_node) <= hardware.pod_nodes:
        return hardware
    return replace(hardware, slow_bandwidth=hardware.slow_bandwidth / hardware.oversubscription)
