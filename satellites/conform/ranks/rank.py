"""Does one process's work: makes a layer, plays scenes with it, and writes the results.

There are three kinds of jobs: `reference` (one rank, all rows), `ranks` (this rank of several), and
`explain` (one rank: the reference again by source rank and by expert, which the diagnosis fits).
"""

import faulthandler
import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..contract import ContractError, Layer, Shard, load
from ..scenes import SCENES, Batch, Facts, batch, fitting
from . import weights
from .job import NORM, OUTPUT, Arrays, Events, Job, save
from .play import parameter_gradients, play
from .values import Shape

FOREVER_S = 24 * 3600  # the supervisor's limit ends a scene that hangs, not the group's


def serve(job: Job, rank: int) -> None:
    """Does a rank's part of a job, in a process of its own."""
    events = Events(job.folder, rank)
    with open(Path(job.folder) / f"stacks-{rank}.txt", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
        events.note("start")
        _start_group(job, rank)
        events.note("import")
        layer = load(job.spec)
        _KINDS[job.kind](job, rank, layer, events)
        events.note("done")


def _start_group(job: Job, rank: int) -> None:
    torchrun = {
        "RANK": rank,
        "WORLD_SIZE": job.world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": job.world_size,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    os.environ.update({name: str(value) for name, value in torchrun.items()})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/rendezvous",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=FOREVER_S),
    )


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _reference(layer: Layer) -> nn.Module:
    return layer.build(_group()) if layer.reference is None else layer.reference()


# Jobs ---------------------------------------------------------------------------------------------


def _describe(job: Job, rank: int, layer: Layer, events: Events) -> None:
    """Writes shapes, the router and the scenes that fit."""
    del rank
    events.note("build")
    module = _reference(layer)
    shapes = weights.shapes_of(module)
    if not shapes:
        raise ContractError("the layer has no parameters with requires_grad")
    router = weights.find_router(shapes, layer)
    width, num_experts = _sizes(shapes, router, layer)
    given = layer.routes == "given"
    if router is not None and not given:
        _check_router(router, shapes[router], num_experts, width)
    if layer.grad_norm is not None and layer.finish is None and layer.tokens == "own":
        raise ContractError(
            "grad_norm needs gradients summed over ranks: pass the function that sums them as "
            "Layer(finish=…), or one that does nothing if backward already sums"
        )
    if layer.top_k > num_experts:
        raise ContractError(f"top_k={layer.top_k} of {num_experts} experts")
    facts = Facts(width, num_experts, layer.top_k, given or router is not None, given)
    plan = {
        "full": shapes,
        "dtype": str(weights.dtype_of(module)).removeprefix("torch."),
        "router": router,
        "facts": asdict(facts),
        "scenes": [scene.name for scene in fitting(facts) if scene.name not in layer.skip],
        "left_out": [name for name in SCENES if name in layer.skip],
        "contract": {
            "tokens": layer.tokens,
            "scaling": layer.scaling,
            "finishes": layer.finish is not None,
            "rtol": layer.rtol,
            "own_reference": layer.reference is not None,
            "norm": layer.grad_norm is not None,
        },
    }
    unknown = [name for name in layer.skip if name not in SCENES]
    if unknown:
        raise ContractError(f"no scene {unknown[0]!r}; there are: {', '.join(SCENES)}")
    (Path(job.folder) / "plan.json").write_text(json.dumps(plan))


def _sizes(shapes: Mapping[str, Shape], router: str | None, layer: Layer) -> tuple[int, int]:
    width = layer.width or (shapes[router][1] if router else None)
    num_experts = layer.num_experts or (shapes[router][0] if router else None)
    if width is None or num_experts is None:
        raise ContractError(
            "no parameter looks like a router's weight (`gate` or `router` in its name, two "
            "dimensions): pass Layer(router=…), or width and num_experts. Parameters: "
            + ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        )
    return width, num_experts


def _check_router(name: str, shape: Shape, num_experts: int, width: int) -> None:
    if shape != (num_experts, width):
        raise ContractError(
            f"the router's weight {name} is {shape}, not (experts, width) = {(num_experts, width)}"
        )
    if width < num_experts + 1:
        raise ContractError(
            f"routes are steered through the first {num_experts + 1} columns of a row, but it has "
            f"{width}: build a layer of fewer experts or wider rows"
        )


def _play_reference(job: Job, rank: int, layer: Layer, events: Events) -> None:
    del rank
    module = _filled_reference(job, layer, events)
    for name, ranks in job.scenes:
        events.note("scene", scene=name, ranks=ranks)
        played = play(layer, module, _batch(job, name, ranks), None)
        save(Path(job.folder), f"reference-{ranks}-{name}", played)


def _play_ranks(job: Job, rank: int, layer: Layer, events: Events) -> None:
    events.note("build")
    module = layer.build(_group())
    assert job.full is not None
    shapes = weights.shapes_of(module)
    located = weights.locate(shapes, job.full, layer, rank, job.world_size)
    weights.fill(module, located, job.full, job.router)
    _write_shards(job, rank, located)
    for name, ranks in job.scenes:
        events.note("scene", scene=name, ranks=ranks)
        whole = _batch(job, name, ranks)
        rows = slice(None) if layer.tokens == "same" else whole.rows_of(rank)
        played = play(layer, module, whole, rows, events)
        if layer.finish is not None:
            events.note("finish", scene=name)
            layer.finish(module, _group())
        played |= parameter_gradients(module)
        if layer.grad_norm is not None:
            events.note("grad_norm", scene=name)
            played[NORM] = np.asarray(float(layer.grad_norm(module, _group())))
        save(Path(job.folder), f"ranks-{ranks}-{name}-{rank}", played)
        events.note("played", scene=name)


