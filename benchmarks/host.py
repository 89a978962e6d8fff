"""Counts what a training step launches and times its host, without a GPU.

    python -m benchmarks.host                    (MoEUT and dense, 44M and 244M)
    python -m benchmarks.host --recipes moeut_244m dense_244m --steps 40

Launches: a step of the recipe (16 sequences of 1,024, bfloat16) is traced on the device of
tests/fake_cuda, which computes nothing, once as an unlogged and once as a logged step. Triton's
launches are counted by kernel and torch's by the module that asks for them; views and empty tensors
launch nothing. Operations of torch's own backward nodes are under "torch.autograd".

Time: the recipe with tensors of a few numbers runs on the CPU, and Triton's kernels are replaced by
nothing, after all that Triton does in Python to launch them. What remains is the work of the host:
Python, autograd, the dispatcher. It is the processor time of one thread, least and median of some
steps; the driver's part of a launch (a few µs each) is missing.

Writes results/host_step.json. Takes about two minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

import moebius
from benchmarks.report import RESULTS, ROOT, save
from moebius.data_pipeline.read.loader import Batch
from moebius.distributed.process.process import start_process
from moebius.kernels import backend, permute
from moebius.kernels.custom_op import custom_op
from moebius.kernels.fused import router
from moebius.kernels.triton import available
from moebius.train import loop
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import RECIPES
from moebius.train.run import Run, assemble

LIBRARY = f"{Path(str(moebius.__file__)).parent}/"
OTHERS = tuple(f"{LIBRARY}{name}/" for name in ("tests", "benchmarks", ".venv"))
FAKE = str(ROOT / "tests" / "fake_cuda")
DEFAULT = ("moeut_44m", "dense_44m", "moeut_244m", "dense_244m")
RATE, WARM_UP = 1e-4, 3
COMMON = (
    *("train.precision=bfloat16", "train.compile=false", "train.threads=1"),
    "train.cuda_graph=false",  # the steps that are counted are eager
)
STEP = ("data.seq_len=1024", "train.global_batch=16", "train.micro_batch=16")
TINY = (
    *("data.seq_len=8", "train.global_batch=2", "train.micro_batch=2", "train.device=cpu"),
    *("model.vocab_size=257", "prepare.vocab_size=257", "model.d_model=32"),
    "model.attention.d_head=16",
)
WIDTHS = {
    "moeut": "model.feed_forward.d_expert=16",
    "dense": "model.feed_forward.d_feed_forward=32",
}
NO_LAUNCH = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "_reshape_alias", "alias", "detach", "lift_fresh"),
}


def main() -> None:
    options = parse()
    if options.part:
        case = {"launches": launches, "host_ms": host_ms}[options.part]
        json.dump(case(options.recipes[0], options.steps), sys.stdout)
        return
    found: dict[str, Any] = {"load_average": os.getloadavg(), "steps": options.steps}
    for part in ("launches", "host_ms"):
        found[part] = {name: in_own_process(part, name, options.steps) for name in options.recipes}
    times = {name: each["least"] for name, each in found["host_ms"].items()}
    found["moeut_by_dense"] = {
        size: round(times[f"moeut_{size}"] / times[f"dense_{size}"], 2)
        for size in ("44m", "244m")
        if {f"moeut_{size}", f"dense_{size}"} <= times.keys()
    }
    written = save(f"host_step{options.suffix}", found, folder=options.out)
    for name in options.recipes:
        counts = found["launches"][name]
        words = [
            f"{kind} {sum(map(sum, map(dict.values, of.values())))}" for kind, of in counts.items()
        ]
        print(f"{name}: launches {', '.join(words)}; host {times[name]:.1f} ms")
    print(found["moeut_by_dense"], written)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", nargs="+", default=DEFAULT)
    parser.add_argument("--steps", type=int, default=20, help="that are timed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--suffix", default="", help="of the file's name")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # one part of one recipe, as JSON
    return parser.parse_args()


def in_own_process(part: str, recipe: str, steps: int) -> Any:
    """Returns what a process of its own finds; to count, it loads the device that is not there."""
    device = {"LD_PRELOAD": str(fake_device())} if part == "launches" else {}
    words = ["--part", part, "--recipes", recipe, "--steps", str(steps)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.host", *words],
        cwd=ROOT,
        env=os.environ | device | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{part} of {recipe}: {done.stderr[-4000:]}")
    return json.loads(done.stdout)


def fake_device() -> Path:
    return of_fake("test_step")._library()


def of_fake(name: str) -> Any:
    """Imports a module of tests/fake_cuda, which is no package."""
    if FAKE not in sys.path:
        sys.path.insert(0, FAKE)
    return import_module(name)


def config_of(recipe: str, *changes: str) -> Config:
    return resolve(recipe, [*COMMON, "kernels.backend=triton", *changes], RECIPES)


def new_batch(config: Config, number: int) -> Batch:
    shape = (1, config.train.micro_batch, config.data.seq_len + 1)
    rows = np.random.default_rng(number).integers(0, config.model.vocab_size, shape)
    return Batch(rows, 0, 0, equal_shapes=True)


def always(value: Any) -> Callable[..., Any]:
    """Returns a function that returns `value`; a mock's own work would be timed."""
    return lambda *_args, **_named: value


