"""A step's statistics: sums over micro-batches on every rank, and one reduction.

train/metrics/log.py writes the numbers.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.dispatch.exchange import Counters, hottest_factor
from ...distributed.process.process import Process
from ...model.cost import PEAKS, forward_flops
from ...model.execution.precision import products_dtype
from ..config.run_config import Config
from ..loss import MicroBatchLoss

LOAD_KINDS = ("feed_forward", "value", "output", "attention")
# of `Counters`
_SUMMED = ("rows_sent", "rows_one_per_route", "bytes_intra_node", "bytes_inter_node", "waited_s")


class StepMeter:
    """Sums the reports of one step's micro-batches on the device until `reduce`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._carried: dict[str, Tensor] = {}
        self._exchanges: dict[str, Counters] = {}

    def add(self, result: MicroBatchLoss) -> None:
        """Adds the report of one micro-batch."""
        values = {"loss": result.cross_entropy, "regularisation": result.regularisation}
        values |= {f"auxiliary/{name}": value for name, value in result.auxiliary.items()}
        for kind, load in result.loads.items():
            values[f"{kind}/load"], values[f"{kind}/wanted"] = load.load_LN, load.wanted_L
            values[f"{kind}/gates"] = load.gate_sum_L
        _accumulate(self._sums, values)
        _accumulate(self._carried, result.carried)

    def loads(self) -> dict[str, Tensor]:
        """Returns how many of this rank's routes went to each expert, (L, E) by kind of router."""
        return {
            kind: self._sums[f"{kind}/load"] for kind in LOAD_KINDS if f"{kind}/load" in self._sums
        }

    def count_exchanges(self, before: dict[str, Counters], after: dict[str, Counters]) -> None:
        """Records the step's exchanges by sparse layer, from counters before and after."""
        self._exchanges = {name: counters.since(before[name]) for name, counters in after.items()}

    @property
    def loss(self) -> Tensor:
        """Returns this rank's part of the step's loss; the loss is the sum over ranks."""
        return self._sums["loss"]

    @property
    def waited_s(self) -> float:
        """Returns how long this rank waited for the step's exchanges."""
        return sum(counters.waited_s for counters in self._exchanges.values())

    def reduce(self, **scalars: float) -> dict[str, Tensor]:
        """Sums the reports and the given scalars over all ranks; a collective call.

        Returns:
            The sums, float64, on the CPU.
        """
        values = self._sums | {
            name: torch.tensor(float(value), dtype=torch.float64) for name, value in scalars.items()
        }
        for name, counters in self._exchanges.items():
            values[f"exchange/{name}"] = torch.tensor(
                [getattr(counters, each) for each in _SUMMED], dtype=torch.float64
            )
            served_P = torch.zeros(dist.get_world_size())
            served_P[dist.get_rank()] = counters.routes_served
            values[f"served/{name}"] = served_P
        return {
            name: total.cpu()
            for name, total in _sum_over_ranks(values, self._sums["loss"].device).items()
        }

    def reduce_carried(self) -> dict[str, Tensor]:
        """Sums the routers' carried statistics over all ranks, in float64.

        A collective call if any router carries something.
        """
        return _sum_over_ranks(self._carried, self._sums["loss"].device) if self._carried else {}


class StepClock:
    """Measures the time of steps between log lines, without evaluations.

    It includes everything that runs beside a step. `waited_s` is how long the data loader says this
    rank has waited.
    """

    def __init__(self, *, waited_s: float = 0.0) -> None:
        self._started_s = time.perf_counter()
        self._waited_s = waited_s
        self._num_steps = 0

    def count_step(self) -> None:
        """Adds one to the number of steps that `read` averages over."""
        self._num_steps += 1

    def read(self, *, waited_s: float) -> tuple[float, float]:
        """Returns the seconds per step, and how many of them this rank waited for data."""
        steps = max(self._num_steps, 1)
        elapsed_s = time.perf_counter() - self._started_s
        return elapsed_s / steps, (waited_s - self._waited_s) / steps


def peak_tokens_per_s(config: Config, process: Process) -> float | None:
    """Returns all ranks' tokens/s at an MFU of 1; None if rank 0's GPU is unknown, or loops grow."""
    if process.device.type != "cuda" or config.model.loops.depth.kind == "growing":
        return None
    peaks = PEAKS.get(torch.cuda.get_device_name(process.device))
    if peaks is None:
        return None
    peak = peaks[products_dtype(config.train.precision) == torch.float32]
    return process.world_size * peak / forward_flops(config.model, config.data.seq_len).training


