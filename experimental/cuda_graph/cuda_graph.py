"""A micro-batch's forward and backward pass as one CUDA graph (`train.cuda_graph`).

A pass of MoEUT is some thousands of kernels, and the host needs some 15 µs for each: where
micro-batches are small the GPU waits for it. A graph is one launch. It repeats what was once
launched, at the same addresses: so tokens are copied to where the captured pass read them, its
gradients are added to tensors that stay, and what it reports is copied away before the next replay.

Only a pass that launches the same whatever the values can be captured (`reason_against`). The first
micro-batches run as before, so that kernels are compiled and tables made before the capture; later
ones that are not like the captured one (another shape, a loss mask, a step whose routes are
recorded) do so, too. Never run on a GPU: tested with a stand-in that repeats the work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from moebius.distributed.layout import Layout
from moebius.kernels.backend import defers
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config
from moebius.train.loss import MicroBatchLoss
from moebius.train.micro_batches import MicroBatch

_WARM_UP = 3  # micro-batches: torch's advice for a pass with a backward
Work = Callable[[Tensor, Tensor], MicroBatchLoss]


class GraphDriver(Protocol):
    """Captures work on a device, and repeats it."""

    def warm_up(self, work: Callable[[], MicroBatchLoss]) -> MicroBatchLoss:
        """Does the work as it is, where a capture would do it."""
        ...

    def capture(
        self, work: Callable[[], MicroBatchLoss]
    ) -> tuple[MicroBatchLoss, Callable[[], None]]:
        """Captures the work without doing it.

        Returns:
            What it returned, which has values after a replay; and what replays it.
        """
        ...


class CudaDriver:
    """CUDA's."""

    def warm_up(self, work: Callable[[], MicroBatchLoss]) -> MicroBatchLoss:
        """Does the work on a stream beside the current one, as torch wants it before a capture."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = work()
        current.wait_stream(stream)
        return result

    def capture(
        self, work: Callable[[], MicroBatchLoss]
    ) -> tuple[MicroBatchLoss, Callable[[], None]]:
        """Captures the work; other threads (NCCL's, a checkpoint's) may go on meanwhile.

        Raises:
            RuntimeError: it cannot be captured; with torch's own words.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = work()
        except RuntimeError as error:
            raise RuntimeError(
                f"the pass could not be captured in a CUDA graph: {error}; set "
                "train.cuda_graph=false"
            ) from error
        return result, graph.replay


@dataclass(frozen=True)
class _Captured:
    """A captured pass: where it reads its tokens, and what it reports there."""

    inputs_BS: Tensor
    targets_BS: Tensor
    result: MicroBatchLoss
    replay: Callable[[], None]


class MicroBatchGraph:
    """Runs micro-batches of one rank, and from the fourth on by replays of one graph.

    Their gradients are added to the parameters' `grad`, which stay the same tensors over all steps;
    memory: those of one model, beside the graph's own activations.
    """

    def __init__(self, parameters: Sequence[Parameter], driver: GraphDriver) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._driver = driver
        self._warmed_up = 0
        self._captured: _Captured | None = None

    def begin_step(self) -> None:
        """Makes all gradients zero, in place."""
        torch._foreach_zero_(self._gradients)  # pyright: ignore[reportPrivateImportUsage]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def fits(self, micro_batch: MicroBatch) -> bool:
        """Returns whether a micro-batch can be run by it: every token counts, none is padding, and
        it is of the shape of those before.
        """
        is_plain = micro_batch.loss_mask_BS is None and micro_batch.documents is None
        captured = self._captured
        return is_plain and (
            captured is None or captured.inputs_BS.shape == micro_batch.inputs_BS.shape
        )

    def run(self, work: Work, micro_batch: MicroBatch) -> MicroBatchLoss:
        """Does what `work`, the forward and backward pass, does for a micro-batch that fits.

        `work` must be the same at every call: it is called for the first ones only.
        """
        if self._warmed_up < _WARM_UP:
            self._warmed_up += 1
            return self._driver.warm_up(lambda: work(micro_batch.inputs_BS, micro_batch.targets_BS))
        if self._captured is None:
            inputs_BS, targets_BS = (
                tokens_BS.clone(memory_format=torch.contiguous_format)
                for tokens_BS in (micro_batch.inputs_BS, micro_batch.targets_BS)
            )
            captured = self._driver.capture(lambda: work(inputs_BS, targets_BS))
            self._captured = _Captured(inputs_BS, targets_BS, *captured)
        self._captured.inputs_BS.copy_(micro_batch.inputs_BS)
        self._captured.targets_BS.copy_(micro_batch.targets_BS)
        self._captured.replay()
        return _copied(self._captured.result)


def _copied(value: Any) -> Any:
    """Copies all tensors of a record, out of the way of the next replay."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(
            **{each.name: _copied(getattr(value, each.name)) for each in fields(value)}
        )
    return value


def is_static(router: Any) -> bool:
    """Returns whether a router's training pass launches the same kernels at every step and for all rows.

    What depends on the step's number, on values that the host reads, or on sums that other
    micro-batches left, would be repeated wrongly.
    """
    draws = {
        "sigmoid": bool(router.expert_dropout) if router.kind == "sigmoid" else True,
        "token_choice": bool(router.jitter) if router.kind == "token_choice" else True,
        "cosine": False,
        "deepseek": False,
    }
    drops = getattr(router, "capacity_factor", None) is not None
    drops = drops or getattr(router, "random_second", False)
    return not (draws.get(router.kind, True) or drops or router.balance_scope == "global_batch")


def reason_against(
    config: Config, model: Transformer, layout: Layout, *, backend: str, device: torch.device
) -> str | None:
    """Says why a run's passes cannot be captured; None where they can.

    `backend`: of the experts' products, as it was resolved.
    """
    has_routers = any(True for _ in model.routers())
    changing = [
        f"{kind} ({router.config.kind})"
        for _, kind, router in model.routers()
        if not is_static(router.config)
    ]
    reasons = {
        f"it is for GPUs, and the run is on {device.type}": device.type != "cuda",
        f"mesh.ep={layout.ep}: ranks exchange rows within a pass": layout.ep > 1,
        f"mesh.sharding={config.mesh.sharding!r} gathers weights within a pass": (
            config.mesh.sharding != "none"
        ),
        f"kernels.backend is {backend!r}, which may read on the host; it wants triton": (
            has_routers and not defers(backend)
        ),
        f"train.recompute={config.train.recompute!r} reads random states within a pass": (
            config.train.recompute != "none"
        ),
        "train.compile=true has graphs of its own": config.train.compile,
        "model.halting: how many tokens go on is read on the host": model.halting is not None,
        f"what these routers do depends on the step or on values: {', '.join(changing)}": bool(
            changing
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
