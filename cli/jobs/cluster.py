"""`moebius cluster`: manages the simulated cluster that stays between commands."""

import argparse
import json
from typing import TYPE_CHECKING

from ..arguments import Commands, add_command

if TYPE_CHECKING:
    from ...cluster.places.standing import StandingCluster

MOST_NODES = 250


def add_commands(commands: Commands) -> None:
    """Declares `moebius cluster` and its actions."""
    parser = add_command(
        commands,
        "cluster",
        lambda options: 2,  # argparse requires one of the actions below
        "manage a simulated cluster on this machine that outlives a command",
        examples=["cluster up --simulate 4", "cluster up", "cluster down"],
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_up(actions)
    _add_down(actions)


def _add_up(actions: Commands) -> None:
    parser = add_command(
        actions,
        "up",
        _up,
        "start a simulated cluster that outlives the command, or show the one that is up",
        examples=[
            "cluster up --simulate 4",
            "cluster up",
            "cluster up --add-node",
            "cluster up --simulate 2 --cpus-per-node 8",
        ],
        notes="Without --simulate, shows the cluster that is up. Exit code: 0, or 2 if it cannot be "
        "started or there is none to add a node to",
    )
    parser.add_argument("--simulate", type=int, metavar="N", help="simulated nodes (1 to 250)")
    parser.add_argument(
        "--cpus-per-node", type=int, default=4, metavar="C", help="CPUs of each; default: 4"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, default=0, metavar="G", help="GPUs of each; default: 0"
    )
    parser.add_argument("--add-node", action="store_true", help="add a node to the one that is up")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object (keys: docs/cluster.md)"
    )


def _up(options: argparse.Namespace) -> int:
    from ...cluster.places.standing import cluster_if_up, find_cluster

    cluster = cluster_if_up()
    if cluster is None and options.simulate is not None:
        cluster = _start(options)
    if options.add_node:
        cluster = find_cluster()
        cluster.ask("add-node")
    if cluster is not None:
        _show(cluster, as_json=options.json)
    elif not options.json:
        print("no simulated cluster is up; start one with `moebius cluster up --simulate 4`")
    return 0


def _start(options: argparse.Namespace) -> "StandingCluster":
    """Starts the cluster that the options describe."""
    from ...cluster.places.standing import start_cluster

    if not 1 <= options.simulate <= MOST_NODES:
        raise ValueError(f"--simulate {options.simulate}: must be 1 to {MOST_NODES}")
    if options.cpus_per_node < 1 or options.gpus_per_node < 0:
        raise ValueError(
            f"--cpus-per-node {options.cpus_per_node}, --gpus-per-node {options.gpus_per_node}: "
            "must be at least 1 and 0"
        )
    return start_cluster(
        options.simulate,
        cpus_per_node=options.cpus_per_node,
        gpus_per_node=options.gpus_per_node,
    )


def _show(cluster: "StandingCluster", *, as_json: bool) -> None:
    told = cluster.ask("status")
    if as_json:
        facts = {"address": cluster.address, "host_pid": cluster.host_pid}
        print(json.dumps(facts | told, ensure_ascii=False))
        return
    print(f"simulated cluster at {cluster.address}")
    for node in told["nodes"]:
        size = f"{node['cpus']} CPUs, {node['gpus']} GPUs"
        print(f"  node {node['node']}  {node['address']}  {size}  {node['state']}")
    for run in told["runs"]:
        print(f"  running: {run}")
    print("  moebius submit RECIPE --address simulated")
    print("  moebius cluster down")


def _add_down(actions: Commands) -> None:
    parser = add_command(
        actions,
        "down",
        _down,
        "end the simulated cluster and everything in it, or one of its nodes",
        examples=["cluster down", "cluster down --force", "cluster down --node 1"],
        notes="exit code: 0, or 2 if there is no such cluster or node, or if jobs are running in "
        "it",
    )
    parser.add_argument("--force", action="store_true", help="even if jobs are running in it")
    parser.add_argument(
        "--node",
        type=int,
        metavar="N",
        help="kill only this node, like a power cut: its raylet and every process below it; not "
        "node 0, the head",
    )


def _down(options: argparse.Namespace) -> int:
    from ...cluster.places.standing import end_cluster, find_cluster

    cluster = find_cluster()
    if options.node is not None:
        told = cluster.ask("kill-node", node=options.node)
        print(f"killed node {options.node} with {told['processes']} processes")
        return 0
    end_cluster(cluster, force=options.force)
    print("the simulated cluster is down")
    return 0
