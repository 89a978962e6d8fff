"""How long a run still takes, and how much of the GPUs it uses.

The time left is the mean time of a step since this process's first one, which compiles and fills caches,
times the steps left. It contains whatever recurs between steps: data, logging, checkpoints. Evaluations
are rare and long, so they are measured apart: their mean, times those left. A process that resumes a run
measures anew, so neither an interruption nor another machine is in it.

MFU (model FLOPs utilisation, PaLM, arXiv 2204.02311) is the FLOPs of the model's products in forward and
backward pass (model/cost.py), without recomputation, over the GPUs' peak. Drawn loops count with their
mean. Halted tokens and routes that a capacity refuses count as if they were computed.
"""

import re
import time
from dataclasses import dataclass

import torch

from ...distributed.process.process import Process
from ...model.config.model_config import Precision
from ...model.cost import forward_flops
from ...model.execution.precision import products_dtype
from ..config.run_config import Config
from ..config.train_config import TrainConfig

# FLOP/s of dense products in bfloat16, and in float32 without TF32; planning/hardware.py has the sources.
PEAKS = {
    "A100": (312e12, 19.5e12),
    "H100": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "B200": (2.25e15, 80e12),
    "GB200": (2.25e15, 80e12),
}
# The driver's names of whole GPUs on SXM boards and in racks; cards and parts of a GPU are slower.
_NAME = re.compile(rf"(?:NVIDIA )?({'|'.join(PEAKS)})(?:[ -](?:SXM\d?|HBM\w+|\d+GB))*")


@dataclass
class Pace:
    """Measures steps and evaluations of this process, and predicts the rest of the run."""

    first_step: int | None = None  # the one that is not measured
    began_s: float = 0.0  # its end, later by the duration of every evaluation since
    evaluations: int = 0
    evaluated_s: float = 0.0

    def count_evaluation(self, seconds: float) -> None:
        """Adds an evaluation, also one before the first step."""
        self.evaluations += 1
        self.evaluated_s += seconds
        self.began_s += seconds

    def left_s(self, step: int, train: TrainConfig) -> float | None:
        """Returns the seconds from the end of a step to the run's; None at this process's first."""
        now = time.perf_counter()
        if self.first_step is None:
            self.first_step, self.began_s = step, now
            return None
        steps_s = (now - self.began_s) / (step - self.first_step) * (train.steps - step)
        return steps_s + evaluations_left(step, train) * self.evaluated_s / max(1, self.evaluations)


def evaluations_left(step: int, train: TrainConfig) -> int:
    """Returns how many evaluations come after a step's update, its own and the last one included."""
    every = train.eval_every
    return 1 + ((train.steps - 1) // every - (step - 1) // every if every else 0)


def peak_of(gpu: str, precision: Precision) -> float | None:
    """Returns the peak FLOP/s of a GPU by the driver's name for it; None: unknown."""
    known = _NAME.fullmatch(gpu)
    return PEAKS[known[1]][products_dtype(precision) == torch.float32] if known else None


def peak_tokens_per_s(config: Config, process: Process) -> float | None:
    """Returns all ranks' tokens/s at an MFU of 1; None if the peak of rank 0's GPU is unknown."""
    if process.device.type != "cuda":
        return None
    peak = peak_of(torch.cuda.get_device_name(process.device), config.train.precision)
    flops = forward_flops(config.model, config.data.seq_len).training
    return None if peak is None else process.world_size * peak / flops
