"""The kernels of a step: all of the model's work is in the list, and what must be monotone is."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moebius.cli.planning.plan_request import make_scenario
from moebius.kernels.fused import norm, rotary
from moebius.model import layers as model_layers
from moebius.model import residual
from moebius.model.config.model_config import ModelConfig
from moebius.model.cost import forward_flops
from moebius.model.execution.precision import enters_a_product, forward_in
from moebius.model.routers import router
from moebius.model.transformer import Transformer
from moebius.planning.cost_model import computation_s, host_s, predict
from moebius.planning.expert_kernels import chunk_rows
from moebius.planning.hardware import HARDWARE, find_hardware
from moebius.planning.kernel import Choice, Kernel, Shape
from moebius.planning.kernel_report import computation_line, kernel_lines, parts_of
from moebius.planning.kernel_times import layer_kernels, step_kernels, why_unknown
from moebius.planning.measured import read_kernel_ratios
from moebius.planning.prediction import LayoutCandidate, Scenario
from moebius.planning.rank_kernels import kernel_launches, rank_kernels, why_no_kernels
from moebius.planning.router_kernels import route_time, router_kernels
from moebius.planning.routing_skew import RoutingSkew, dirichlet_skew
from moebius.planning.workload import describe
from moebius.train.recipes.smoke import RECIPES

H100, H200, B200 = HARDWARE["h100"], HARDWARE["h200"], HARDWARE["b200"]
TRACED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_launches.json"
ALONE = LayoutCandidate(1, 1, 1, "none", "local")
KNOWN = ("moeut_44m", "moeut_244m", "moeut_1b", "dense_244m", "sigma_moe_244m", "smoke")


def model_of(name: str) -> ModelConfig:
    return RECIPES[name]().model


def seconds(kernels: Sequence[Kernel], *, part: str | None = None) -> float:
    return sum(kernel.seconds for kernel in kernels if part in (None, kernel.part))


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("deferred", [True, False])
def test_all_of_the_models_products_are_in_the_list(name: str, deferred: bool) -> None:
    """Three times the forward pass's FLOPs; fused attention does half of the scores and, backward,
    two and a half times as much again.
    """
    model, tokens = model_of(name), 8192
    assert why_unknown(model) is None
    kernels = step_kernels(H200, Shape(model, tokens, 1024, deferred=deferred))
    scores = sum(k.calls * k.flops for k in kernels if k.name.startswith("scores"))
    others = sum(k.calls * k.flops for k in kernels) - scores
    flops = forward_flops(model, 1024)
    assert others == pytest.approx(3 * tokens * (flops.forward - flops.attention_scores), rel=1e-6)
    assert scores == pytest.approx(3.5 / 2 * tokens * flops.attention_scores, rel=1e-6)


class _Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, but for products, experts, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        whole = str(func).removeprefix("aten.")
        name = whole.partition(".")[0]
        returns = func._schema.returns
        is_view = any(entry.alias_info and not entry.alias_info.is_write for entry in returns)
        skipped = ("mm", "addmm", "bmm", "_unsafe_view")
        priced_apart = (
            *("empty", "new_empty", "moebius.routed", "moebius.sort", "moebius.head_loss"),
            "moebius.route_top_k",
        )
        if not is_view and name not in skipped and not whole.startswith(priced_apart):
            tensors = tree_leaves((args, kwargs or {}, result))
            self.bytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return result


class _Fused(torch.autograd.Function):
    """Stands for fused attention, which passes over nothing."""

    @staticmethod
    def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(qkv[2])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(grads[0]) for _ in range(3))


def traffic(model: ModelConfig, repeats: int, sequences: int, seq_len: int) -> tuple[int, int]:
    """Bytes of a forward and of a backward pass on the meta device, in bfloat16."""
    with torch.device("meta"):
        deeper = model.changed({"num_layers": repeats * model.layers_per_group})
        built = Transformer(deeper, backend="segments")
        tokens = torch.zeros(sequences, seq_len, dtype=torch.int64)
        with _Traffic() as forward:
            output = forward_in(built, torch.bfloat16, tokens, targets_BS=tokens)
        with _Traffic() as backward:
            (output.read_out + output.regularisation_B.sum()).backward()
    return forward.bytes, backward.bytes


def weights_of(model: ModelConfig) -> int:
    """Numbers of the layers' matrices that a pass in low precision casts."""
    with torch.device("meta"):
        built = Transformer(model).group
    return sum(p.numel() for name, p in built.named_parameters() if enters_a_product(name))


