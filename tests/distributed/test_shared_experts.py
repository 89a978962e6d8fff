"""In a whole model, shared experts overlap with the exchange."""

import small_model
import torch
from meshes import meshed, model_on
from parts import layers
from torch import Tensor
from world import run_ranks

from moebius.distributed.dispatch.exchange import AllToAll, Counters, Pending

MODEL = small_model.MODEL.changed({"feed_forward.num_shared_experts": 1})
WIDTH, DEPTH = MODEL.d_model, MODEL.num_layers


def events_of_a_pass() -> list[str]:
    """What one forward and backward pass did, in this order."""
    with meshed(ep=2) as (process, mesh):
        model = model_on(mesh, MODEL, dispatcher="dedup")
        log: list[str] = []
        start, wait = AllToAll.start, Counters.wait
        wide: list[Pending] = []

        def launch(self: AllToAll, rows: Tensor) -> Pending:
            out = start(self, rows)
            if rows.dim() == 2 and rows.shape[1] == WIDTH:
                log.append("launch")
                wide.append(out)
            return out

        def land(self: Counters, pending: Pending) -> Tensor:
            if any(pending is out for out in wide):
                log.append("land")
            return wait(self, pending)

        AllToAll.start, Counters.wait = launch, land  # for this process's life: this call
        for layer in layers(model):
            layer.feed_forward.shared.register_forward_hook(lambda *_: log.append("shared"))  # type: ignore[union-attr]
        tokens = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(process.rank))
        model(tokens).logits_BSV.sum().backward()
        return log


def test_shared_experts_work_while_rows_travel() -> None:
    for log in run_ranks(events_of_a_pass, 2):
        places = [place for place, event in enumerate(log) if event == "shared"]
        assert len(places) == DEPTH
        for place in places:
            assert log[place - 1 : place + 2] == ["launch", "shared", "land"]
