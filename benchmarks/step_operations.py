"""What a training step launches: its operations, by where they are launched and by kind.

    python -m benchmarks.step_operations [--dispatcher auto] [--name step_operations]

One step of train/loop.py of the recipe smoke, one micro-batch per rank: on one rank, and on 4 ranks
over Gloo with EP 4 and with pure data parallelism. Every operation that torch dispatches is
counted, those inside our custom ops too, at the line's function in this library that launched it;
in the backward pass, where nodes of torch's own have no line, at the function whose forward pass
made the node. One with `_foreach_` in its name counts once. Counted too are `tolist`, which torch
does not dispatch on a CPU, products in C++ (kernels/cpu/brgemm.cpp) and our ops that are one call in C++;
not those of an exchange through shared memory (distributed/symmetric), some six per sparse layer.

On a GPU all but views and allocations would be a kernel, and each costs a launch of some
microseconds whatever it computes; so the number says what a small model pays beside its products.
Beside it stands how many events torch's profiler sees, where operations in operations count too,
and those that `_foreach_` makes of every tensor on a CPU.

Writes results/step_operations.json; a minute on 2 busy cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._autograd import _get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]
from torch._library.custom_ops import OPDEFS
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.expert_parallel import Way, build_run
from benchmarks.report import ROOT, save
from moebius.distributed.dispatch.table import LOCAL
from moebius.distributed.process.process import Process, start_process
from moebius.kernels.cpu import brgemm
from moebius.train.loop import step

WARM_UP = 2  # steps: moments are there, workspaces have grown
WAYS = {"EP 1, 1 rank": (1, 1), "EP 4, 4 ranks": (4, 4), "data parallel, 4 ranks": (1, 4)}
FREE = ("view", "allocation", "bookkeeping", "our op")  # launch nothing; our ops' parts count
_BESIDE = tuple(str(ROOT / name) for name in ("benchmarks", "tests", ".venv"))
_ENGINE = "_engine_run_backward"

# Which part of a step a function belongs to: by FILE:FUNCTION, by file, or by folder; the longest
# name that fits decides.
PARTS = {
    "distributed/dispatch": "dispatch",
    "distributed/symmetric": "dispatch",
    "distributed/gradients.py": "sum of gradients",
    "distributed/gradients.py:clip_gradients": "norm and clipping",
    "distributed/gradients.py:global_grad_norm": "norm and clipping",
    "distributed/gradients.py:_norms": "norm and clipping",
    "distributed/gradients.py:_square_sum": "norm and clipping",
    "kernels": "expert kernels",
    "kernels/permute.py:_sort_routes": "sorting of routes",
    "kernels/permute.py:sort_routes": "sorting of routes",
    "kernels/permute.py:sort_by_expert": "sorting of routes",
    "kernels/permute.py:inverse_order": "sorting of routes",
    "kernels/gradients.py": "sums of banks' gradients",
    "kernels/fused/router.py": "routers",
    "kernels/cpu/top_k.py": "routers",
    "kernels/fused/softmax_sums.py": "balance and loads",
    "kernels/sends.py": "dispatch",
    "kernels/cpu/sends.py": "dispatch",
    "model/attention/attention.py": "attention",
    "model/attention/base.py": "attention",
    "model/balance.py": "balance and loads",
    "model/head_loss.py": "head and cross-entropy",
    "model/layers.py": "norms, matrices, rotation",
    "model/layers.py:router_logits": "routers",
    "model/moe.py": "residual, layer",
    "kernels/fused/norm.py": "residual, layer",
    "kernels/fused/rotary.py": "norms, matrices, rotation",
    "model/execution/recompute.py": "routers",
    "model/residual.py": "residual, layer",
    "model/routers": "routers",
    "model/routing.py": "lists of routes",
    "model/transformer.py": "residual, layer",
    "model/transformer.py:_losses": "balance and loads",
    "train": "loss and meter",
    "train/loop.py:update_weights": "AdamW",
    "train/loop.py:step": "AdamW",
}


class Operations(TorchDispatchMode):
    """Counts what is dispatched while it is entered, by (where, direction, kind, name)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str, str, str]] = Counter()
        self._numbers: list[int] = []  # autograd's, rising, and where each was given out
        self._places: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        where, direction = self._place()
        if func.namespace == "moebius":
            before = launches(self.counts)
            with self:  # what it is made of, as if it stood there
                result = OPDEFS[func.name()]._init_fn(*args, **kwargs)
            kind = "our op" if launches(self.counts) > before else "call in C++"
            self.counts[where, direction, kind, func.__name__] += 1
            return result
        result = func(*args, **kwargs)
        self.counts[where, direction, kind_of(func, args, result), func.__name__] += 1
        return result

    def count(self, name: str, kind: str) -> None:
        """Counts what torch does not dispatch."""
        self.counts[*self._place(), kind, name] += 1

    def _place(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node()
        where, in_backward = launched_at(sys._getframe(2))
        if not in_backward:
            number = _get_sequence_nr() - 1
            if not self._numbers or number > self._numbers[-1]:
                self._numbers.append(number)
                self._places.append(where)
            return where, "forward"
        if where:
            return where, "backward"
        if node is None or node.name().endswith("AccumulateGrad"):
            return "torch: sums of gradients", "backward"
        at = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._places[max(at, 0)], "backward"


def launched_at(frame: FrameType | None) -> tuple[str, bool]:
    """Returns FILE:FUNCTION of the innermost frame of the library, and whether the backward pass
    runs; "" where torch's own node launches it.
    """
    where = ""
    while frame is not None:
        code = frame.f_code
        if code.co_name == _ENGINE:
            return where, True
        if not where and code.co_filename.startswith(str(ROOT)) and is_ours(code.co_filename):
            where = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_name}"
        frame = frame.f_back
    return where, False


