"""The time left of a run, and the share of the GPUs' peak that it uses."""

from typing import Any

import pytest
import torch
from parts import make_config

from moebius.distributed.process.process import Process
from moebius.model.cost import forward_flops, peak_flops
from moebius.model.loops.depth import loops_of
from moebius.planning.hardware import HARDWARE
from moebius.train.metrics.step_metrics import Pace, evaluations_left
from moebius.train.recipes.smoke import RECIPES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("every", [0, 4, 5, 7, 10, 20])
def test_evaluations_left_are_those_that_a_run_makes(every: int) -> None:
    made = {step for step in range(1, 10) if every and step % every == 0} | {10}
    for step in range(1, 11):
        assert evaluations_left(step, 10, every) == len([each for each in made if each >= step])


GROWING = {"kind": "growing", "values": [1, 2], "stage_steps": 30}


@pytest.mark.parametrize("depth", [{}, GROWING], ids=["fixed", "growing"])
def test_time_left_is_what_the_run_takes_where_steps_and_evaluations_are_steady(
    depth: dict[str, Any],
) -> None:
    """From a resume at step 20 on; the process's first step takes a minute more."""
    config = make_config(train__steps=40, model__loops__depth=depth)
    now, left, pace = 0.0, {}, Pace()
    for step in range(21, 41):
        loops = loops_of(config.model.loops.depth, config.model.num_repeats, 0, step - 1, 0)
        step_s = 2.0 * loops + (60.0 if step == 21 else 0.0)
        now += step_s
        left[step] = now, pace.facts(step, step_s, config, Process(0, 1, 0, CPU, "gloo", 1.0))
        for kind, every, seconds in (("validation", 10, 30.0), ("scores", 8, 5.0)):
            if step % every == 0:
                now += seconds
                pace.evaluations[kind] = every, seconds
    assert left[21][1] == {}
    for step in range(31, 41):  # an evaluation of each kind has been seen
        at, told = left[step]
        assert told == {"left_s": pytest.approx(now - at)}
    if not depth:  # none yet
        assert left[23][1] == {"left_s": pytest.approx(17 * 4.0)}


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200_nvl72"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM2e", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_peaks_are_those_of_the_planner(name: str, hardware: str | None) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        precision = str(dtype).removeprefix("torch.")
        expected = None if hardware is None else HARDWARE[hardware].peak(precision)
        assert peak_flops(name, dtype) == expected


def test_a_gpu_that_is_known_has_an_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    config, gpus = RECIPES["huginn_small"](), Process(0, 4, 0, GPU, "fake", 1.0)
    flops = forward_flops(config.model, config.data.seq_len)
    assert flops.drawn_depths  # the mean over the drawn loops is in it
    tokens = config.train.global_batch * config.data.seq_len
    peak_s = tokens * flops.training / (4 * HARDWARE["h200"].peak(config.train.precision))
    assert Pace().facts(1, 4 * peak_s, config, gpus) == {"mfu": 0.25}
    growing = make_config(train__steps=40, model__loops__depth=GROWING)
    one, two = (Pace().facts(step, 1e-9, growing, gpus)["mfu"] for step in (30, 31))
    assert one < two  # of the loops that the step makes
