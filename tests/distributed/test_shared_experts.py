"""In a whole model, shared experts overlap with the exchange, and every sparse layer reads its counts
from the device once.
"""

from typing import Any

import pytest
import torch
from parts import layers
from torch import Tensor
from world import run_ranks

from moebius.distributed.dispatch.exchange import AllToAll, Counters, Pending
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.parallelize import build_model
from moebius.distributed.process.process import start_process
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.sigmoid import SigmoidConfig

WIDTH, DEPTH = 24, 4
MODEL = ModelConfig(
    vocab_size=31,
    d_model=WIDTH,
    num_layers=DEPTH,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=2, d_head=8, num_experts=4, top_k=2),
    feed_forward=ExpertsConfig(
        num_experts=8, num_shared_experts=1, router=SigmoidConfig(top_k=3), d_expert=16
    ),
)


def events_of_a_pass() -> tuple[list[str], int]:
    """What one forward and backward pass did in this order, and how often it read counts."""
    with start_process("cpu", timeout_s=30) as process:
        mesh = build_mesh(plan_layout(MeshConfig(ep=2), 2), process)
        model = build_model(
            MODEL, mesh, dispatcher="dedup", backend="auto", seed=0, device=process.device
        )
        log: list[str] = []
        start, wait, read = AllToAll.start, Counters.wait, Counters.read
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

        def note_read(self: Counters, counts: Tensor) -> list[Any]:
            log.append("read")
            return read(self, counts)

        AllToAll.start, Counters.wait, Counters.read = (
            launch,
            land,
            note_read,
        )  # for this process's life: this call
        for layer in layers(model):
            layer.feed_forward.shared.register_forward_hook(lambda *_: log.append("shared"))  # type: ignore[union-attr]
        tokens = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(process.rank))
        model(tokens).logits_BSV.sum().backward()
        return log, log.count("read")


def test_shared_experts_work_while_rows_travel_and_no_layer_reads_twice() -> None:
    for log, reads in run_ranks(events_of_a_pass, 2):
        assert (
            reads == 3 * DEPTH
        )  # feed-forward, V and O of every depth step; none in the backward pass
        places = [place for place, event in enumerate(log) if event == "shared"]
        assert len(places) == DEPTH
        for place in places:
            assert log[place - 2 : place + 2] == ["read", "launch", "shared", "land"]


def test_sharded_weights_are_kept_in_float32() -> None:
    with start_process("cpu", timeout_s=30) as process:
        mesh = build_mesh(plan_layout(MeshConfig(), 1), process)
        with pytest.raises(
            ValueError, match=r'float32, not torch.bfloat16: use mesh.sharding="none"'
        ):
            build_model(
                MODEL,
                mesh,
                dispatcher="auto",
                backend="auto",
                seed=0,
                device=process.device,
                sharding="fsdp",
                stored=torch.bfloat16,
            )