def is_ours(file: str) -> bool:
    """Whether a file is of the library, and not one beside it."""
    return not file.startswith(_BESIDE)


def kind_of(func: Any, args: tuple, result: Any) -> str:
    """What an operation does, as far as it can be seen from outside."""
    name = func.__name__.split(".")[0]
    if func.namespace == "c10d":
        return "collective"
    if func.is_view or name in ("detach", "alias", "_unsafe_view", "lift_fresh"):
        return "view"
    if "empty" in name:
        return "allocation"
    if name in ("promote_types", "_record_function_enter_new", "_record_function_exit"):
        return "bookkeeping"
    if name in ("item", "_local_scalar_dense"):
        return "host read"
    if any(word in name for word in ("zero", "fill", "ones", "full", "arange")):
        return "fill"
    if name in ("_to_copy", "copy_", "clone", "cat", "stack", "_foreach_copy_", "index_select"):
        return "copy"
    first = result[0] if isinstance(result, tuple | list) and result else result
    if isinstance(first, Tensor) and not first.is_floating_point():
        return "integers"
    return "arithmetic"


def part_of(where: str) -> str:
    """The part of a step that a place belongs to."""
    path, _, function = where.partition(":")
    names = [where, path, *map(str, Path(path).parents)]
    return next((PARTS[name] for name in names if name in PARTS), function or where)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dispatcher", default="auto", help="of the ranks with EP 4")
    parser.add_argument("--name", default="step_operations", help="of the file in results/")
    parser.add_argument("--places", type=int, default=30, help="how many are printed")
    parser.add_argument("--way", choices=[*WAYS], help=argparse.SUPPRESS)  # a rank
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        run_rank(options)
        return
    ways = {way: launch(way, options) for way in WAYS}
    show(ways, options.places)
    print(save(options.name, {"recipe": "smoke", "dispatcher": options.dispatcher, "ways": ways}))


def launch(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 of a world counted."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={WAYS[way][1]}", "-m", "benchmarks.step_operations"),
            *("--way", way, "--rank-out", str(out), "--dispatcher", options.dispatcher),
        ]
        subprocess.run(
            command,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )
        return json.loads(out.read_text())


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    ep = WAYS[options.way][0]
    with start_process("cpu", timeout_s=120) as process:
        found = count_step(ep, process, options.rank_out.parent, options.dispatcher)
        if process.rank == 0:
            options.rank_out.write_text(json.dumps(found))


