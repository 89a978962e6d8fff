"""A micro-batch's forward and backward pass as one CUDA graph (`train.cuda_graph`).

A step of MoEUT is some two thousand launches, and the host needs longer for them than the GPU. A graph
is one launch. It repeats what was captured, at the same addresses and without any Python of the pass:

    inputs       tokens and draws are copied to where the captured pass read them
    gradients    stay in the same tensors over all steps (`GradientReducer.zero_in_place`)
    reports      are copied away before the next replay overwrites them
    form         whatever changes the launches; each form has its own graph, captured after one eager
                 pass, which compiles kernels and fills caches

Only passes that launch the same whatever the values are captured (`reason_against`). Micro-batches
with a loss mask or documents run eagerly, as do those of more than four forms. Cost: the graphs share
one pool, which keeps the activations of the largest form between steps; gradients are kept, too.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data_pipeline.words import some_of
from ..distributed.dispatch.choose import dispatcher_of
from ..distributed.gradients import GradientReducer
from ..distributed.layout import Layout
from ..distributed.placement.replicas import CopyReducer
from ..model.loops.steps import PassOptions
from ..model.routers.router import Router
from ..model.routers.table import ROUTERS
from ..model.transformer import Transformer
from ..plugins import is_own
from .config.run_config import Config, ConfigError
from .loss import MicroBatchLoss
from .micro_batches import MicroBatch

logger = logging.getLogger(__name__)

_MOST_FORMS = 4
Pass = Callable[[], MicroBatchLoss]
LossOf = Callable[..., MicroBatchLoss]  # micro_batch_loss of (micro-batch, options=…)
Reducer = GradientReducer | CopyReducer
Form = tuple[Any, ...]


class Passes:
    """Runs the forward and backward passes of one rank's micro-batches, here eagerly."""

    def begin_step(self, optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
        """Clears all gradients."""
        optimizer.zero_grad()

    def run(self, loss_of: LossOf, micro_batch: MicroBatch, options: PassOptions) -> MicroBatchLoss:
        """Adds a micro-batch's gradients to the parameters', and returns its reports."""
        result = loss_of(micro_batch, options=options)
        result.loss.backward()
        # A capture must not meet the autograd graph of a pass that ran on another stream.
        return replace(result, loss=result.loss.detach())


class CudaDriver:
    """Captures CUDA graphs on one side stream, into one pool of memory."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), None
        self._last: torch.cuda.CUDAGraph | None = None

    def warm_up(self, run: Pass) -> MicroBatchLoss:
        """Runs a pass on the side stream, whose workspaces and autograd nodes captures then share."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        return result

    def capture(self, run: Pass) -> tuple[MicroBatchLoss, Callable[[], None]]:
        """Captures a pass without doing its work; other threads (NCCL's, a checkpoint's) go on meanwhile.

        Returns:
            The pass's result, without values before a replay; and a function that replays it.

        Raises:
            RuntimeError: it cannot be captured. All gradients are as they were.
        """
        # After a failed capture the allocator still asks the graph which stream it was on.
        graph = self._last = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with (
            torch.cuda.stream(torch.cuda.current_stream()),  # also after a failed capture
            # frees what eager passes have left in the cache, which would lie beside the pool
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            result = run()
        return result, graph.replay


@dataclass(frozen=True)
class _Captured:
    """A captured pass: the tensors that it reads anew in each replay, and those that it reports."""

    inputs: list[Tensor]
    result: MicroBatchLoss
    replay: Callable[[], None]

    def run(self, inputs: list[Tensor]) -> MicroBatchLoss:
        """Replays the pass with the values of other inputs; returns copies of its reports."""
        torch._foreach_copy_(self.inputs, inputs)  # pyright: ignore[reportPrivateImportUsage]
        self.replay()
        return _mapped(self.result, Tensor.clone)


class MicroBatchGraph(Passes):
    """Runs the micro-batches of one rank: each form eagerly once, and then by replays of its graph."""

    def __init__(
        self, model: Transformer, driver: CudaDriver, *, is_required: bool = False
    ) -> None:
        """Takes whether a pass that cannot be captured is an error; otherwise it runs eagerly."""
        self._model, self._driver, self._is_required = model, driver, is_required
        self._routers = [router for _, _, router in model.routers()]
        self._places: list[tuple[int, bool]] = []
        self._has_failed = False
        self.forget()

    def forget(self) -> None:
        """Forgets all captured passes, and frees their memory."""
        self._forms: dict[Form, _Captured | None] = {}  # None: run eagerly once

    def begin_step(self, optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
        """Makes all gradients zero, in place.

        Forgets all captured passes if a parameter, a gradient or a buffer is elsewhere than before,
        because experts have moved or the model was cast, or trains otherwise.
        """
        reducer.zero_in_place()
        if (places := list(self._where())) != self._places:
            self._places = places
            self.forget()

    def form_of(self, micro_batch: MicroBatch, options: PassOptions) -> Form:
        """Returns whatever changes the launches of a pass."""
        mixes = tuple(getattr(router, "mixes", None) for router in self._routers)  # transition.py
        shape = micro_batch.inputs_BS.shape, micro_batch.equal_rows
        return *shape, replace(options, draws=None), self._model.training, mixes

    def fits(self, micro_batch: MicroBatch, options: PassOptions) -> bool:
        """Returns whether a micro-batch can be captured: all its targets count, none is padding, and
        its form is one of the first.
        """
        is_plain = micro_batch.loss_mask_BS is None and micro_batch.documents is None
        if self._has_failed or not is_plain:
            return False
        return len(self._forms) < _MOST_FORMS or self.form_of(micro_batch, options) in self._forms

    def run(self, loss_of: LossOf, micro_batch: MicroBatch, options: PassOptions) -> MicroBatchLoss:
        """Runs a micro-batch's passes, or replays them.

        Raises:
            RuntimeError: they could not be captured, and must be.
        """
        eager = partial(super().run, loss_of)
        if not self.fits(micro_batch, options):
            return eager(micro_batch, options)
        form = self.form_of(micro_batch, options)
        if form not in self._forms:
            self._forms[form] = None
            return self._driver.warm_up(partial(eager, micro_batch, options))
        captured = self._forms[form]
        if captured is None:
            try:
                captured = self._forms[form] = self._capture(eager, micro_batch, options)
            except RuntimeError as error:
                self._fail(error)
                return eager(micro_batch, options)
        return captured.run(_tensors(micro_batch, options))

    def _capture(
        self,
        eager: Callable[[MicroBatch, PassOptions], MicroBatchLoss],
        micro_batch: MicroBatch,
        options: PassOptions,
    ) -> _Captured:
        micro_batch, options = _mapped(micro_batch, _cloned), _mapped(options, _cloned)
        result, replay = self._driver.capture(partial(eager, micro_batch, options))
        return _Captured(_tensors(micro_batch, options), _mapped(result, Tensor.detach), replay)

    def _fail(self, error: RuntimeError) -> None:
        """Gives up capturing, with a warning or, if capturing is required, an error."""
        words = f"a micro-batch could not be captured as a CUDA graph ({str(error).strip()})"
        if self._is_required:
            raise RuntimeError(f"{words}; set train.cuda_graph=false") from error
        logger.warning("%s; passes run eagerly from here on", words)
        self.forget()
        self._has_failed = True

    def _where(self) -> Iterator[tuple[int, bool]]:
        for parameter in self._model.parameters():
            yield parameter.data_ptr(), parameter.requires_grad
            if parameter.grad is not None:
                yield parameter.grad.data_ptr(), True
        for buffer in self._model.buffers():
            yield buffer.data_ptr(), False


def passes_of(
    config: Config, model: Transformer, layout: Layout, *, backend: str, device: torch.device
) -> Passes:
    """Returns the runner of a run's passes, which uses CUDA graphs wherever passes can be captured.

    Raises:
        ConfigError: `train.cuda_graph=true`, and they cannot be captured; on all ranks.
    """
    is_required = config.train.cuda_graph is True
    reason = reason_against(config, model, layout, backend=backend, device=device)
    if is_required and reason is not None:
        raise ConfigError(f"train.cuda_graph=true is impossible: {reason}; set it to auto or false")
    if reason is not None:
        return Passes()
    return MicroBatchGraph(model, CudaDriver(), is_required=is_required)


def reason_against(
    config: Config, model: Transformer, layout: Layout, *, backend: str, device: torch.device
) -> str | None:
    """Returns one clause on why a run's passes are not captured; None: they are.

    `backend`: of the experts' products, as it was resolved.
    """
    train, mesh, data, shape = config.train, config.mesh, config.data, config.model
    routers = [router for _, _, router in model.routers()]
    own = [*_own_parts(shape.model_dump()), *train.losses]
    reasons = (
        (train.cuda_graph is False, "train.cuda_graph=false"),
        (device.type != "cuda", f"the run is on {device.type}"),
        (layout.ep > 1 or dispatcher_of(model), "ranks exchange rows within a pass (mesh.ep)"),
        (mesh.sharding != "none", f"mesh.sharding={mesh.sharding} gathers weights within a pass"),
        (routers and backend != "triton", f"kernels.backend is {backend} instead of triton"),
        (train.compile, "train.compile=true may compile within a pass"),
        (own, f"what your own {some_of(own)} does is unknown"),
        (data.gives_document_ids, "documents and padding give every micro-batch other sizes"),
        (shape.halting, "model.halting reads on the host which tokens go on"),
        (shape.loops.depth.per == "sequence", "model.loops.depth.per=sequence changes sizes"),
    )
    found = next((reason for holds, reason in reasons if holds), None)
    return found or next((reason for each in routers if (reason := _reason_of(each, layout))), None)


def _reason_of(router: Router, layout: Layout) -> str | None:
    """Returns why a router's training pass does not launch the same at every step."""
    config, kind = router.config, f"the router {router.config.kind}"
    if type(router) not in ROUTERS.values():
        return f"what your own {type(router).__name__} does is unknown"
    if getattr(config, "capacity_factor", None) or getattr(config, "random_second", False):
        return f"{kind} reads on the host how many routes it serves"
    if layout.world_size > 1 and getattr(config, "balance_scope", None) == "global_batch":
        return f"{kind} sums over ranks within a pass (balance_scope)"
    return None


def _own_parts(value: Any) -> Iterator[str]:
    """Yields a configuration's names of a user's own parts."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _own_parts(each)
    elif isinstance(value, str) and is_own(value):
        yield value


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _tensors(*records: Any) -> list[Tensor]:
    """Returns the tensors of records in the order of their fields."""
    found: list[Tensor] = []
    for record in records:
        _mapped(record, lambda tensor: found.append(tensor) or tensor)
    return found


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a record with all its tensors changed, in records and dictionaries within it, too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {each.name: _mapped(getattr(value, each.name), change) for each in fields(value)}
        return replace(value, **changed)
    return value
