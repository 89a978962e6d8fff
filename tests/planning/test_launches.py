"""The planner's launches per dispatcher, against counts on four real ranks."""

import torch
from dispatch_cases import EXPERTS, case, dispatcher_of, own_layer, run_layer, world
from world import run_ranks

from moebius.distributed.dispatch.table import LOCAL, by_collectives
from moebius.model.moe import LocalDispatcher
from moebius.planning.step_collectives import dispatch_launches
from moebius.planning.workload import _Launches


def launched_by_each() -> dict[str, int]:
    """Counts the operations of a sparse layer's forward pass, by dispatcher."""
    found = {}
    with world() as (process, group, nodes):
        chosen = torch.rand(16, EXPERTS).argsort(-1)[:, :2]
        given = case("tokens", chosen, process.rank)
        layer = own_layer(process, LocalDispatcher())
        for name in by_collectives():
            layer.dispatcher = dispatcher_of(name, group, nodes)
            run_layer(layer, given)
            with _Launches() as launches:
                layer(given.x, given.routes)
            found[name] = launches.count
        layer.dispatcher = LocalDispatcher()
        here = case("tokens", chosen % (EXPERTS // process.world_size), process.rank)
        with _Launches() as launches:
            layer(here.x, here.routes)
        found[LOCAL] = launches.count
    return found


def test_the_planner_knows_what_dispatchers_launch() -> None:
    """Must agree within a factor of two; update the planner when a dispatcher changes."""
    counted = run_ranks(launched_by_each, 4)[0]
    for name in by_collectives():
        more = counted[name] - counted[LOCAL]
        assert more / 2 < dispatch_launches(name) < more * 2, (name, more)