def _write_shards(job: Job, rank: int, located: Mapping[str, Shard | None]) -> None:
    text = json.dumps({name: shard and asdict(shard) for name, shard in located.items()})
    (Path(job.folder) / f"shards-{job.world_size}-{rank}.json").write_text(text)


def _explain(job: Job, rank: int, layer: Layer, events: Events) -> None:
    """Plays the reference for each source rank's gradient and for each expert alone.

    With all other experts' weights at zero, what remains passes one expert. Outputs and gradients
    are sums of these parts.
    """
    del rank
    module = _filled_reference(job, layer, events)
    num_experts = _facts(job).num_experts
    kept = {name: p.detach().clone() for name, p in weights.parameters_of(module).items()}
    for name, ranks in job.scenes:
        events.note("scene", scene=name, ranks=ranks)
        whole = _batch(job, name, ranks)
        sources = range(ranks) if layer.tokens == "own" else range(1)
        parts: Arrays = {}
        for expert in (None, *range(num_experts)):
            _keep_one(module, kept, job, expert)
            for source in sources:
                rows = whole.rows_of(source) if layer.tokens == "own" else slice(None)
                played = play(layer, module, _only_source(whole, rows), None)
                parts |= {f"{source}/{expert}/{key}": value for key, value in played.items()}
        _directions(job, layer, module, kept, whole, parts)
        _keep_all(module, kept)
        save(Path(job.folder), f"explain-{ranks}-{name}", parts)


def _directions(
    job: Job,
    layer: Layer,
    module: nn.Module,
    kept: Mapping[str, Tensor],
    whole: Batch,
    parts: Arrays,
) -> None:
    """Adds every expert's output for every row, up to a factor."""
    facts = _facts(job)
    for expert in range(facts.num_experts):
        _keep_one(module, kept, job, expert)
        asked = whole
        if facts.given:
            experts_TK = np.full_like(whole.experts_TK, expert)
            gates_TK = np.zeros_like(whole.gates_TK)
            gates_TK[:, :1] = 1
            asked = Batch(whole.x_TD, experts_TK, gates_TK, whole.gradient_TD, whole.counts)
        elif job.router is not None:
            _lean(module, job.router, expert, facts.num_experts)
        else:
            return
        parts[f"direction/{expert}"] = play(layer, module, asked, None)[OUTPUT]


def _lean(module: nn.Module, router: str, expert: int, num_experts: int) -> None:
    """Makes the router send every row to one expert, through the constant column."""
    weight = weights.parameters_of(module)[router]
    with torch.no_grad():
        weight[expert, num_experts] = 50.0


def _keep_one(module: nn.Module, kept: Mapping[str, Tensor], job: Job, expert: int | None) -> None:
    """Sets the weights of all experts but one to zero."""
    _keep_all(module, kept)
    assert job.experts is not None
    count = _facts(job).num_experts
    with torch.no_grad():
        for name, parameter in weights.parameters_of(module).items():
            if name not in job.experts:
                continue
            dim = job.experts[name]
            if dim is None:
                if expert is None or number_of(name, job.experts) != expert:
                    parameter.zero_()
                continue
            each = parameter.shape[dim] // count
            for other in range(count):
                if other != expert:
                    parameter.narrow(dim, other * each, each).zero_()


def number_of(name: str, experts: Iterable[str]) -> int:
    """Returns the expert of a listed parameter: the number that distinguishes its name."""
    ours = name.split(".")
    for other in experts:
        theirs = other.split(".")
        differing = [
            place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b
        ]
        if len(ours) == len(theirs) and len(differing) == 1 and ours[differing[0]].isdecimal():
            return int(ours[differing[0]])
    raise ContractError(f"which expert's parameter is {name}?")


def _keep_all(module: nn.Module, kept: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in weights.parameters_of(module).items():
            parameter.copy_(kept[name])


def _only_source(whole: Batch, rows: slice) -> Batch:
    gradient_TD = np.zeros_like(whole.gradient_TD)
    gradient_TD[rows] = whole.gradient_TD[rows]
    return Batch(whole.x_TD, whole.experts_TK, whole.gates_TK, gradient_TD, whole.counts)


def _filled_reference(job: Job, layer: Layer, events: Events) -> nn.Module:
    events.note("build")
    module = _reference(layer)
    assert job.full is not None
    weights.fill(module, dict.fromkeys(job.full), job.full, job.router)
    return module


def _facts(job: Job) -> Facts:
    assert job.facts is not None
    return Facts(**job.facts)


def _batch(job: Job, name: str, ranks: int) -> Batch:
    return batch(SCENES[name], ranks, _facts(job))


_KINDS = {
    "describe": _describe,
    "reference": _play_reference,
    "ranks": _play_ranks,
    "explain": _explain,
}
