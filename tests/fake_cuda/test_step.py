"""Whole training steps of every recipe on a GPU that is not there: forward, backward, the sum of the
gradients, clipping, the update and an evaluation, traced with tensors that have no values. What lies on
the wrong device fails there, and what the host waits for is counted.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius.model.moe import SparseLayer
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config
from moebius.train.recipes.family import FAMILY

HERE = Path(__file__).parent
SOURCE = HERE / "device.cpp"  # a GPU for torch without CUDA
RANKS = 4
KINDS = ("adamw", "muon")
DISPATCHERS = ("alltoall", "dedup", "hierarchical", "allgather")
# Where tokens halt or a capacity refuses routes, the number of those that remain is read.
DROPS_ROUTES = {"sut", "switch", "switch_causal", "gshard", "x_moe_torchscale"}
# Where experts choose, and in mixtures, every rank has as many routes for each: known unasked.
KNOWS_ITS_COUNTS = {
    *("expert_choice", "expert_choice_flat", "mixture_of_tokens", "soft_moe", "transition"),
}
# How often a pass reads what goes from rank to rank: of a feed-forward layer, and of V or O of
# SwitchHead, whose heads are shared evenly. One read of all counts of a pass is the most; so it is
# in every evaluation, where ranks promise nothing of how many rows they have.
COUNTS_READ: Mapping[str, tuple[int, int]] = {"local": (0, 0), "dedup": (1, 0)}


pytestmark = [
    pytest.mark.skipif(
        "+cpu" not in version("torch"),
        reason=f"torch {version('torch')} is not built for CPUs alone",
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile the device"),
]


def trace_steps(cases: str, script: str = str(HERE / "traced_step.py")) -> list[str]:
    """Runs a script with the device, in a process of its own, and returns its lines."""
    done = subprocess.run(
        [sys.executable, script],
        input=cases,
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "LD_PRELOAD": str(_library()),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE.parent)]
            ),
        },
        check=False,
    )
    assert not done.returncode, done.stderr[-6000:]
    return done.stdout.splitlines()


def _library() -> Path:
    """Compiles the device once for a version of torch: two seconds."""
    torch_at = Path(str(torch.__file__)).parent
    made_of = SOURCE.read_bytes() + f"{torch_at} {version('torch')}".encode()
    folder = Path(tempfile.gettempdir()) / f"moebius_traced_{os.getuid()}"
    path = folder / f"{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(mode=0o700, exist_ok=True)
    built = path.with_suffix(f".{os.getpid()}")
    libraries = torch_at / "lib"
    subprocess.run(
        [
            *(os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", str(SOURCE)),
            *("-I", str(torch_at / "include"), "-L", str(libraries), "-lc10", "-ltorch_cpu"),
            *(f"-Wl,-rpath,{libraries}", "-o", str(built)),
        ],
        check=True,
    )
    os.replace(built, path)
    return path


def config_of(name: str, changes: Mapping[str, Any]) -> Config:
    """The recipe two depth steps deep, with one micro-batch on each rank."""
    found = FAMILY[name][1]()
    around = found.model.loops.prelude + found.model.loops.coda
    core = min(found.model.core_layers, 2)
    depth = {"num_layers": around + 2, "layers_per_group": around + core, "loops.depth": {}}
    model = found.model.changed(depth)
    values = found.model_copy(update={"model": model}).model_dump(mode="json")
    values["train"] |= {"micro_batch": 8, "global_batch": 8 * ranks_of(changes)}
    values["train"]["cuda_graph"] = False  # every launch is to be seen
    values["mesh"]["dp_replicate"] = None
    for key, value in changes.items():
        section, _, field = key.partition(".")
        values[section][field] = value
    return Config.model_validate(values)


def ranks_of(changes: Mapping[str, Any]) -> int:
    return RANKS if "mesh.ep" in changes else 1


def alone(turn: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every recipe on one GPU; in both turns together in both precisions, each with every way of
    recomputing.
    """
    for number, name in enumerate(FAMILY):
        precision = ("bfloat16", "float32")[(number + turn) % 2]
        recompute = ("none", "selective", "full")[(number // 2 + turn) % 3]
        yield (
            name,
            {
                "train.precision": precision,
                "train.recompute": recompute,
                "optim.kind": KINDS[(number // 3 + turn) % 2],
            },
        )


def together(dispatcher: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every recipe with its experts on four GPUs; what else there is comes by turns."""
    for number, name in enumerate(FAMILY, start=DISPATCHERS.index(dispatcher)):
        changes = {
            "mesh.ep": RANKS,
            "mesh.dispatcher": dispatcher,
            "train.precision": ("float32", "bfloat16")[number % 2],
            "train.recompute": ("none", "selective", "full")[number % 3],
            "optim.kind": KINDS[number // 4 % 2],
        }
        if number % 4 == 0:
            changes["mesh.sharding"] = "fsdp"
        if config_of(name, {}).model.experts is not None:
            yield name, changes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("turn", [0, 1])
def test_every_step_on_one_gpu_stays_there(turn: int) -> None:
    check("local", list(alone(turn)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_step_on_four_stays_on_its_own(dispatcher: str) -> None:
    check(dispatcher, list(together(dispatcher)))


def check(dispatcher: str, cases: Sequence[tuple[str, dict[str, Any]]]) -> None:
    wrong = []
    given = [
        {
            "name": name,
            "config": config_of(name, changes).model_dump(mode="json"),
            "num_ranks": ranks_of(changes),
        }
        for name, changes in cases
    ]
    for (name, changes), line in zip(cases, trace_steps(json.dumps(given)), strict=True):
        for part, found in json.loads(line).items():
            where = f"{name} {changes}, {part}"
            wrong += [f"{where}: {each}" for each in found["wrong"]]
            config = config_of(name, changes)
            expected = expected_reads(name, config, dispatcher, training=part == "step")
            read = reads_of(found["reads"])
            if read != expected:
                wrong.append(f"{where}: reads {read}, expected {expected}")
            copied = copies_of(found["copies"])
            if copied != (expected := expected_copies(config, training=part == "step")):
                wrong.append(f"{where}: copies {copied}, expected {expected}: {found['copies']}")
    assert not wrong, "\n".join(wrong)


def reads_of(reads: Sequence[tuple[str, str, int]]) -> Counter[str]:
    """How often each kind of value is read."""
    total: Counter[str] = Counter()
    for what, where, number in reads:
        kind = "norm" if "global_grad_norm" in where else "counts"
        kind = "loss" if "evaluate" in where else kind
        total["dropped" if what == "nonzero" else kind] += number
    return total


def copies_of(copies: Sequence[tuple[str, str, int]]) -> Counter[str]:
    """How often each kind of copy is made of what lies on the host."""
    total: Counter[str] = Counter()
    for how, _, number in copies:
        total[how] += number
    return total


def expected_copies(config: Config, *, training: bool) -> Counter[str]:
    """The tokens; in a logged step also the parts of gradients, in an evaluation also which tokens
    count, for two uses, and a table of noise.
    """
    drawn = config.model.loops.start == "drawn"
    return Counter({"pinned": 1 + (config.train.log_every == 1) if training else 3 + drawn})


def expected_reads(name: str, config: Config, dispatcher: str, *, training: bool) -> Counter[str]:
    """The gradient norm, or an evaluation's loss; and by the tables what is read of every layer."""
    model = Transformer(config.model)
    uses = [
        path.startswith("feed_forward")
        for step in config.model.schedule
        for path, layer in model.group[step.member].named_modules()
        if isinstance(layer, SparseLayer)
    ]
    expected: Counter[str] = Counter({"norm" if training else "loss": 1})
    if name in DROPS_ROUTES and (training or name != "gshard"):  # whose evaluation drops nothing
        expected["dropped"] = len(uses)
    reads = COUNTS_READ.get(dispatcher, (1, 1))
    if name in KNOWS_ITS_COUNTS:
        reads = (0, 0)
    elif dispatcher == "dedup" and (config.model.attention.kind == "momha" or not training):
        reads = (1, 1)
    expected["counts"] = reads[0] * sum(uses) + reads[1] * (len(uses) - sum(uses))
    return +expected
