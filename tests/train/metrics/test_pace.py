"""The time left of a run, and the share of the GPUs' peak that it uses."""

import time
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from parts import make_config

from moebius.distributed.process.process import Process
from moebius.model.cost import PEAKS, forward_flops
from moebius.planning.hardware import HARDWARE
from moebius.train import hooks
from moebius.train.hooks import pace_of
from moebius.train.metrics.step_metrics import peak_tokens_per_s
from moebius.train.recipes.smoke import RECIPES
from moebius.train.run import OpenRun, RunState
from moebius.train.state import TrainingProgress

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CONFIG = make_config(train__steps=40)
GROWING = {"kind": "growing", "values": [1, 2], "stage_steps": 30}


def test_time_left_is_that_of_steps_with_all_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that begins at step 21 makes steps of 2 s, and evaluates for 30 s after every tenth."""
    tokens = CONFIG.train.global_batch * CONFIG.data.seq_len
    run = SimpleNamespace(config=CONFIG, state=RunState(first_step=21), process=None)
    monkeypatch.setattr(hooks, "peak_tokens_per_s", lambda *_: tokens)
    told = {}
    for step in (21, 25, 32, 40):
        now = 2.0 * step + 30.0 * ((step - 1) // 10)
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        run.progress = TrainingProgress(step)
        told[step] = pace_of(cast(OpenRun, run), 2.0)
    assert {found.pop("mfu") for found in told.values()} == {0.5}
    expected = {25: 15 * 2.0, 32: 8 * (22.0 + 30.0) / 11, 40: 0.0}
    assert told == {21: {}} | {step: {"left_s": round(s, 1)} for step, s in expected.items()}


def test_peaks_are_those_of_the_planner() -> None:
    names = ("a100", "a100", "h100", "h200", "b200", "gb200_nvl72")
    planned = [HARDWARE[name].peak for name in names]
    assert [*PEAKS.values()] == [(peak("bfloat16"), peak("float32")) for peak in planned]


def test_the_peak_is_that_of_the_ranks_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    config, gpus = RECIPES["huginn_small"](), Process(0, 4, 0, GPU, "fake", 1.0)
    flops = forward_flops(config.model, config.data.seq_len)
    assert flops.drawn_depths  # the mean over the drawn loops is in it
    peak = 4 * HARDWARE["h200"].peak(config.train.precision)
    assert peak_tokens_per_s(config, gpus) == pytest.approx(peak / flops.training)
    growing = make_config(train__steps=40, model__loops__depth=GROWING)
    assert peak_tokens_per_s(growing, gpus) is None
    assert peak_tokens_per_s(config, Process(0, 4, 0, CPU, "gloo", 1.0)) is None
