"""What a CUDA graph repeats is right in every later pass: on a GPU that is not there, all micro-batches
of a form make the same launches with the same numbers, read nothing, and copy nothing from the host.

    (given cases as JSON on the standard input, in a process that the tests start)
    python tests/fake_cuda/test_capture.py
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda.test_step import config_of, pytestmark, trace_steps
from fake_cuda.traced_step import Watch, _batch, pretended_gpu, pretended_world, watched
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from moebius.distributed.layout import plan_layout
from moebius.model.transformer import Transformer
from moebius.train import loop
from moebius.train.config.run_config import Config
from moebius.train.cuda_graph import reason_against
from moebius.train.loss import micro_batch_loss
from moebius.train.recipes.family import FAMILY
from moebius.train.run import Run, assemble

__all__ = ["pytestmark"]
PARTS = 3  # of all recipes, which take minutes
# What no recipe has: drawn loops with an index of layers, a loop's place and slowed rotations, which are
# made from lists; a step that is run again. A transition is over at once.
CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "transition": ("transition", {"feed_forward.router.switch_step": 1}),
    "loops by stages": ("huginn_moe", {"loops.depth": {"kind": "growing", "values": (2,)}}),
    "loops that know their place": ("parcae_moe", {"loops.condition": "scale_shift"}),
    "slowed rotations": ("dense", {"attention.positions.yarn": {"factor": 4}}),
    "recomputed": ("huginn_moe", {}),
    "one depth per sequence": (
        "parcae_moe",
        {"loops.depth": {"kind": "uniform", "values": (1, 3), "per": "sequence"}},
    ),
}


def case(name: str, *, log_every: int) -> dict[str, Any]:
    """Returns a run of two micro-batches a step, of which each loops twice if the recipe loops."""
    recipe, changes = CHANGED.get(name, (name, {}))
    looped = FAMILY[recipe][1]().model
    values = config_of(recipe, {}).model_dump(mode="json")
    values["train"] |= {
        "global_batch": 2 * values["train"]["micro_batch"],
        "log_every": log_every,
        "precision": "bfloat16",
        "recompute": "full" if name == "recomputed" else "none",
    }
    values["train"]["cuda_graph"] = False
    config = Config.model_validate(values)
    if looped.num_repeats > 1 and looped.halting is None:
        changes = {"num_layers": len(config.model.schedule_of(2))} | changes
    model = config.model.changed(changes)
    return {
        "name": name,
        "config": config.model_copy(update={"model": model}).model_dump(mode="json"),
    }


def is_captured(name: str) -> bool:
    """Returns whether a run says that it captures its passes."""
    config = Config.model_validate(case(name, log_every=1000)["config"])
    train = config.train.model_copy(update={"cuda_graph": "auto"})
    with torch.device("meta"):
        model = Transformer(config.model)
    return not reason_against(
        config.model_copy(update={"train": train}),
        model,
        plan_layout(config.mesh, 1),
        backend="triton",
        device=torch.device("cuda"),
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("log_every", [1000, 1])
@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_captured_is_the_same_in_every_micro_batch(part: int, log_every: int) -> None:
    names = [*(FAMILY | CHANGED)][part::PARTS]
    cases = json.dumps([case(name, log_every=log_every) for name in names])
    found = dict(zip(names, map(json.loads, trace_steps(cases, __file__)), strict=True))
    wrong = {name: why for name, why in found.items() if is_captured(name) == bool(why)}
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


# In the process with the device ----------------------------------------------------------------------


class Recorder(Watch):
    """Keeps the calls of every pass, each with the numbers that Python gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[list[tuple[Any, ...]]] = []
        self.refused: Counter[str] = Counter()  # by what a capture refuses
        self._records = False

    def begin(self) -> None:
        """Begins a pass."""
        self.passes.append([])
        self._records = True
        self.reads.clear()
        self.copies.clear()

    def end(self) -> None:
        """Ends a pass, forward and backward."""
        self._records = False
        for (what, where), number in (self.reads + self.copies).items():
            self.refused[f"{what} at {where}"] += number

    def note(self, name: str, where: str, given: Any) -> None:
        """Keeps a call of the pass."""
        if self._records:
            leaves = tree_leaves(given)
            numbers = tuple(each for each in leaves if isinstance(each, (int, float, bool)))
            devices = {each.device.type for each in leaves if isinstance(each, Tensor)}
            self.passes[-1].append((name, where, numbers))
            if len(devices) > 1:
                self.refused[f"{name} of a tensor on the host at {where}"] += 1

    def differences(self) -> list[str]:
        """Returns the first call in which a pass differs from the first pass."""
        first, *others = self.passes
        for calls in others:
            for one, other in zip_longest(first, calls):
                if one != other:
                    return [f"{one}, and later {other}"]
        return []


def main() -> None:
    """Traces the cases of the standard input, and prints a line for each: what stands against it."""
    for given in json.load(sys.stdin):
        recorder = trace(Config.model_validate(given["config"]))
        print(json.dumps([*recorder.refused, *recorder.differences()]), flush=True)


def trace(config: Config) -> Recorder:
    """Returns the passes of two steps after a first one, which fills caches."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pretended_gpu(),
        pretended_world(1) as process,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        run, recorder = assemble(config, Path(folder), process), Recorder()
        with watched(watch=recorder), recorded(run, recorder):
            for step in range(3):
                loop.step(run, _batch(config, 1), 1e-4)
                if step == 0:
                    recorder.passes.clear()
                    recorder.refused.clear()
    return recorder


@contextmanager
def recorded(run: Run, recorder: Recorder) -> Iterator[None]:
    """Tells where each pass begins and ends; gradients stay the same tensors, as a graph adds to them."""
    backward, rng_state = Tensor.backward, torch.get_rng_state

    def begin(*args: Any, **named: Any) -> Any:
        recorder.begin()
        return micro_batch_loss(*args, **named)

    def end(self: Tensor, *args: Any, **named: Any) -> None:
        backward(self, *args, **named)
        recorder.end()

    def state() -> Tensor:
        recorder.refused["the state of torch's generators"] += 1
        return rng_state()

    def zero_in_place() -> None:
        for parameter in run.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    with (
        mock.patch.object(loop, "micro_batch_loss", begin),
        mock.patch.object(Tensor, "backward", end),
        mock.patch.object(torch, "get_rng_state", state),
        mock.patch.object(run.optimizer, "zero_grad", zero_in_place),
    ):
        yield


if __name__ == "__main__":
    main()
