"""What a collective costs: bytes by arithmetic, seconds by Hockney's form or by a measured table.

Rows that travel to experts. With P ranks in contiguous blocks, K of E experts chosen, a row has

    distinct(n) = Σ over n blocks (1 − C(E − E/n, K) / C(E, K))

destinations among n equal blocks of ranks, exactly, if choices are spread evenly. Four ways to send
it (a node: G ranks):

    alltoall       one row per route
    dedup          one row per destination rank
    hierarchical   one row per destination node, then one per rank inside it: slow bytes distinct(N)·(N − 1)/N
    allgather      every row to every rank

Time of an exchange: start + Σ posting to every peer + λ · max(fast bytes / fast bandwidth, slow
bytes / slow bandwidth), λ the hottest rank's factor. Posting per peer is Hockney's latency: a
message of m bytes reaches B·m / (m + α·B). Dense collectives: (n − 1)/n · bytes / B and the latency
of n − 1 hops (ring), or of 2·log2 n (tree, all-reduce only): at 1,250 ranks of as many nodes 12 ms
against 0.2 ms.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, gcd, log2, prod

from .hardware import Hardware
from .measured import MeasuredTable
from .workload import Bank, Unit, blocks_of_heads

DISPATCHERS = ("allgather", "alltoall", "dedup", "hierarchical")


# Destinations of a row ----------------------------------------------------------------------------------------------


def missed(num_experts: int, block: float, top_k: float) -> float:
    """The probability that none of `top_k` out of `num_experts` is one of `block` of them; a broken
    top_k is a mixture of two.
    """
    whole = int(top_k)
    if whole != top_k:
        share = top_k - whole
        return (1 - share) * missed(num_experts, block, whole) + share * missed(
            num_experts, block, whole + 1
        )
    return prod(
        max(0.0, num_experts - block - chosen) / (num_experts - chosen) for chosen in range(whole)
    )


def distinct(num_groups: int, *, num_experts: int, top_k: float) -> float:
    """How many of `num_groups` equal blocks of experts a row's choices fall into, on average."""
    return num_groups * (1 - missed(num_experts, num_experts / num_groups, top_k))


@dataclass(frozen=True)
class Spread:
    """Travelling rows of one token over groups of ranks."""

    rows: float  # (row, group) pairs
    cap: float  # the most that a group's share can be above the mean: it cannot get a row twice


@lru_cache(maxsize=4096)
def spread(bank: Bank, unit: Unit, num_groups: int) -> Spread:
    """Of a bank whose experts lie in contiguous blocks on `num_groups` groups of ranks."""
    if unit == "route":
        return Spread(bank.routes, float(num_groups))
    pairs, most = 0.0, 0.0
    for group in range(num_groups):
        missing = [
            missed(bank.num_experts, block, bank.top_k)
            for block in blocks_of_heads(bank, num_groups, group)
            if block > 0
        ]
        pairs += 1 - prod(missing) if unit == "row" else sum(1 - chance for chance in missing)
        most = max(most, 1.0 if unit == "row" else float(len(missing)))
    if bank.group_limit is not None and unit == "row":
        groups, kept = bank.group_limit
        pairs = min(pairs, kept * ceil(num_groups / groups))
    return Spread(bank.rows * pairs, most * num_groups / pairs)


# Exchanges ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one direction of an exchange."""

    fast_bytes: float
    slow_bytes: float
    fast_peers: int
    slow_peers: int
    held_bytes: float  # with what stays: what a measured all-to-all counts
    cap: float  # on λ

    @property
    def num_bytes(self) -> float:
        """That leave the rank."""
        return self.fast_bytes + self.slow_bytes


@dataclass(frozen=True)
class Direction:
    """One half of an exchange: to the experts, or home."""

    bank: Bank
    unit: Unit
    row_bytes: float
    route_bytes: float  # that travel beside a row, per route

    def tokens_bytes(self, rows: float) -> float:
        """Of one token, when so many rows stand for it."""
        return rows * self.row_bytes + self.bank.routes * self.route_bytes


def to_experts(bank: Bank, bytes_per_element: int) -> Direction:
    """Rows with their routes."""
    return Direction(bank, bank.source, bank.d_in * bytes_per_element, bank.route_bytes)


def home(bank: Bank, bytes_per_element: int) -> Direction:
    """Answers."""
    return Direction(bank, bank.target, bank.d_out * bytes_per_element, 0.0)


def exchange_traffic(
    direction: Direction,
    *,
    tokens: int,
    ep: int,
    ranks_per_node: int,
    dispatcher: str,
    node_limit: int | None = None,
) -> Traffic:
    """Mean traffic of one rank under balanced routing; `node_limit`: nodes that a token may be sent
    to, at most.
    """
    local = neighbours(ep, ranks_per_node)
    bank, unit, nodes = direction.bank, direction.unit, ep // local
    routes = dispatcher == "alltoall"
    pairs = Spread(bank.routes, float(ep)) if routes else spread(bank, unit, ep)
    held = tokens * direction.tokens_bytes(pairs.rows)
    if dispatcher == "hierarchical" and nodes > 1:
        reached = spread(bank, unit, nodes).rows
        reached = min(reached, bank.units(unit) * node_limit) if node_limit else reached
        slow = tokens * direction.tokens_bytes(reached) * (nodes - 1) / nodes
        return Traffic(held * (local - 1) / local, slow, local - 1, nodes - 1, held, pairs.cap)
    return Traffic(
        held * (local - 1) / ep, held * (ep - local) / ep, local - 1, ep - local, held, pairs.cap
    )


