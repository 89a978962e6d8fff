"""The table of dispatchers.

A new dispatcher is one file and one line here. A user's own is a `DispatcherEntry` that the
configuration names as `module:name` (docs/extend.md shows both). Configuration, command line,
planner and simulator query this table instead of naming dispatchers. It imports nothing heavy, not
even torch; choose.py imports a dispatcher's module when it creates one.
"""

from dataclasses import dataclass

from ...plugins import Registry

AUTO = "auto"
LOCAL = "local"  # every expert is on this rank, so nothing is sent
DEFAULT = "dedup"  # "auto" with ep > 1,
SHARED_MEMORY = "symmetric"  # unless this can run (choose.py)


@dataclass(frozen=True)
class SendingPattern:
    """Describes a dispatcher's traffic: by default a row goes once to every rank that serves it.

    planning/communication.py computes costs from it.
    """

    row_per_route: bool = False  # a row once per route
    node_first: bool = False  # once per destination node, then once per rank inside it
    to_all: bool = False  # every row to every rank, by dense collectives


@dataclass(frozen=True)
class DispatcherEntry:
    """A dispatcher's class and properties.

    `dispatcher` is an `ExpertParallelDispatcher`, or "module.Class" in this folder, which is imported
    on first use.
    """

    dispatcher: str | type
    description: str
    pattern: SendingPattern
    needs_nodes: bool = False  # needs groups between and inside nodes (`build_node_groups`)
    needs_outbox: bool = False  # needs memory that all ranks of the group share (`open_outbox`)


DISPATCHERS: dict[str, DispatcherEntry] = {
    "allgather": DispatcherEntry(
        "allgather.AllGatherDispatcher", "every row to every rank", SendingPattern(to_all=True)
    ),
    "alltoall": DispatcherEntry(
        "alltoall.AllToAllDispatcher",
        "one row per route",
        SendingPattern(row_per_route=True),
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


DISPATCHER = Registry(
    "mesh.dispatcher",
    "a dispatcher",
    dict.fromkeys([AUTO, LOCAL]) | DISPATCHERS,
    "a DispatcherEntry",
    lambda found: isinstance(found, DispatcherEntry),
)


def entry_of(name: str) -> DispatcherEntry:
    """Returns the table's entry of a dispatcher other than "local" and "auto".

    Raises:
        PluginError: there is no such dispatcher.
    """
    return DISPATCHER.get(name)


def resolved_dispatcher(name: str, ep: int) -> str:
    """Resolves a dispatcher's name, or "auto", on `ep` ranks.

    At run time "auto" may still become `symmetric`, which sends the same rows.

    Raises:
        ValueError: the name is unknown, or it is `local` with ep > 1.
    """
    if name == AUTO:
        return LOCAL if ep == 1 else DEFAULT
    if name == LOCAL and ep > 1:
        raise ValueError(
            f'mesh.dispatcher="local" with mesh.ep={ep}: the experts are on several '
            'ranks; use "auto"'
        )
    return DISPATCHER.check(name)


def needs_nodes(name: str) -> bool:
    """Returns whether a dispatcher needs groups between and inside nodes."""
    return name not in (AUTO, LOCAL) and entry_of(name).needs_nodes


def by_collectives() -> list[str]:
    """Returns the dispatchers that use collectives, which simulation and planning cover."""
    return [name for name, entry in DISPATCHERS.items() if not entry.needs_outbox]


def same_traffic(name: str) -> str:
    """Returns the dispatcher over collectives that sends the same rows as `name`."""
    return DEFAULT if needs_outbox(name) else name


def needs_outbox(name: str) -> bool:
    """Returns whether a dispatcher needs memory that all ranks of the group share."""
    return name not in (AUTO, LOCAL) and entry_of(name).needs_outbox
