"""The time left of a run, and the share of the GPUs' peak that it uses."""

import pytest
import torch

from moebius.planning.hardware import HARDWARE
from moebius.train.config.train_config import TrainConfig
from moebius.train.metrics import pace
from moebius.train.metrics.pace import Pace, evaluations_left, peak_of


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
    now, left, train = 1000.0, {}, TrainConfig(steps=40, eval_every=10)
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now)
    measured = Pace()
    for step in range(21, 41):
        now += 2.0 + (60.0 if step == 21 else 0.0)
        left[step] = now, measured.left_s(step, train)
        if step % 10 == 0:
            now += 30.0
            measured.count_evaluation(30.0)
    assert left[21][1] is None
    for step in range(31, 41):  # an evaluation has been seen
        at, seconds = left[step]
        assert seconds == pytest.approx(now - at)
    assert left[25][1] == pytest.approx(15 * 2.0)  # none yet


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
    for precision in ("bfloat16", "float32"):
        expected = None if hardware is None else HARDWARE[hardware].peak(precision)
        assert peak_of(name, precision) == expected
    assert peak_of(name, "bfloat16_only") == peak_of(name, "bfloat16")


def test_a_gpu_that_is_known_has_an_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    from moebius.distributed.process.process import Process
    from moebius.model.cost import forward_flops
    from moebius.train.recipes.smoke import RECIPES

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    config, device = RECIPES["huginn_small"](), torch.device("cuda")
    process = Process(0, 4, 0, device, "fake", 1.0)
    rate = pace.peak_tokens_per_s(config, process)
    assert rate is not None
    flops = forward_flops(config.model, config.data.seq_len)
    assert rate * flops.training == pytest.approx(4 * HARDWARE["h200"].peak(config.train.precision))
    assert flops.drawn_depths  # the mean over the drawn loops is in it
    assert (
        pace.peak_tokens_per_s(config, Process(0, 4, 0, torch.device("cpu"), "gloo", 1.0)) is None
    )