def exchange_s(
    traffic: Traffic,
    hardware: Hardware,
    *,
    dispatcher: str,
    skew: float = 1.0,
    staged: bool = False,
    table: MeasuredTable | None = None,
    chunks: int = 1,
) -> float:
    """Seconds of one direction of an exchange of rows; nothing where one rank is alone.

    Args:
        skew: λ, the hottest rank's factor.
        staged: `hierarchical` sends between nodes first and inside them afterwards, with a copy
            between, as ours does; else the two overlap, as in DeepEP.
        chunks: pieces that are sent one after the other.
    """
    ranks = 1 + traffic.fast_peers + traffic.slow_peers
    if ranks == 1:
        return 0.0
    load = min(skew, traffic.cap)
    if table is not None and not (dispatcher == "hierarchical" and traffic.slow_peers):
        found = table.seconds(
            "all_to_all",
            world=ranks,
            ranks_per_node=1 + traffic.fast_peers,
            num_bytes=load * traffic.held_bytes / chunks,
        )
        if found is not None:
            return chunks * found
    fast, slow = (
        load * traffic.fast_bytes / hardware.fast,
        load * traffic.slow_bytes / hardware.slow,
    )
    fixed = hardware.exchange_start_s + traffic.fast_peers * hardware.fast_post_s
    if dispatcher != "hierarchical":
        return chunks * (fixed + traffic.slow_peers * hardware.slow_post_s) + max(fast, slow)
    fixed += log2(1 + traffic.slow_peers) * hardware.slow_hop_s
    copies = (
        2 * load * traffic.held_bytes / hardware.memory_bandwidth
        if staged and traffic.slow_peers
        else 0.0
    )
    return chunks * fixed + (fast + slow if staged else max(fast, slow)) + copies


def effective_bandwidth(message_bytes: float, *, latency_s: float, bandwidth: float) -> float:
    """Bytes/s that messages of this size reach; half of the bandwidth at latency · bandwidth bytes."""
    return bandwidth * message_bytes / (message_bytes + latency_s * bandwidth)


# Dense collectives --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Ranks of a collective: how many, how many of them share a node at least, and on how many
    nodes they are.
    """

    size: int
    per_node: int
    nodes: int
    span_nodes: int  # from its first node to its last: whether it leaves a pod


def strided(size: int, stride: int, ranks_per_node: int) -> Group:
    """`size` ranks, every `stride`-th one. Of groups that begin in the middle of a node, the one
    with the fewest neighbours.
    """
    block = size * stride
    per_node = min(size, max(1, neighbours(block, ranks_per_node) // stride))
    span = ceil(block / ranks_per_node) + (block > ranks_per_node and block % ranks_per_node > 0)
    return Group(size, per_node, min(ceil(size / per_node), span), span)


def neighbours(size: int, ranks_per_node: int) -> int:
    """How many of `size` consecutive ranks share a node, where they share it with the fewest."""
    return min(size, ranks_per_node) if size % ranks_per_node == 0 else gcd(size, ranks_per_node)


def collective_s(
    op: str, num_bytes: float, group: Group, hardware: Hardware, table: MeasuredTable | None = None
) -> float:
    """Seconds of all_gather, reduce_scatter or all_reduce; `num_bytes` of the whole tensor on one
    rank.
    """
    if group.size == 1 or num_bytes == 0:
        return 0.0
    if table is not None:
        found = table.seconds(
            op, world=group.size, ranks_per_node=group.per_node, num_bytes=num_bytes
        )
        if found is not None:
            return found
    rounds = 2 if op == "all_reduce" else 1
    transfer = rounds * num_bytes * (group.size - 1) / group.size / bandwidth_of(group, hardware)
    latency = rounds * ring_latency_s(group, hardware)
    if op == "all_reduce":
        latency = min(latency, tree_latency_s(group, hardware))
    return hardware.collective_start_s + latency + transfer


def bandwidth_of(group: Group, hardware: Hardware) -> float:
    """Bytes/s per rank of a ring: between nodes every rank of the group brings its own adapter."""
    if group.nodes == 1:
        return hardware.fast
    slow = hardware.slow / (
        hardware.oversubscription if group.span_nodes > hardware.pod_nodes else 1
    )
    return min(hardware.fast, group.per_node * slow)


def ring_latency_s(group: Group, hardware: Hardware) -> float:
    """n − 1 hops, one of them slow for every further node."""
    return (group.nodes - 1) * hardware.slow_hop_s + (
        group.size - group.nodes
    ) * hardware.fast_hop_s


def tree_latency_s(group: Group, hardware: Hardware) -> float:
    """Up and down again."""
    inside = max(1.0, group.size / group.nodes)
    return 2 * (log2(group.nodes) * hardware.slow_hop_s + log2(inside) * hardware.fast_hop_s)


def leaving_pod(hardware: Hardware, ep: int) -> Hardware:
    """What an exchange of `ep` neighbours meets: oversubscribed links where they do not fit into a
    pod.
    """
    if ceil(ep / hardware.ranks_per_node) <= hardware.pod_nodes:
        return hardware
    return replace(hardware, slow_bandwidth=hardware.slow_bandwidth / hardware.oversubscription)
