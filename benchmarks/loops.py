"""What a drawn depth costs beside a fixed one of equal mean.

    python -m benchmarks.loops [--rounds 4]
    torchrun --nproc-per-node 2 -m benchmarks.loops

Times forward and backward passes of `huginn_moe`, under torchrun with its experts on all ranks,
three arms one after another in every round, because the machine's speed drifts:
  fixed      R = 4 for every sequence
  step       one depth for all sequences of a step, equal on average: 2, 3, 4, 5, 6
  sequence   a depth for every sequence, 1 to 16, 4 on average
Every rank has the same depths; a rank whose own sequences draw deeper makes the others wait, and
that is not measured. Sequences have 128 and 256 positions. Goals: step ÷ fixed ≤ 1.05, sequence ÷
fixed ≤ 1.10. Writes results/loops.json or loops_ep2.json; takes 3 minutes.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from benchmarks.report import save
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.parallelize import build_model
from moebius.distributed.process.process import start_process
from moebius.model.loops.depth import PassDepth
from moebius.model.loops.steps import PassOptions
from moebius.model.transformer import Transformer
from moebius.train.recipes.family import FAMILY

SEQUENCES, LOOPS = 16, 4
OF_STEP = (2, 3, 4, 5, 6)
OF_SEQUENCE = (16, 9, 7, 6, 5, 4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    assert statistics.fmean(OF_STEP) == statistics.fmean(OF_SEQUENCE) == LOOPS
    torch.set_num_threads(1)
    config = FAMILY["huginn_moe"][1]().model.changed({"loops.depth.gradient_loops": None})
    with start_process("cpu", timeout_s=120) as process:
        ranks = process.world_size
        mesh = build_mesh(plan_layout(MeshConfig(ep=ranks), ranks), process)
        model = build_model(
            config, mesh, dispatcher="auto", backend="auto", seed=0, device=process.device
        )
        found = [measure(model, positions, options.rounds) for positions in (128, 256)]
        if process.rank:
            return
        shape = f"huginn_moe, EP {ranks}, {SEQUENCES} sequences a rank, all gradients, one thread"
        figures = {"shape": shape, "rounds": options.rounds, "by_length": found}
        print(*found, sep="\n")
        print(f"written: {save('loops' if ranks == 1 else f'loops_ep{ranks}', figures)}")


def measure(model: Transformer, positions: int, rounds: int) -> dict[str, Any]:
    """Returns the arms' median seconds, and ratios paired by round."""
    tokens = torch.randint(model.config.vocab_size, (SEQUENCES, positions + 1))
    arms = {
        "fixed": [PassDepth(LOOPS)] * len(OF_STEP),
        "step": [PassDepth(loops) for loops in OF_STEP],
        "sequence": [PassDepth(max(OF_SEQUENCE), 0, OF_SEQUENCE)] * len(OF_STEP),
    }
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(rounds + 1):
        for arm, depths in arms.items():
            began_s = time.perf_counter()
            for depth in depths:
                run(model, tokens, depth)
            if number:  # the first round warms up
                times[arm].append((time.perf_counter() - began_s) / len(depths))
    figures: dict[str, Any] = {"positions": positions}
    figures["seconds"] = {arm: statistics.median(found) for arm, found in times.items()}
    for arm in ("step", "sequence"):
        pairs = zip(times[arm], times["fixed"], strict=True)
        figures[f"{arm}_over_fixed"] = statistics.median(one / other for one, other in pairs)
    return figures


def run(model: Transformer, tokens: torch.Tensor, depth: PassDepth) -> None:
    output = model(tokens[:, :-1], targets_BS=tokens[:, 1:], options=PassOptions(depth=depth))
    output.cross_entropy.backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