@pytest.mark.parametrize("order", ["pre", "peri", "post"])
@pytest.mark.parametrize(("name", "repeats"), [("moeut_44m", (2, 3)), ("dense_44m", (1, 1))])
def test_the_list_moves_what_the_models_operations_move(
    name: str, repeats: tuple[int, int], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes over memory of a layer: whoever adds an operation to the model must list it."""
    model, sequences, seq_len = model_of(name).changed({"norm": order}), 8, 512
    if name == "dense_44m":  # its group is the whole model: compare with one of half the layers
        shallow, deep = (model.changed({"num_layers": n, "layers_per_group": n}) for n in (4, 8))
        layers = 4
    else:
        shallow = deep = model
        layers = model.layers_per_group
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, **_: _Fused.apply(q, k, v)
    )
    for module, name_of_check in (
        (residual, "runs_fused"),
        (norm, "runs_fused"),
        (router, "can_route"),
        (model_layers, "runs_fused"),
        (rotary, "runs_fused"),
    ):
        monkeypatch.setattr(module, name_of_check, lambda *_, **__: True)  # as on a GPU
    passes = (
        traffic(given, count, sequences, seq_len)
        for given, count in zip((shallow, deep), repeats, strict=True)
    )
    less, more = passes
    measured = [(b - a) / layers for a, b in zip(less, more, strict=True)]
    if name == "dense_44m":  # more layers are more weights, whose casts are of the step
        measured = [of_way - 6 * weights_of(model) / model.num_layers for of_way in measured]
    tokens, without_gaps = sequences * seq_len, replace(H200, kernel_gap_s=0.0)
    has_experts = model.experts is not None
    kernels = layer_kernels(without_gaps, Shape(model, tokens, seq_len), has_experts=has_experts)
    rate = H200.memory_bandwidth * H200.copy_ceiling
    ours = ("routing", "feed-forward experts", "V and O experts")
    listed = [
        rate
        * sum(k.seconds for k in kernels if k.forward is way and not k.flops and k.part not in ours)
        for way in (True, False)
    ]
    # inside operations that are priced apart
    inside = ("split of the weights", "gradient of logits", "gradient of weights, parts added")
    for place, way in enumerate((True, False)):
        listed[place] -= rate * sum(
            k.calls * k.time.seconds for k in kernels if k.name in inside and k.forward is way
        )
    assert listed == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", ["moeut_244m", "dense_244m"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_more_tokens_never_take_less(name: str, precision: str) -> None:
    times = [
        seconds(step_kernels(H200, Shape(model_of(name), tokens, 1024, precision, spread=0.5)))
        for tokens in range(1024, 65_537, 1024)
    ]
    assert times == sorted(times)


def test_no_kernel_beats_the_machine() -> None:
    """Neither its tensor cores nor, where all is read once, its memory."""
    for kernel in step_kernels(H100, Shape(model_of("moeut_244m"), 16384, 1024)):
        assert kernel.time.seconds >= 0
        if kernel.flops:
            assert kernel.flops / kernel.time.seconds <= H100.peak_bf16


def test_float32_is_slower_and_has_no_casts() -> None:
    low, full = (
        step_kernels(H200, Shape(model_of("moeut_244m"), 8192, 1024, precision))
        for precision in ("bfloat16", "float32")
    )
    assert seconds(full) > 2 * seconds(low)
    assert seconds(full, part="routers") == pytest.approx(seconds(low, part="routers"))
    assert not any(kernel.seconds for kernel in full if "cast of" in kernel.name)


def test_waiting_weight_gradients_are_cheaper_than_one_for_each_use() -> None:
    model = model_of("moeut_244m")
    once, each = (
        seconds(
            step_kernels(H200, Shape(model, 4096, 1024, deferred=deferred)),
            part="feed-forward experts",
        )
        for deferred in (True, False)
    )
    assert once < each


def test_models_whose_kernels_are_not_listed_say_so() -> None:
    assert why_unknown(model_of("sut")) == "attention of kind momha"
    assert why_unknown(model_of("soft_moe")) == "routers of kind soft_moe"
    assert why_unknown(model_of("switch")) == "routers with a capacity"
    with pytest.raises(
        ValueError, match="the list of kernels does not know attention of kind momha"
    ):
        step_kernels(H200, Shape(model_of("sut"), 1024, 256))


# In a plan ----------------------------------------------------------------------------------------


def scenario(name: str = "moeut_244m", tokens: int = 8192, **changes: object) -> Scenario:
    workload = describe(model_of(name), seq_len=1024)
    return replace(Scenario(workload, H200, tokens, RoutingSkew()), **changes)


def test_a_plan_computes_what_the_kernels_take() -> None:
    once = scenario()
    kernels = rank_kernels(once, ALONE)
    assert kernels is not None
    assert predict(once, ALONE).time.compute == pytest.approx(seconds(kernels))
    four = replace(once, micro_batches=4)
    assert sum(computation_s(four, ALONE)) == pytest.approx(4 * seconds(kernels))


def test_recomputation_runs_layers_forward_once_more() -> None:
    none, full = (
        rank_kernels(scenario(), replace(ALONE, recompute=name)) for name in ("none", "full")
    )
    assert none is not None
    assert full is not None
    assert seconds(full, part="head and loss") == seconds(none, part="head and loss")
    calls = {
        name: sum(k.calls for k in kernels if (k.name, k.forward) == ("K1 forward", True))
        for name, kernels in (("none", none), ("full", full))
    }
    assert calls == {"none": 18, "full": 36}
    assert seconds(full) > seconds(none)


def test_ranks_share_the_experts_and_the_hottest_has_more_rows() -> None:
    even, skewed = (scenario(skew=skew) for skew in (RoutingSkew(), dirichlet_skew(1.0)))
    spread = LayoutCandidate(1, 4, 4, "none", "dedup")
    part = "feed-forward experts"
    alone, shared, hot = (
        rank_kernels(given, layout, "p99")
        for given, layout in ((even, ALONE), (even, spread), (skewed, spread))
    )
    assert alone is not None
    assert shared is not None
    assert hot is not None
    assert seconds(shared, part=part) < seconds(alone, part=part)  # fewer weights are read
    assert seconds(hot, part=part) > 1.02 * seconds(shared, part=part)


def test_what_was_fitted_or_measured_goes_before_the_kernels(tmp_path: Path) -> None:
    given = scenario()
    assert why_no_kernels(given) is None
    assert rank_kernels(replace(given, hardware=B200), ALONE) is None
    assert "fitted to measured runs" in (why_no_kernels(replace(given, hardware=B200)) or "")
    file = tmp_path / "ours.toml"
    file.write_text('base = "h200"\nmatmul_efficiency = 0.5\n')
    assert rank_kernels(replace(given, hardware=find_hardware(str(file))), ALONE) is None
    file.write_text('base = "h200"\nl2_bandwidth = 7e12\n')
    faster = rank_kernels(replace(given, hardware=find_hardware(str(file))), ALONE)
    usual = rank_kernels(given, ALONE)
    assert faster is not None
    assert usual is not None
    assert seconds(faster) < seconds(usual)
    assert (
        why_no_kernels(scenario("sut"))
        == "the list of kernels does not know attention of kind momha"
    )


@pytest.mark.parametrize("name", ["moeut_244m", "dense_244m"])
def test_the_list_launches_what_a_traced_step_does(name: str) -> None:
    """Of benchmarks/gpu/launches.py, which traces the training step on a GPU that is not there."""
    traced = json.loads(TRACED.read_text(encoding="utf-8"))["recipes"][name]
    listed = kernel_launches(step_kernels(H200, Shape(model_of(name), 16384, 1024)))
    assert listed == pytest.approx(traced["launches_planned"], abs=0.1)
    assert listed == pytest.approx(traced["launches"], rel=0.05)
    expected = traced["launches"] * H200.launch_s
    assert traced["host_ms_predicted"] == pytest.approx(1e3 * expected, rel=1e-2)


def test_a_router_reads_its_rows_once_for_every_tile_of_experts() -> None:
    """By hand: a wave of 128 programs, whose 64 MiB of rows do not stay in the cache."""
    one, four = (route_time(H200, 16384, 1024, Choice(experts, 1, 1)) for experts in (128, 512))
    assert four.seconds > 2 * one.seconds
    read = 4 * 16384 * 1024 * 4
    assert four.seconds > 0.6 * read / H200.memory_bandwidth
    products = 3 * 2 * 16384 * 512 * 1024
    assert four.seconds > products / H200.peak_bf16
    chosen = route_time(H200, 16384, 1024, Choice(512, 1, 16))
    # 15 more of 512 logits of each of 128 rows, 6 instructions on 128 lanes
    more = 15 * 6 * 512 * 128 / 128 / H200.clock_hz
    assert chosen.seconds - four.seconds == pytest.approx(more, rel=0.05)


def test_a_routers_gradients_take_their_products_or_their_bytes() -> None:
    """387 experts are bound by three products, 40 by rows that are read or written once."""
    shape = Shape(model_of("moeut_244m"), 16384, 1024)
    many, few = (
        {kernel.name: kernel for kernel in router_kernels(H200, shape, choice)}
        for choice in (shape.choice, shape.head_choice)
    )
    assert (shape.choice.outputs, shape.head_choice.outputs) == (387, 40)
    for name in ("gradient of rows", "gradient of weights"):
        assert many[name].flops == 2 * 16384 * 387 * 1024
        least = 3 * many[name].flops / H200.peak_bf16
        assert least < many[name].seconds < 2 * least
        least = 16384 * 4 * (1024 + 64) / H200.memory_bandwidth
        assert least < few[name].seconds < 2 * least
    moved = 16384 * 4 * (387 + 416) / H200.memory_bandwidth
    assert moved < many["gradient of logits"].seconds < 2 * moved


def test_routers_that_drop_experts_go_torchs_steps() -> None:
    model = model_of("moeut_244m")
    dropping = model.changed({"feed_forward.router.expert_dropout": 0.1})
    names = [
        {kernel.name for kernel in router_kernels(H200, shape, shape.choice)}
        for shape in (Shape(given, 4096, 1024) for given in (model, dropping))
    ]
    assert "logits, top-k and gates" in names[0]
    assert {"gradient of logits", "gradient of rows", "gradient of weights"} <= names[0]
    assert {"top-k", "gates", "dropped by chance"} <= names[1]
    assert "gradient of rows, exact float32" in names[1]
    assert "logits, top-k and gates" not in names[1]
    many = Choice(2048, 1, 8)
    assert "top-k" in {k.name for k in router_kernels(H200, Shape(model, 4096, 1024), many)}


@pytest.mark.parametrize("tiles", [1, 4, 8])
@pytest.mark.parametrize(
    ("rows", "experts"), [(262_144, 387), (131_072, 40), (1_179_648, 40), (64, 4)]
)
def test_rows_are_cut_as_the_kernel_cuts_them(rows: int, experts: int, tiles: int) -> None:
    weight_gradients = pytest.importorskip("moebius.kernels.triton.weight_gradients")
    starts_E1 = torch.empty(experts + 1, dtype=torch.int32)
    with mock.patch.object(weight_gradients, "tile_table"):
        assert (
            chunk_rows(rows, experts, tiles)
            == weight_gradients.cut_work([starts_E1], rows, tiles=tiles).chunk
        )


def test_counted_launches_take_the_place_of_the_lists() -> None:
    assert host_s(scenario(launches=9000.0), ALONE) == pytest.approx(9000 * H200.launch_s)
    again = replace(ALONE, recompute="selective")
    assert host_s(scenario(launches=9000.0), again) == pytest.approx(4 / 3 * 9000 * H200.launch_s)


def test_measured_kernels_take_the_place_of_their_predictions(tmp_path: Path) -> None:
    file = tmp_path / "gpu_kernels.json"
    kernels = [
        {"name": "K1 forward", "ratio": 1.5},
        {"name": "K1 forward", "ratio": 2.5},
        {"name": "norm", "ratio": None},
    ]
    file.write_text(json.dumps({"hardware": "h200", "kernels": kernels}))
    ratios, hardware = read_kernel_ratios(file)
    assert (ratios, hardware) == ({"K1 forward": 2.0}, "h200")
    usual, corrected = (
        rank_kernels(scenario(kernel_ratios=given), ALONE) for given in ({}, ratios)
    )
    assert usual is not None
    assert corrected is not None
    k1 = seconds([kernel for kernel in usual if kernel.name == "K1 forward"])
    assert seconds(corrected) == pytest.approx(seconds(usual) + k1)
    config = RECIPES["moeut_244m"]()
    asked = make_scenario(config, hardware="h200", measured_kernels=file)
    assert asked.kernel_ratios == ratios
    assert "1 kernels corrected" in computation_line(asked)
    with pytest.raises(ValueError, match="its kernels were measured on h200, and h100 is planned"):
        make_scenario(config, hardware="h100", measured_kernels=file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"rows": []}', "is no file of benchmarks/gpu/kernel_times.py: hardware: Field required"),
        ('{"hardware": null, "kernels": [{"name": "K1", "ratio": -1}]}', "kernels.0.ratio"),
        ('{"hardware": null, "kernels": [{"name": "K1", "ratio": null}]}', "none of its kernels"),
    ],
)
def test_a_file_of_kernels_that_is_none_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_kernel_ratios(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_kernel_ratios(tmp_path / "missing.json")


def test_lines_add_up_to_the_step() -> None:
    kernels = step_kernels(H200, Shape(model_of("moeut_244m"), 8192, 1024))
    lines = kernel_lines(kernels)
    assert sum(line.seconds for line in lines) == pytest.approx(seconds(kernels))
    assert sum(parts_of(lines).values()) == pytest.approx(seconds(kernels))
    assert len({(line.part, line.name, line.is_forward) for line in lines}) == len(lines)
    [k1] = [line for line in lines if line.name == "K1 forward"]
    assert k1.calls == 18
    assert k1.seconds == pytest.approx(18 * k1.seconds_per_call)
