"""Runs one arm of a claim: trains a toy, then probes its routings on held-out text.

The probe is a separate process: `python -m moebius_science.claims.runs FOLDER ARM`. Everything
about training is read from the run folder (metrics.jsonl, checkpoints); routings are captured in
the router.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import moebius

from ..compare.one_run import SCORES, end_with_standard_input
from ..compare.plan import PlannedRun
from ..compare.runner import Phase, command_of
from ..files import read_json, write_json
from .measures import (
    activated_fraction,
    effective_experts,
    random_activated_fraction,
    representation_collapse,
    thinned,
)
from .toys import ARMS, EVALUATION_ROWS, Arm, toy


@dataclass(frozen=True)
class Job:
    """Describes one run to a worker."""

    arm: Arm
    seed: int
    steps: int
    text: str
    data: str
    run_dir: Path
    device: str


def planned(job: Job) -> PlannedRun:
    """Returns the run in the form of the comparison runner."""
    config = toy(
        job.arm, seed=job.seed, steps=job.steps, text=job.text, data=job.data, device=job.device
    )
    return PlannedRun(job.arm.name, job.seed, config, job.run_dir)


def scoring(run: PlannedRun) -> dict[str, Any] | None:
    """Returns what to score after training: the arm's probes, if any."""
    return {"probes": ARMS[run.arm].probes} if ARMS[run.arm].probes else None


def command(run: PlannedRun, phase: Phase) -> Sequence[str]:
    """Returns the command that trains a run or probes it."""
    if phase == "train":
        return command_of(run, phase)
    return [sys.executable, "-m", "moebius_science.claims.runs", str(run.folder), run.arm]


def main() -> None:
    """Probes a trained run and writes the results; its checkpoints stay."""
    end_with_standard_input()
    folder, arm = Path(sys.argv[1]), ARMS[sys.argv[2]]
    found = {"request": {"probes": arm.probes}, "routings": probe(folder, arm)}
    write_json(folder / SCORES, found)


def record_of(job: Job) -> dict[str, Any]:
    """Returns the record of a finished run as plain values."""
    size = moebius.size_of(planned(job).config)
    record = {
        "arm": job.arm.name,
        "seed": job.seed,
        "steps": job.steps,
        **read_metrics(job.run_dir),
        "parameters": size.parameters.total,
        "training_flops_per_token": size.flops.training,
    }
    if job.arm.probes:
        record["routings"] = read_json(job.run_dir / SCORES)["routings"]
    return record


def read_metrics(run_dir: Path) -> dict[str, Any]:
    """Returns loss and load curves of a run."""
    lines = moebius.history(run_dir).records()
    steps = [line for line in lines if line["kind"] == "train"]
    record: dict[str, Any] = {
        "seconds": round(lines[-1]["time"] - lines[0]["time"], 1),
        "step_s": statistics.median(line["step_s"] for line in steps),
        "train_loss": [(line["step"], line["loss"]) for line in steps],
        "validation_loss": [
            (line["step"], line["loss"]) for line in lines if line["kind"] == "eval"
        ],
    }
    if "max_violation" in steps[0]:
        record["max_violation"] = [
            (line["step"], statistics.fmean(line["max_violation"])) for line in steps
        ]
    return record


def probe(run_dir: Path, arm: Arm) -> list[dict[str, Any]]:
    """Returns figures of the routings of all checkpoints, each a list over layers with experts."""
    found = []
    for checkpoint in sorted((run_dir / "checkpoints").glob("step_*")):
        loaded = moebius.load(checkpoint)
        layers = [figures(layer, loaded.config, arm) for layer in routings(loaded)]
        found.append({"step": loaded.step, "layers": layers})
    return found


@dataclass(frozen=True)
class Caught:
    """Holds one router's inputs and choices on the held-out rows."""

    x_TD: Tensor
    experts_TK: Tensor


class Catcher:
    """Records the inputs and outputs of a router that chooses experts."""

    def __init__(self, router: nn.Module) -> None:
        self._x: list[Tensor] = []
        self._experts: list[Tensor] = []
        self._hook = router.register_forward_hook(self._catch)

    def caught(self) -> Caught:
        """Returns everything recorded so far, in order."""
        return Caught(torch.cat(self._x), torch.cat(self._experts))

    def _catch(self, _: nn.Module, given: tuple[Tensor, ...], routing: Any) -> None:
        assert routing.wanted_TK is not None, (
            "only a router that chooses experts for rows can be probed"
        )
        self._x.append(given[0])
        self._experts.append(routing.wanted_TK)


@torch.no_grad()
def routings(loaded: moebius.LoadedModel) -> list[Caught]:
    """Returns every feed-forward router's routing of the validation rows."""
    routers = [router for _, kind, router in loaded.model.routers() if kind == "feed_forward"]
    catchers = [Catcher(router) for router in routers]
    for rows in loaded.rows(max_rows=EVALUATION_ROWS):
        loaded.model(rows.tokens_BS[rows.counted_BS.all(1)])
    return [catcher.caught() for catcher in catchers]


def figures(layer: Caught, config: moebius.Config, arm: Arm) -> dict[str, Any]:
    """Returns one layer's figures; collapse only if every token has one expert, which is its class."""
    experts = config.model.experts
    assert experts is not None
    num_experts, heads = experts.num_experts, experts.sub_tokens
    top_k = layer.experts_TK.shape[1]
    load_E = torch.bincount(layer.experts_TK.flatten(), minlength=num_experts)
    found: dict[str, Any] = {
        "num_experts": num_experts,
        "effective_experts": effective_experts(load_E),
        "max_violation": (load_E.max() / load_E.double().mean() - 1).item(),
    }
    if top_k == heads == 1:
        found["collapse"] = representation_collapse(layer.x_TD, layer.experts_TK[:, 0])
        found["experts_used"] = int((load_E > 0).sum())
    for window in arm.windows:
        rows = window * heads
        measured = activated_fraction(layer.experts_TK, window_rows=rows, num_experts=num_experts)
        found[f"activated_{window}"] = measured
        found[f"activated_{window}_ratio"] = measured / random_activated_fraction(
            top_k, num_experts, rows
        )
    return found


def thin(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with at most 100 points in every curve."""
    curves = ("train_loss", "validation_loss", "max_violation")
    return {name: thinned(value) if name in curves else value for name, value in record.items()}


if __name__ == "__main__":
    main()
