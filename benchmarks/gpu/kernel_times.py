"""Measures the kernels of a layer one by one, beside what the roofline model predicts. Run by
benchmarks/gpu; alone:

    python -m benchmarks.gpu.kernel_times [--out FOLDER]

Kernels of the 244M model's layers at 16,384 tokens in bfloat16, under a skewed routing: those of the
feed-forward's experts and of V and O, forward and backward, and some of the rest (a router, its
products in exact float32, residual and norm in one kernel, an addition to the residual, fused attention). torch's profiler says
how long each ran on the GPU, so launches do not count; ten calls, the median. A ratio far from 1 says
which line of planning/, or which figure of planning/hardware.py, is wrong on this GPU.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gpu.predicted import SEQ_LEN, layer_kernels
from benchmarks.kernels.problem import GPU_SETTINGS, SKEW, Setting, draw_choices
from benchmarks.report import RESULTS, save
from moebius.kernels.calls import LinearCall, MLPBank, MLPCall, SortedRoutes
from moebius.kernels.triton import backend
from moebius.kernels.triton import norm as norms
from moebius.kernels.triton.router import route_top_k
from moebius.kernels.triton.router_gradients import route_top_k_backward
from moebius.kernels.triton.routing import sort_routes
from moebius.model.config.model_config import ModelConfig
from moebius.model.routing import Routes, head_to_token_routes, token_routes, token_to_head_routes
from moebius.planning.dense_kernels import attention_kernels, residual_and_norm_kernels
from moebius.planning.hardware import Hardware, hardware_of_gpu
from moebius.planning.kernel import Shape
from moebius.planning.router_kernels import router_kernels
from moebius.train.recipes.smoke import RECIPES

TIMES = 10
DTYPE = torch.bfloat16
ALL = ""  # a phase whose kernels count together, whatever they are called
# Kernel functions of a phase, and what the model calls their launches, in order.
Names = Mapping[str, tuple[str, ...]]
Event = tuple[str, float]  # what ran on the GPU, in order: name, microseconds


@dataclass(frozen=True)
class Phase:
    """A call, and the kernels of it that have a prediction."""

    run: Callable[[], Any]
    names: Names


@dataclass(frozen=True)
class Measured:
    """One kernel, measured and predicted; without a prediction the catalogue lacks this GPU."""

    setting: str
    name: str
    measured_us: float
    predicted_us: float | None
    bound: str

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.predicted_us is None else self.measured_us / self.predicted_us


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: this script times nothing else")
    hardware = hardware_of_gpu(torch.cuda.get_device_name(0))
    found = [line for setting in ("244M", "244M attention") for line in measure(setting, hardware)]
    found += measure_dense(hardware)
    lines = [asdict(line) | {"ratio": line.ratio} for line in found]
    figures = {"hardware": None if hardware is None else hardware.name, "kernels": lines}
    print(save("gpu_kernels", figures, folder=options.out))
    Console(width=110).print(kernel_table(figures))


def kernel_table(figures: Mapping[str, Any]) -> Table:
    """What was saved, as a table: the kernels that are furthest from their prediction last."""
    table = Table(
        "kernel", "setting", "measured µs", "predicted µs", "measured ÷ predicted", "bound by"
    )
    for line in sorted(figures["kernels"], key=lambda line: line["ratio"] or 0.0):
        known = line["predicted_us"] is not None
        table.add_row(
            line["name"],
            line["setting"],
            f"{line['measured_us']:.1f}",
            f"{line['predicted_us']:.1f}" if known else "–",
            f"{line['ratio']:.2f}" if known else "–",
            line["bound"],
        )
    table.title = (
        f"kernels of the 244M model, predicted for {figures['hardware'] or 'no GPU of this kind'}"
    )
    return table


def measure(name: str, hardware: Hardware | None) -> list[Measured]:
    """All kernels of a layer of experts."""
    [setting] = [setting for setting in GPU_SETTINGS if setting.name == name]
    predicted = (
        {} if hardware is None else {k.name: k.time for k in layer_kernels(hardware, setting)}
    )
    found = []
    for phase in phases(setting):
        for kernel, microseconds in matched(profiled(phase.run), phase.names).items():
            time = predicted.get(kernel)
            expected, bound = (None, "") if time is None else (1e6 * time.seconds, time.bound)
            found.append(Measured(name, kernel, microseconds, expected, bound))
    return found


# What is run --------------------------------------------------------------------------------------


def phases(setting: Setting) -> list[Phase]:
    """Forward, backward of the rows, and weight gradients."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    choices = draw_choices(setting, SKEW, generator)
    experts, width, hidden = setting.num_experts, setting.d_model, setting.d_expert

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(DTYPE)

    x, w_up, w_down = (
        new(setting.tokens, width),
        new(experts, width, hidden),
        new(experts, hidden, width),
    )
    if setting.is_switchhead:
        into, out = choices
        to_heads = token_to_head_routes(
            into.experts_THK, into.gates_THK.detach(), num_experts=experts
        )
        to_tokens = head_to_token_routes(
            out.experts_THK, out.gates_THK.detach(), num_experts=experts
        )
        rows = new(setting.tokens * setting.heads, hidden)
        return [
            *_linear_phases("V", x, w_up, to_heads, rows),
            *_linear_phases("O", rows, w_down, to_tokens, x),
        ]
    [choice] = choices
    listed = token_routes(
        choice.experts_THK[:, 0], choice.gates_THK[:, 0].detach(), num_experts=experts
    )
    routes, bank = sorted_routes(listed), MLPBank(w_up, w_down, None, None, "relu")
    grad = new(setting.tokens, width)
    _, saved = backend.mlp_forward(x, bank, routes)
    *_, d_z = backend.mlp_backward_rows(grad, x, bank, routes, saved)
    calls = [MLPCall(grad, x, routes, saved, d_z, bank)]
    forward = {"gathered_activation": "K1", "rows_product": "K2", "_sum_equal": "Rd"}
    backward = {"gathered_hidden_gradient": "K1", "rows_product": "K2", "_sum_equal": "Rd"}
    return [
        Phase(lambda: sort_routes(listed.expert_N, experts), {ALL: ("sort by expert",)}),
        Phase(lambda: backend.mlp_forward(x, bank, routes), _named(forward, "forward")),
        Phase(
            lambda: backend.mlp_backward_rows(grad, x, bank, routes, saved),
            _named(backward, "backward"),
        ),
        Phase(lambda: backend.mlp_weight_gradients(calls), _gradients("K3 up", "K3 down")),
    ]


