"""The table of dispatchers. A new one is one file and one line here; one of the user's own is a
`DispatcherEntry` that the configuration names as `module:name` (docs/extend.md shows both).

The mesh's configuration, the command line, the planner, the cost model and the simulator ask this
table and know no dispatcher by name. It imports nothing heavy, so that they may ask before torch is
there; the dispatchers' own modules are imported when one is made (choose.py).
"""

from dataclasses import dataclass

from ...own_parts import Wanted

AUTO = "auto"
LOCAL = "local"  # every expert is on this rank: nothing travels, and there is nothing to configure
DEFAULT = "dedup"  # what "auto" means where the experts are spread,
SHARED_MEMORY = "symmetric"  # or this where it can be had and is faster (choose.py)


@dataclass(frozen=True)
class SendingPattern:
    """What a dispatcher sends, as far as its cost depends on it: a row once to every rank that
    serves it, unless it says otherwise (planning/communication.py has the arithmetic).
    """

    row_per_route: bool = False  # once for every route
    node_first: bool = False  # once per destination node, then once per rank inside it
    to_all: bool = False  # every row to every rank, by dense collectives


@dataclass(frozen=True)
class DispatcherEntry:
    """What others must know of a dispatcher.

    `dispatcher` is an `ExpertParallelDispatcher`; or the words "module.Class" of a module in this
    folder, which is imported when the first one is made.
    """

    dispatcher: str | type
    description: str
    pattern: SendingPattern
    is_exact: bool = False  # equals one rank bit for bit; the others up to rounding
    needs_nodes: bool = False  # the groups between and inside nodes (`build_node_groups`)
    needs_outbox: bool = False  # memory that all ranks of the group reach (`open_outbox`)


DISPATCHERS: dict[str, DispatcherEntry] = {
    "allgather": DispatcherEntry(
        "allgather.AllGatherDispatcher", "every row to every rank", SendingPattern(to_all=True)
    ),
    "alltoall": DispatcherEntry(
        "alltoall.AllToAllDispatcher",
        "one row per route",
        SendingPattern(row_per_route=True),
        is_exact=True,
    ),
    "dedup": DispatcherEntry("dedup.DedupDispatcher", "one row per (row, rank)", SendingPattern()),
    "hierarchical": DispatcherEntry(
        "hierarchical.HierarchicalDispatcher",
        "one row per (row, node), then per rank",
        SendingPattern(node_first=True),
        needs_nodes=True,
    ),
    SHARED_MEMORY: DispatcherEntry(
        "symmetric.SymmetricDispatcher",
        "one row per (row, rank), through the node's memory",
        SendingPattern(),
        needs_outbox=True,
    ),
}


DISPATCHER = Wanted(
    "mesh.dispatcher",
    "a dispatcher",
    dict.fromkeys([AUTO, LOCAL]) | DISPATCHERS,
    "a DispatcherEntry",
    lambda found: isinstance(found, DispatcherEntry),
)


def entry_of(name: str) -> DispatcherEntry:
    """Returns what is known of a dispatcher by which rows travel.

    Raises:
        OwnPartError: there is no such dispatcher.
    """
    return DISPATCHER.get(name)


def resolved_dispatcher(name: str, ep: int) -> str:
    """Returns the dispatcher that `name` means on `ep` ranks, also where it is "auto".

    In a run "auto" may become `symmetric` yet, which sends the same rows.

    Raises:
        ValueError: the name is none of a dispatcher, or it is `local` although the experts are spread.
    """
    if name == AUTO:
        return LOCAL if ep == 1 else DEFAULT
    if name == LOCAL and ep > 1:
        raise ValueError(
            f'mesh.dispatcher="local" with mesh.ep={ep}: the experts are on several '
            'ranks; use "auto"'
        )
    return DISPATCHER.check(name)


def is_exact(name: str) -> bool:
    """Whether a dispatcher's outputs equal one rank's bit for bit."""
    return name == LOCAL or entry_of(name).is_exact


def needs_nodes(name: str) -> bool:
    """Whether a dispatcher wants the groups between and inside nodes."""
    return name not in (AUTO, LOCAL) and entry_of(name).needs_nodes


def by_collectives() -> list[str]:
    """Returns the dispatchers whose rows travel by collectives: what is simulated, and planned where
    none is asked for.
    """
    return [name for name, entry in DISPATCHERS.items() if not entry.needs_outbox]


def same_traffic(name: str) -> str:
    """Returns the dispatcher by collectives that sends the same rows: itself, if it is one."""
    return DEFAULT if needs_outbox(name) else name


def needs_outbox(name: str) -> bool:
    """Whether a dispatcher wants memory that all ranks of the group reach."""
    return name not in (AUTO, LOCAL) and entry_of(name).needs_outbox