def _accumulate(sums: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Adds values to the sums of their names, in one launch for each dtype."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, value in values.items():
        if name in sums:
            by_dtype.setdefault(value.dtype, []).append(name)
        else:
            sums[name] = value
    for names in by_dtype.values():
        added = torch._foreach_add(  # pyright: ignore[reportPrivateImportUsage]
            [sums[name] for name in names], [values[name] for name in names]
        )
        sums.update(zip(names, added, strict=True))


def _sum_over_ranks(values: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Sums all values over the ranks in one all-reduce, in float64."""
    flat = torch.cat([value.to(device, torch.float64).reshape(-1) for value in values.values()])
    dist.all_reduce(flat)
    parts = flat.split([value.numel() for value in values.values()])
    return {name: part.view(values[name].shape) for name, part in zip(values, parts, strict=True)}


def expert_metrics(sums: dict[str, Tensor]) -> dict[str, Any]:
    """Returns load statistics per depth step, for every kind of router in the step.

    Plain names for the feed-forward, with the kind as prefix for others: `expert_load` (fraction of
    the routes), `max_violation` (largest load over mean load, minus 1), `effective_experts` (exp of
    the load's entropy), `gate_mean`, and `drop_fraction` if a capacity refused routes.
    `auxiliary_losses` has every auxiliary loss without its coefficient.
    """
    record: dict[str, Any] = {}
    auxiliary = {
        name.removeprefix("auxiliary/"): value
        for name, value in sums.items()
        if name.startswith("auxiliary/")
    }
    if auxiliary:
        record["auxiliary_losses"] = {
            name: round(value.item(), 6) for name, value in auxiliary.items()
        }
    for kind in LOAD_KINDS:
        if f"{kind}/load" not in sums:
            continue
        load_LN = sums[f"{kind}/load"]
        served_L, wanted_L = load_LN.sum(1), sums[f"{kind}/wanted"]
        fraction_LN = load_LN / served_L.clamp_min(1)[:, None]
        prefix = "" if kind == "feed_forward" else f"{kind}_"
        record[f"{prefix}expert_load"] = _rounded(fraction_LN)
        # a depth step that no token reaches has no violation and no expert
        used_L = (served_L > 0).double()
        record[f"{prefix}max_violation"] = _rounded(
            (fraction_LN.amax(1) * fraction_LN.shape[1] - 1) * used_L
        )
        record[f"{prefix}effective_experts"] = _rounded(
            torch.special.entr(fraction_LN).sum(1).exp() * used_L
        )
        record[f"{prefix}gate_mean"] = _rounded(sums[f"{kind}/gates"] / served_L.clamp_min(1))
        if bool((served_L < wanted_L).any()):
            record[f"{prefix}drop_fraction"] = _rounded(1 - served_L / wanted_L)
    return record


def exchange_metrics(sums: dict[str, Tensor], *, ep: int, on_host: bool) -> dict[str, Any]:
    """Returns a step's expert traffic by "group member/kind"; empty without expert parallelism.

    Sums over all ranks, micro-batches and depth steps, of forward passes: `rows_sent`,
    `rows_one_per_route` (the traffic of `alltoall`), `bytes_intra_node`, `bytes_inter_node`; a row
    that stays on its rank counts no bytes. `waited_s`: how long hosts waited for exchanges and
    counts, backward included; only `on_host`, because a GPU run's host clock sees only its queue.
    `hottest_rank`: the busiest rank's served routes over the mean of its EP group, in the worst EP
    group.
    """
    found = {}
    for name in (name.removeprefix("exchange/") for name in sums if name.startswith("exchange/")):
        figures = dict(zip(_SUMMED, sums[f"exchange/{name}"].tolist(), strict=True))
        found[_member_and_kind(name)] = {
            **{each: int(figures[each]) for each in _SUMMED[:-1]},
            **({"waited_s": round(figures["waited_s"], 5)} if on_host else {}),
            # ep is the innermost axis: an EP group's ranks are neighbours
            "hottest_rank": round(hottest_factor(sums[f"served/{name}"].view(-1, ep)), 5),
        }
    return {"exchange": found} if found else {}


def _member_and_kind(layer: str) -> str:
    """Returns a layer's short name in the log.

    `group.0.feed_forward.sparse` is "0/feed_forward", `group.0.attention.value` "0/value".
    """
    _, member, *path = layer.split(".")
    return f"{member}/{[part for part in path if part != 'sparse'][-1]}"


def _rounded(values: Tensor) -> list[Any]:
    """Rounds to five decimals, which keeps 387 experts × 18 steps to 60 kB instead of 140."""
    return torch.round(values.double(), decimals=5).tolist()
