"""The time left of a run, and the share of the GPUs' peak that it uses."""

import pytest
import torch
from parts import make_config

from moebius.distributed.process.process import Process
from moebius.model.cost import forward_flops, peak_flops
from moebius.planning.hardware import HARDWARE
from moebius.train.config.train_config import TrainConfig
from moebius.train.metrics.step_metrics import Pace, evaluations_left, peak_tokens_per_s
from moebius.train.recipes.smoke import RECIPES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("eval_every", [0, 4, 5, 7, 10, 20])
def test_evaluations_left_are_those_that_a_run_makes(eval_every: int) -> None:
    train = TrainConfig(steps=10, eval_every=eval_every)
    made = {step for step in range(1, 10) if eval_every and step % eval_every == 0} | {10}
    for step in range(1, 11):
        assert evaluations_left(step, train) == len([each for each in made if each >= step])


def test_time_left_is_what_the_run_takes_where_steps_and_evaluations_are_steady(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a resume at step 20 on; the process's first step takes a minute more."""
    now, left = 1000.0, {}
    config = make_config(train__steps=40, train__eval_every=10)
    monkeypatch.setattr("moebius.train.metrics.step_metrics.time.perf_counter", lambda: now)
    measured, process = Pace(), Process(0, 1, 0, CPU, "gloo", 1.0)
    for step in range(21, 41):
        now += 2.0 + (60.0 if step == 21 else 0.0)
        left[step] = now, measured.facts(step, 1e3, config, process)
        if step % 10 == 0:
            now += 30.0
            measured.count_evaluation(30.0)
    assert left[21][1] == {}
    for step in range(31, 41):  # an evaluation has been seen
        at, told = left[step]
        assert told == {"left_s": pytest.approx(now - at)}
    assert left[25][1] == {"left_s": pytest.approx(15 * 2.0)}  # none yet


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200_nvl72"),
        ("NVIDIA H100 PCIe", None),
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
    config = RECIPES["huginn_small"]()
    rate = peak_tokens_per_s(config, Process(0, 4, 0, GPU, "fake", 1.0))
    assert rate is not None
    flops = forward_flops(config.model, config.data.seq_len)
    assert rate * flops.training == pytest.approx(4 * HARDWARE["h200"].peak(config.train.precision))
    assert flops.drawn_depths  # the mean over the drawn loops is in it
    told = Pace().facts(1, rate / 4, config, Process(0, 4, 0, GPU, "fake", 1.0))
    assert told == {"mfu": 0.25}
    assert peak_tokens_per_s(config, Process(0, 4, 0, CPU, "gloo", 1.0)) is None