def _linear_phases(bank: str, x: Tensor, w: Tensor, listed: Routes, grad: Tensor) -> list[Phase]:
    routes = sorted_routes(listed)
    _, saved = backend.linear_forward(x, w, routes)
    calls = [LinearCall(grad, x, routes, w)]
    first = "gathered_gate" if bank == "V" else "rows_product"
    second = "rows_product" if bank == "V" else "gathered_input_gradient"
    forward = {first: f"{bank} {'K1' if bank == 'V' else 'K2'}", "_sum_equal": f"{bank} Rd"}
    backward = {second: f"{bank} {'K2' if bank == 'V' else 'K1'}", "_sum_equal": f"{bank} Rd"}
    return [
        Phase(lambda: backend.linear_forward(x, w, routes), _named(forward, "forward")),
        Phase(
            lambda: backend.linear_backward_rows(grad, x, w, routes, saved),
            _named(backward, "backward"),
        ),
        Phase(lambda: backend.linear_weight_gradients(calls), _gradients(f"{bank} K3")),
    ]


def _named(kernels: Mapping[str, str], direction: str) -> Names:
    return {function: (f"{name} {direction}",) for function, name in kernels.items()}


def _gradients(*matrices: str) -> Names:
    return {
        "_list_rows": tuple(f"{name} addresses" for name in matrices),
        "ragged_product": matrices,
        "_add_chunks": tuple(f"{name} later chunks" for name in matrices),
    }


def sorted_routes(listed: Routes) -> SortedRoutes:
    """What a backend gets of a list of routes whose sources and targets follow a rule."""
    sorting = listed.sorting
    return SortedRoutes(
        listed.weight_N,
        sorting.order_N,
        sorting.place_N,
        sorting.starts_E1,
        None,
        None,
        listed.num_targets,
        listed.per_source,
        listed.per_target,
        0,
    )


def measure_dense(hardware: Hardware | None) -> list[Measured]:
    """Some kernels of the rest of a step, by the names that the model has for them."""
    model = RECIPES["moeut_244m"]().model
    tokens = GPU_SETTINGS[0].tokens
    predicted = {}
    if hardware is not None:
        shape = Shape(model, tokens, SEQ_LEN)
        kernels = [
            *attention_kernels(hardware, shape),
            *residual_and_norm_kernels(hardware, shape, has_experts=True),
            *router_kernels(hardware, shape, shape.choice),
        ]
        kernels.sort(key=lambda kernel: kernel.forward)  # of one name the forward pass's stays
        predicted = {kernel.name: kernel.time for kernel in kernels}
    found = []
    for phase in dense_phases(model, tokens, "cuda"):
        for name, microseconds in matched(profiled(phase.run), phase.names).items():
            time = predicted.get(name)
            expected, bound = (None, "") if time is None else (1e6 * time.seconds, time.bound)
            found.append(Measured("dense rest", name, microseconds, expected, bound))
    return found


