"""Steps of which nobody reads how many routes come: made again where there was too little room, with
the bits of steps that know it.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from pairwise import slow_but
from small_model import MODEL
from torch import Tensor
from world import run_ranks

from experimental.peer_memory.peer_outbox import PeerOutbox
from experimental.peer_memory.tests.shared_files import open_files, to_nearest
from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.read.loader import Batch
from moebius.distributed.dispatch import measure
from moebius.distributed.dispatch.choose import rooms_of
from moebius.distributed.process.process import start_process
from moebius.kernels import sends
from moebius.model.execution.recompute import Recompute
from moebius.train import loop
from moebius.train.config.run_config import Config, MeshConfig, TrainConfig
from moebius.train.loop import step
from moebius.train.run import assemble


def steps(
    config: Config, run_dir: Path, factor: float
) -> tuple[list[tuple], dict[str, Tensor], list[float], int, int]:
    """Three steps: losses, norms and what was exchanged, and the weights after them; the room in the end; how often
    gradients were made, and headers read.
    """
    made, reads = list[int](), list[int]()
    sends._sum_by_row = to_nearest
    measure._wanted_outbox = lambda group, *_: open_files(group, row_bytes=64)
    compare, accumulate = PeerOutbox._compare, loop.accumulate_gradients
    PeerOutbox._compare = lambda self, heads: reads.append(1) or compare(self, heads)  # pyright: ignore[reportAttributeAccessIssue]
    loop.accumulate_gradients = lambda *args, **more: made.append(1) or accumulate(*args, **more)
    with start_process("cpu", timeout_s=60) as process:
        run = assemble(config, run_dir, process)
        rooms = rooms_of(run.model)
        for room in rooms:
            room.factor = factor
        rows = np.random.default_rng(0).integers(0, 257, (3, 2, process.world_size, 2, 25))
        found = []
        for number in range(3):
            result = step(run, Batch(rows[number, :, process.rank], 0, 0, equal_shapes=True), 1e-2)
            sums = result.meter.reduce()
            exchanged = [
                tuple(value[:4].tolist()) for key, value in sums.items() if "exchange/" in key
            ]
            found.append((sums["loss"].item(), result.grad_norm, exchanged))
        weights = {name: weight.detach() for name, weight in run.model.named_parameters()}
        return found, weights, [room.factor for room in rooms], len(made), len(reads)


@pytest.mark.parametrize("recompute", slow_but(["none", "selective", "full"], "full"))
def test_a_step_with_too_little_room_is_made_again(
    recompute: Recompute, data: Path, tmp_path: Path
) -> None:
    def run(dispatcher: Literal["dedup", "symmetric"], factor: float) -> list:
        config = Config(
            model=MODEL,
            data=DataConfig(seq_len=24, directory=str(data)),
            prepare=PrepareConfig(tokenizer="bytes", vocab_size=257, validation_fraction=0.2),
            train=TrainConfig(global_batch=8, micro_batch=2, recompute=recompute),
            mesh=MeshConfig(ep=2, dispatcher=dispatcher),
        )
        return run_ranks(steps, 2, config, tmp_path / f"{dispatcher}{factor}", factor)

    wanted, tight, roomy = run("dedup", 2.0), run("symmetric", 0.3), run("symmetric", 2.0)
    for exact, small, large in zip(wanted, tight, roomy, strict=True):
        for found, weights, _, _, reads in (small, large):
            assert reads == 0
            assert found == exact[0]
            assert [
                n for n, weight in exact[1].items() if not torch.equal(weight, weights[n])
            ] == []
        assert (exact[3], large[3]) == (3, 3)
        assert small[3] > 3
        assert set(large[2]) == {2.0}
    assert tight[0][2] == tight[1][2]  # the room, on all ranks
    assert max(tight[0][2]) > 0.3
