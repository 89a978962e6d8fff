"""What the roofline model (planning/roofline.py) says of the layers and steps that are measured here,
for the table in docs/kernels.md and beside the measurements:

    python -m benchmarks.gpu.predicted    writes the table between its marks

A layer is one of benchmarks/kernels/problem.py's settings, forward and backward, under its skewed
routing. A step is forward, loss, backward and AdamW of 16 sequences of 1,024 tokens; beside it stands
the time that the host needs to launch its operations, and the longer of both is what is predicted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.kernels.problem import GPU_SETTINGS, SKEW, Setting
from benchmarks.report import ROOT
from moebius.model.config.model_config import ModelConfig
from moebius.model.cost import count_parameters
from moebius.planning.cost_model import OPTIMIZER_PASSES_BYTES
from moebius.planning.expert_kernels import ExpertCall, route_sorting
from moebius.planning.hardware import HARDWARE, Hardware
from moebius.planning.kernel import Kernel, Shape, product
from moebius.planning.kernel_times import step_kernels
from moebius.planning.rank_kernels import kernel_launches
from moebius.planning.roofline import Precision, stream_time
from moebius.planning.sparse_kernels import (
    feed_forward_kernels,
    linear_gradient_kernels,
    linear_kernels,
    mlp_gradient_kernels,
)
from moebius.train.recipes.smoke import RECIPES

PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- predicted -->", "<!-- end -->"
SHOWN = ("h100", "h200")
TOKENS, SEQ_LEN = 16384, 1024
PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of a step on the device, and of launching it."""

    device_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        """The longer of both."""
        return max(self.device_s, self.host_s)


def layer_kernels(hardware: Hardware, setting: Setting, dtype: str = "bfloat16") -> list[Kernel]:
    """The kernels of a layer of experts: one call forward, one backward, with its own K3.

    Outside of a model, where no pass spans several calls, K3 adds to zeros.
    """
    call = expert_call(setting, dtype)
    weights = 2 * call.experts * call.wide * call.narrow * call.element
    zeros = Kernel(
        "weights", "zeros for the gradients", False, stream_time(hardware, weights, launches=2)
    )
    if setting.is_switchhead:
        found = [zeros]
        for bank in ("V", "O"):
            found += [_sorting(hardware, call, bank), *linear_kernels(hardware, call, bank)]
            found += linear_gradient_kernels(hardware, call, bank, 1)
        return found
    found = [zeros, _sorting(hardware, call, ""), *feed_forward_kernels(hardware, call)]
    return [*found, *mlp_gradient_kernels(hardware, call, 1)]


def _sorting(hardware: Hardware, call: ExpertCall, bank: str) -> Kernel:
    name = f"{bank} sort by expert".strip()
    return Kernel("routing", name, True, route_sorting(hardware, call.routes))


def expert_call(setting: Setting, dtype: str = "bfloat16") -> ExpertCall:
    """A use of a setting's bank. The loads of a skewed router vary by about as much as its logits."""
    tokens = setting.tokens
    return ExpertCall(
        setting.routes,
        setting.num_experts,
        setting.d_model,
        setting.d_expert,
        tokens,
        tokens * setting.heads,
        PRECISIONS[dtype],
        SKEW,
    )


def dense_kernels(
    hardware: Hardware, tokens: int, width: int, hidden: int, dtype: str
) -> list[Kernel]:
    """The products of a dense feed-forward, forward and backward, and its activation's passes."""
    precision = PRECISIONS[dtype]
    sides = {
        "up": (tokens, hidden, width),
        "down": (tokens, width, hidden),
        "down, gradient of rows": (tokens, hidden, width),
        "up, gradient of rows": (tokens, width, hidden),
        "up, gradient of weights": (width, hidden, tokens),
        "down, gradient of weights": (hidden, width, tokens),
    }
    found = [product(hardware, "dense", name, side, precision) for name, side in sides.items()]
    element = 2 if precision == "bf16" else 4
    bytes_of = {"activation": 2, "activation's backward pass": 3}
    return found + [
        Kernel("dense", name, True, stream_time(hardware, passes * tokens * hidden * element))
        for name, passes in bytes_of.items()
    ]


