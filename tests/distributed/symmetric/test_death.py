"""A rank is killed at every step of the protocol: the others name it, and nothing hangs."""

import ctypes
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dispatch_cases import EXPERTS, WIDTH, echo, run_pass
from world import RankFailed, run_ranks

from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.process.process import start_process
from moebius.distributed.symmetric import outbox as outbox_module
from moebius.distributed.symmetric.outbox import Outbox, open_outbox
from moebius.model.routing import token_routes

HOOK = Path(__file__).with_name("die_at_step.h")
DIES = 2


def three_passes(step: int) -> int:
    """Forward and backward; rank 2 dies at a step (0: at none). Returns how many steps it took."""
    library = outbox_module.LIBRARY
    flags = [*library.flags, "-DMOEBIUS_BETWEEN_STEPS", "-include", str(HOOK)]
    outbox_module.LIBRARY = replace(library, name="moebius_exchange_that_dies", flags=flags)
    with start_process("cpu", timeout_s=60) as process:
        group = dist.group.WORLD
        assert group is not None
        if process.rank == DIES and step:
            os.environ["MOEBIUS_DIE_AT"] = str(step)
        outbox = open_outbox(group, timeout_s=60)
        assert isinstance(outbox, Outbox), outbox
        dispatcher = make_dispatcher("symmetric", group, outbox=outbox)
        generator = torch.Generator().manual_seed(process.rank)
        experts = torch.rand(6, EXPERTS, generator=generator).topk(3).indices
        routes = token_routes(experts, torch.ones(6, 3), num_experts=3 * EXPERTS)
        x = torch.randn(6, WIDTH, generator=generator, requires_grad=True)
        for _ in range(3):
            run_pass(dispatcher, x, routes, echo).sum().backward()
        loaded = outbox_module.load_library()
        return ctypes.c_int.in_dll(loaded.handle, "moebius_steps").value


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_a_rank_that_is_killed_at_any_step_is_named_and_nobody_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    died, named, step = 0, 0, 0
    while True:
        step += 1
        try:
            steps = run_ranks(three_passes, 3, step)[DIES]
        except RankFailed as error:
            told = str(error)
        else:
            assert steps < step  # fewer than before: who need not sleep takes fewer
            break
        assert f"rank {DIES} of 3" in told, step
        assert "did not come within" not in told, step  # noticed by looking, not by a timeout
        died += 1
        named += f"rank {DIES} has died; exchange no." in told
    assert died > 30
    assert named > died // 2  # in its last steps nobody waits for it any more
