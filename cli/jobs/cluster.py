"""`moebius cluster`: simulated clusters on this machine that stay between commands, and what a night
does to them, by hand.
"""

import argparse
import json

from ..arguments import Commands, add_command

DONE = "exit code: 0, or 2 where there is no such cluster or it refuses"


def add_commands(commands: Commands) -> None:
    """Declares `moebius cluster` and what it does."""
    parser = add_command(
        commands,
        "cluster",
        lambda options: 2,  # argparse asks for one of the actions below
        "simulated clusters on this machine that stay between commands",
        examples=["cluster up --simulate 4", "cluster status", "cluster down"],
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_up(actions)
    _add_down(actions)
    _add_status(actions)
    _add_kill_node(actions)
    _add_add_node(actions)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cluster", nargs="?", metavar="NAME", help="default: the only one that is up"
    )


def _at_least(least: int, what: str, value: int) -> None:
    if value < least:
        raise ValueError(f"{what} {value}: at least {least}")


# up, down -----------------------------------------------------------------------------------------


def _add_up(actions: Commands) -> None:
    parser = add_command(
        actions,
        "up",
        _up,
        "start a simulated cluster that stays until `moebius cluster down`",
        examples=[
            "cluster up --simulate 4",
            "cluster up --simulate 2 --cpus-per-node 8 --name mine",
        ],
        notes=DONE,
    )
    parser.add_argument(
        "--simulate", type=int, required=True, metavar="N", help="pretended nodes (1 to 250)"
    )
    parser.add_argument(
        "--cpus-per-node", type=int, default=4, metavar="C", help="that each claims; default: 4"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, default=0, metavar="G", help="of this machine's; default: 0"
    )
    parser.add_argument("--name", default="default", help='default: "default"')


def _up(options: argparse.Namespace) -> int:
    """Carries out `moebius cluster up`."""
    from ...cluster.places.standing import SCHEME, start_cluster

    _at_least(1, "--simulate", options.simulate)
    _at_least(1, "--cpus-per-node", options.cpus_per_node)
    _at_least(0, "--gpus-per-node", options.gpus_per_node)
    if options.simulate > 250:
        raise ValueError(f"--simulate {options.simulate}: at most 250")
    cluster = start_cluster(
        options.simulate,
        cpus_per_node=options.cpus_per_node,
        gpus_per_node=options.gpus_per_node,
        name=options.name,
    )
    print(f"simulated cluster {cluster.name!r} of {options.simulate} node(s) is up")
    print(f"  moebius submit RECIPE --address {SCHEME}:{cluster.name}")
    print(f"  moebius cluster down {cluster.name}")
    return 0


def _add_down(actions: Commands) -> None:
    parser = add_command(
        actions,
        "down",
        _down,
        "end a simulated cluster and everything in it",
        examples=["cluster down", "cluster down mine --force"],
        notes="exit code: 0, or 2 where there is no such cluster or jobs are at work in it",
    )
    _add_name(parser)
    parser.add_argument("--force", action="store_true", help="even if jobs are at work in it")


def _down(options: argparse.Namespace) -> int:
    """Carries out `moebius cluster down`."""
    from ...cluster.places.standing import end_cluster, find_cluster

    cluster = find_cluster(options.cluster)
    end_cluster(cluster, force=options.force)
    print(f"simulated cluster {cluster.name!r} is down")
    return 0


# status -------------------------------------------------------------------------------------------


def _add_status(actions: Commands) -> None:
    parser = add_command(
        actions,
        "status",
        _status,
        "show the simulated clusters that are up, their nodes and the jobs in them",
        examples=["cluster status", "cluster status mine --json"],
        notes=DONE,
    )
    _add_name(parser)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per cluster (keys: docs/cluster_up.md)"
    )


def _status(options: argparse.Namespace) -> int:
    """Carries out `moebius cluster status`."""
    from ...cluster.places.standing import find_cluster, list_clusters

    named = options.cluster is not None
    clusters = [find_cluster(options.cluster)] if named else list_clusters()
    for cluster in clusters:
        told = cluster.ask("status")
        facts = {"name": cluster.name, "address": cluster.address, "host_pid": cluster.host_pid}
        _show(facts | told, as_json=options.json)
    if not clusters and not options.json:
        print("no simulated cluster is up")
    return 0


def _show(record: dict, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
        return
    print(f"{record['name']}  {record['address']}")
    for node in record["nodes"]:
        size = f"{node['cpus']} CPUs, {node['gpus']} GPUs"
        print(f"  node {node['node']}  {node['address']}  {size}  {node['state']}")
    for run in record["runs"]:
        print(f"  at work: {run}")


# kill-node, add-node ------------------------------------------------------------------------------


def _add_kill_node(actions: Commands) -> None:
    parser = add_command(
        actions,
        "kill-node",
        _kill_node,
        "end a pretended node as a power cut does: its raylet and all below it",
        examples=["cluster kill-node 1", "cluster kill-node 2 --name mine"],
        notes=DONE,
    )
    parser.add_argument("node", type=int, metavar="N", help="its number; node 0 is the head")
    parser.add_argument("--name", dest="cluster", help="default: the only one that is up")


def _kill_node(options: argparse.Namespace) -> int:
    """Carries out `moebius cluster kill-node`."""
    from ...cluster.places.standing import find_cluster

    told = find_cluster(options.cluster).ask("kill-node", node=options.node)
    print(f"node {options.node} is gone, with {told['processes']} processes")
    return 0


def _add_add_node(actions: Commands) -> None:
    parser = add_command(
        actions,
        "add-node",
        _add_node,
        "add a pretended node to a simulated cluster",
        examples=["cluster add-node", "cluster add-node --name mine"],
        notes=DONE,
    )
    parser.add_argument("--name", dest="cluster", help="default: the only one that is up")


def _add_node(options: argparse.Namespace) -> int:
    """Carries out `moebius cluster add-node`."""
    from ...cluster.places.standing import find_cluster

    told = find_cluster(options.cluster).ask("add-node")
    print(f"node {told['node']} has joined")
    return 0