def dense_phases(model: ModelConfig, tokens: int, device: str) -> list[Phase]:
    """A router, the two norms of a layer, what is added after it, fused attention."""
    width, attention, experts = model.d_model, model.attention, model.experts
    assert experts is not None
    heads, channels, sequences = attention.num_heads, attention.d_head, tokens // SEQ_LEN
    top_k = int(experts.router.active_experts(experts.num_experts, sequence_rows=1))
    x = torch.randn(tokens, width, device=device)
    y, weight = x.to(DTYPE), torch.randn(experts.num_experts, width, device=device)
    grad_logits = torch.randn(tokens, experts.num_experts, device=device)
    experts_THK = grad_logits.topk(top_k).indices[:, None]
    gates_THK = torch.rand(experts_THK.shape, device=device)
    q, k, v = (
        torch.randn(sequences, heads, SEQ_LEN, channels, device=device).to(DTYPE) for _ in range(3)
    )
    statistics = (x.mean(1), x.var(1).rsqrt())
    parameters = (torch.empty_like(weight[0]), torch.empty_like(weight[0]))
    # what kernels write; outputs of one kernel apart, as in a step
    rows, more_rows, low, more_low = (torch.empty_like(like) for like in (x, x, y, y))
    made = (torch.empty_like(statistics[0]), torch.empty_like(statistics[1]))

    def whole(name: str, run: Callable[[], Any]) -> Phase:
        return Phase(run, {ALL: (name,)})

    def norm(added: Tensor | None, outputs: tuple[Tensor | None, ...]) -> Callable[[], None]:
        return lambda: norms.add_norm(x, added, weight[0], weight[1], 1e-5, outputs, made)

    def norm_backward(
        copies: tuple[Tensor | None, ...], added: Tensor | None
    ) -> Callable[[], None]:
        return lambda: norms.add_norm_backward(
            *(x, weight[0], statistics, (x, x, *copies), (rows, added), parameters),
            second_is_normed=False,
        )

    return [
        Phase(
            lambda: route_top_k(x, weight, None, top_k=top_k, heads=1, gate="sigmoid"),
            {"_split": ("split of the weights",), "route": ("logits, top-k and gates",)},
        ),
        Phase(
            lambda: route_top_k_backward(
                *(x, weight, (experts_THK, gates_THK, None), (grad_logits, gates_THK)),
                gate="sigmoid",
                wants=(True, True),
            ),
            {
                "logit_gradient": ("gradient of logits",),
                "row_gradient": ("gradient of rows",),
                "weight_gradient": ("gradient of weights",),
            },
        ),
        whole("norm and casts", norm(None, (None, rows, low, more_low))),
        whole("norm and casts, backward", norm_backward((y, y), None)),
        whole("residual, norm and casts", norm(y, (rows, more_rows, None, low))),
        whole("residual, norm and casts, backward", norm_backward((None, y), low)),
        whole("add to the residual", lambda: x + y),
        whole(
            "scores and values, fused",
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
    ]


# What the profiler says ---------------------------------------------------------------------------


def profiled(run: Callable[[], Any]) -> list[Event]:
    """What ran on the GPU in `TIMES` calls, in order."""
    run()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(TIMES):
            run()
        torch.cuda.synchronize()
    events = [event for event in profile.events() or () if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def matched(events: Sequence[Event], names: Names, times: int = TIMES) -> dict[str, float]:
    """Microseconds of each kernel that was wanted: the median of its calls.

    Raises:
        ValueError: some kernel did not run as often as its names say.
    """
    if ALL in names:
        [name] = names[ALL]
        if not events:
            raise ValueError(
                f"{name}: the profiler saw nothing on the GPU; are its events allowed here?"
            )
        return {name: sum(microseconds for _, microseconds in events) / times}
    found = {}
    for function, wanted in names.items():
        spans = [microseconds for name, microseconds in events if name == function]
        if len(spans) != times * len(wanted):
            raise ValueError(
                f"{function} ran {len(spans)} times in {times} calls, not {len(wanted)} times in each; "
                f"the profiler saw {sorted({name for name, _ in events})}"
            )
        for place, name in enumerate(wanted):
            found[name] = statistics.median(spans[place :: len(wanted)])
    return found


if __name__ == "__main__":
    main()