# Launches -----------------------------------------------------------------------------------------


def launches(recipe: str, _steps: int) -> dict[str, Any]:
    """Counts the launches of an unlogged and of a logged step."""
    traced_step, found = of_fake("traced_step"), {}
    config = config_of(recipe, *STEP)
    with (
        tempfile.TemporaryDirectory() as folder,
        traced_step.pretended_gpu(),
        traced_step.pretended_world(1) as process,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        run = assemble(config, Path(folder), process)
        with traced_step.watched():  # the first step allocates the optimizer's state
            loop.step(run, new_batch(config, 0), RATE)
        for kind, is_logged in (("unlogged", False), ("logged", True)):
            found[kind] = counted_step(run, new_batch(config, 1), is_logged)
    return found


def counted_step(run: Run, batch: Batch, is_logged: bool) -> dict[str, dict[str, int]]:
    from triton.runtime.jit import JITFunction

    traced_step = of_fake("traced_step")
    of_triton, of_torch = Counter[str](), Counter[str]()

    class Counting(traced_step.Watch):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if launches_one(func, (args, kwargs, result)):
                of_torch[asking_module()] += 1
            return result

    def launch(kernel: Any, *_args: Any, **_named: Any) -> None:
        of_triton[kernel.fn.__name__] += 1

    with (
        mock.patch.object(traced_step, "Watch", Counting),
        mock.patch.object(loop, "is_logged", always(is_logged)),
        traced_step.watched(),
        mock.patch.object(JITFunction, "run", launch),
    ):
        loop.step(run, batch, RATE)
    return {"triton": dict(of_triton.most_common()), "torch": dict(of_torch.most_common())}


def asking_module() -> str:
    """Returns the innermost module of the library that is being run, by its file."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        file = frame.f_code.co_filename
        if file.startswith(LIBRARY) and not file.startswith(OTHERS):
            return file.removeprefix(LIBRARY)
        frame = frame.f_back
    return "torch.autograd"


def launches_one(func: Any, values: Any) -> bool:
    """Returns whether a call below autograd launches a kernel."""
    if func.namespace in ("prim", "moebius") or func.__name__.partition(".")[0] in NO_LAUNCH:
        return False
    results = func._schema.returns
    if results and results[0].alias_info is not None and not results[0].alias_info.is_write:
        return False  # a view
    leaves = tree_leaves(values)
    return any(isinstance(each, Tensor) and each.is_cuda for each in leaves)


# Time ---------------------------------------------------------------------------------------------


def host_ms(recipe: str, steps: int) -> dict[str, Any]:
    """Times steps whose kernels do nothing; includes Triton's launching in Python."""
    torch.set_num_threads(1)
    config = config_of(recipe, *TINY, WIDTHS[recipe.partition("_")[0]])
    with (
        tempfile.TemporaryDirectory() as folder,
        start_process("cpu", timeout_s=60) as process,
        KernelsOfNothing() as launched,
        mock.patch.object(loop, "is_logged", always(False)),
    ):
        run = assemble(config, Path(folder), process)
        # what no kernel computed is no number
        with mock.patch.object(type(run.judge), "why_skipped", always((None, None))):
            times = [timed_step(run, number) for number in range(WARM_UP + steps)][WARM_UP:]
    figures = {"least": min(times), "median": statistics.median(times)}
    per_step = launched[0] / (WARM_UP + steps)
    return {name: round(ms, 2) for name, ms in figures.items()} | {"triton_launches": per_step}


def timed_step(run: Run, number: int) -> float:
    """Returns the processor time of a step in milliseconds."""
    batch = new_batch(run.config, number)
    began_ns = time.thread_time_ns()
    loop.step(run, batch, RATE)
    return (time.thread_time_ns() - began_ns) / 1e6


class KernelsOfNothing:
    """Lets Triton's kernels run on the CPU and compute nothing; counts their launches."""

    def __enter__(self) -> list[int]:
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        from moebius.kernels.triton import routing, tiles

        launched, self._stack = [0], ExitStack()

        def compiled(function: Any, key: Any, _signature: Any, device: Any, *_: Any) -> Any:
            kernel = Nothing(launched)
            function.device_caches[device][0][key] = kernel
            return kernel

        sort = custom_op("moebius::sort_routes_by_triton")(routing.sort_routes)
        driver.set_active(cast(Any, Driver()))
        for patch in (
            mock.patch.object(JITFunction, "_do_compile", compiled),
            *(
                mock.patch.object(module, "reason_against", always(None))
                for module in (available, permute, router)
            ),
            mock.patch.object(permute, "_sort_routes", sort),
            mock.patch.object(router, "handles", always(False)),
            mock.patch.object(tiles, "target", always("sm_90")),
        ):
            self._stack.enter_context(patch)
        backend.reason_against.cache_clear()
        backend._fastest.cache_clear()
        return launched

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Nothing:
    """A compiled kernel whose launch does nothing."""

    function, packed_metadata = 1, ()

    def __init__(self, launched: list[int]) -> None:
        self._launched = launched

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        self._launched[0] += 1


class Driver:
    """A GPU's driver for Triton."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232448})

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> None:
        return None


if __name__ == "__main__":
    main()