def predicted_ms(hardware: Hardware, setting: Setting, contender: str, dtype: str) -> float | None:
    """Milliseconds of one of expert_layer.py's contenders; None: the model does not know it."""
    if contender == "ours: triton":
        return milliseconds(layer_kernels(hardware, setting, dtype))
    if setting.is_switchhead:
        return None
    widths = {"dense baseline": setting.d_dense, "dense, equal MACs": setting.active_width}
    hidden = widths.get(contender)
    if hidden is None:
        return None
    return milliseconds(dense_kernels(hardware, setting.tokens, setting.d_model, hidden, dtype))


def milliseconds(kernels: Iterable[Kernel]) -> float:
    return 1e3 * sum(kernel.seconds for kernel in kernels)


def step_prediction(
    hardware: Hardware,
    model: ModelConfig,
    *,
    tokens: int = TOKENS,
    seq_len: int = SEQ_LEN,
    precision: str = "bfloat16",
) -> StepPrediction:
    """Forward, loss, backward and optimizer of one rank that has the whole model."""
    kernels = step_kernels(hardware, Shape(model, tokens, seq_len, precision, spread=SKEW))
    weights = count_parameters(model, seq_len).total
    optimizer = OPTIMIZER_PASSES_BYTES * weights / hardware.memory_bandwidth
    return StepPrediction(
        sum(kernel.seconds for kernel in kernels) + optimizer,
        kernel_launches(kernels) * hardware.launch_s,
    )


# The table in the documents -----------------------------------------------------------------------


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(page: str) -> str:
    """The page with the table as the model has it now."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE.name} has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    """Predictions for each GPU, each beside an empty cell."""
    heads = " | ".join(f"{name.upper()} predicted | measured" for name in SHOWN)
    lines = [f"| | {heads} |", "|---" * (1 + 2 * len(SHOWN)) + "|"]
    return "\n".join([*lines, *_layer_rows(), *_step_rows()])


def _layer_rows() -> list[str]:
    rows = []
    settings = {setting.name: setting for setting in GPU_SETTINGS}
    for name, title in (
        ("244M", "a layer's feed-forward experts"),
        ("244M attention", "V and O of a layer"),
    ):
        of_gpu = [layer_kernels(HARDWARE[gpu], settings[name]) for gpu in SHOWN]
        rows += [_row(f"**{title}**", [f"**{milliseconds(found):.2f} ms**" for found in of_gpu])]
        for alike in zip(*of_gpu, strict=True):
            if max(kernel.seconds for kernel in alike) > 10e-6:
                words = [f"{1e6 * k.seconds:.0f} µs, {k.time.bound}" for k in alike]
                rows.append(_row(alike[0].name, words))
    deferred = [_deferred_ms(HARDWARE[gpu], settings["244M"]) for gpu in SHOWN]
    rows.append(
        _row("the feed-forward with K3 over 9 repeats at once", [f"{ms:.2f} ms" for ms in deferred])
    )
    for contender, title in (
        ("dense baseline", "the dense baseline's feed-forward (d_ff 4110)"),
        ("dense, equal MACs", "a dense feed-forward of equal work"),
    ):
        times = [
            predicted_ms(HARDWARE[gpu], settings["244M"], contender, "bfloat16") for gpu in SHOWN
        ]
        rows.append(_row(title, [f"{ms:.2f} ms" for ms in times if ms is not None]))
    return rows


def _deferred_ms(hardware: Hardware, setting: Setting, repeats: int = 9) -> float:
    call = expert_call(setting)
    own = milliseconds(
        k for k in layer_kernels(hardware, setting) if not k.name.startswith("zeros")
    )
    once, together = (
        milliseconds(mlp_gradient_kernels(hardware, call, uses)) for uses in (1, repeats)
    )
    return own - once + together / repeats


def _step_rows() -> list[str]:
    models = {name: RECIPES[name]().model for name in ("moeut_244m", "dense_244m")}
    found = {
        name: [step_prediction(HARDWARE[gpu], model) for gpu in SHOWN]
        for name, model in models.items()
    }
    rows = [
        _row(
            f"**a step of `{name}`**, on the device",
            [f"**{1e3 * step.device_s:.0f} ms**" for step in steps],
        )
        for name, steps in found.items()
    ]
    rows += [
        _row(
            f"a step of `{name}`, launched by the host",
            [f"{1e3 * step.host_s:.0f} ms" for step in steps],
        )
        for name, steps in found.items()
    ]
    ratios = [
        f"{ours.seconds / dense.seconds:.2f}" for ours, dense in zip(*found.values(), strict=True)
    ]
    return [*rows, _row("MoEUT ÷ dense", ratios)]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(f"{cell} | –" for cell in cells) + " |"


if __name__ == "__main__":
    main()