def count_step(ep: int, process: Process, folder: Path, dispatcher: str) -> dict[str, Any]:
    """One step's operations on rank 0, and the number of launches on every rank."""
    run, batch = build_run(Way(ep, dispatcher if ep > 1 else LOCAL), process, folder)
    for _ in range(WARM_UP):
        step(run, batch, 1e-4)
    operations = Operations()
    with calls_in_cpp(operations), operations:
        step(run, batch, 1e-4)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step(run, batch, 1e-4)
    events = [event.name for event in recorded.events() or ()]
    own = torch.tensor([float(launches(operations.counts))])
    every = [torch.zeros_like(own) for _ in range(process.world_size)]
    dist.all_gather(every, own)
    return {
        "launches_by_rank": [int(one.item()) for one in every],
        "profiler_events": sum(name.startswith(("aten::", "c10d::")) for name in events),
        "places": as_rows(operations.counts),
    }


@contextmanager
def calls_in_cpp(operations: Operations) -> Iterator[None]:
    """Counts the products of the kernels for CPUs, and what is read by `tolist`."""
    call, read = brgemm._call, Tensor.tolist

    def counted_call(name: str, like: Tensor, *arguments: object) -> None:
        operations.count(name, "call in C++")
        call(name, like, *arguments)

    def counted_read(self: Tensor) -> Any:
        operations.count("tolist", "host read")
        return read(self)

    brgemm._call, Tensor.tolist = counted_call, counted_read
    try:
        yield
    finally:
        brgemm._call, Tensor.tolist = call, read


def launches(counts: Mapping[tuple[str, str, str, str], int]) -> int:
    """All that works on tensors' numbers."""
    return sum(n for (_, _, kind, _), n in counts.items() if kind not in FREE)


def as_rows(counts: Mapping[tuple[str, str, str, str], int]) -> list[dict[str, Any]]:
    """One entry for every place and kind, the most numerous first; views by kind alone."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for (where, direction, kind, name), number in counts.items():
        row = found.setdefault(("" if kind == "view" else where, kind), Counter())
        row[direction] += number
        row[f"name {name.removesuffix('.default')}"] += number
    rows = [
        {
            "part": part_of(where),
            "where": where,
            "kind": kind,
            "forward": row["forward"],
            "backward": row["backward"],
            "names": ", ".join(
                f"{name.removeprefix('name ')} {number}"
                for name, number in row.most_common()
                if name.startswith("name ") and kind != "view"
            ),
        }
        for (where, kind), row in found.items()
    ]
    return sorted(rows, key=lambda row: -row["forward"] - row["backward"])


# Report -------------------------------------------------------------------------------------------


def show(ways: Mapping[str, dict[str, Any]], num_places: int) -> None:
    """Prints launches by part and by kind, and the places with the most of them."""
    console = Console(width=130)
    for title, key in (("launches by part", "part"), ("operations by kind", "kind")):
        table = Table(key, *ways, title=f"{title}, of one step and rank")
        totals = {way: summed(found["places"], key) for way, found in ways.items()}
        for name in dict.fromkeys(name for total in totals.values() for name in total):
            table.add_row(name, *(str(total.get(name, 0)) for total in totals.values()))
        table.add_section()
        for name, of in _TOTALS.items():
            table.add_row(name, *(str(of(found)) for found in ways.values()))
        console.print(table)
    for way, found in ways.items():
        table = Table("forward + backward", "kind", "where", "operations", title=way)
        for row in [row for row in found["places"] if row["kind"] not in FREE][:num_places]:
            numbers = f"{row['forward']} + {row['backward']}"
            table.add_row(numbers, row["kind"], row["where"], row["names"])
        console.print(table)


_TOTALS: dict[str, Callable[[dict[str, Any]], int]] = {
    "all launches": lambda found: found["launches_by_rank"][0],
    "profiler's events": lambda found: found["profiler_events"],
}


def summed(places: list[dict[str, Any]], key: str) -> dict[str, int]:
    """Numbers by part, of launches only, or by kind, of all."""
    found: Counter[str] = Counter()
    for row in places:
        if key == "kind" or row["kind"] not in FREE:
            found[row[key]] += row["forward"] + row["backward"]
    return dict(found.most_common())


if __name__ == "__main__":
    main()
