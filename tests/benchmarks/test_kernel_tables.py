"""Tables of kernels that no GPU has run: documents, data and model say the same, and what a GPU
measures is put beside the right prediction.
"""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import compile_table, kernel_times, predicted
from benchmarks.gpu.compiling import call_linear, call_mlp, recorded
from benchmarks.kernels.problem import GPU_SETTINGS, Setting
from moebius.kernels.triton.tiles import TARGETS, TILES
from moebius.planning.hardware import HARDWARE
from moebius.planning.kernel import Shape
from moebius.planning.kernel_times import layer_kernels

H200 = HARDWARE["h200"]
[MLP, _, ATTENTION] = GPU_SETTINGS


# The compile table --------------------------------------------------------------------------------


def test_the_page_and_the_planner_say_what_was_compiled() -> None:
    results = compile_table.read_results()
    how = "write them anew: python -m benchmarks.gpu.compile_table --render"
    assert compile_table.PAGE.read_text(encoding="utf-8") == compile_table.page(results), how
    assert compile_table.PLANNED.read_text(encoding="utf-8") == compile_table.planned(results), how


def test_every_tile_of_every_target_is_in_the_compile_table() -> None:
    """A tile that changes must be compiled anew."""
    targets = compile_table.read_results()["targets"]
    assert tuple(targets) == TARGETS
    for target, lines in targets.items():
        tiled = [line for line in lines if "entry" in line]
        stale = [
            line["entry"]
            for line in tiled
            if line["tile"] != compile_table.tile_of(target, tuple(line["entry"]))
        ]
        assert not stale, f"{target}: {stale}: python -m benchmarks.gpu.compile_table"
        entries = {tuple(line["entry"]) for line in tiled}
        left_out = set(TILES) - entries
        assert all(target == "gfx950" and key[1] == "fp32" for key in left_out)
        assert all(line["programs"] >= 1 for line in lines)
        assert all(line["spilled_bytes"] <= 64 for line in lines)
        assert {"_sum_equal", "_sorted_rows", "_tile_table"} <= {line["kernel"] for line in lines}


def test_a_launch_is_compiled_for_the_table() -> None:
    """One kernel, as the whole table is made."""
    [launch] = [
        launch
        for entry, launch in compile_table.launches("sm_90")
        if launch[0].fn.__name__ == "gathered_activation"
        and entry == ("gather", "bf16", "many")
        and compile_table.variant_of(launch) == "relu"
        and not compile_table.is_odd(launch)
    ]
    needs = compile_table.needs_of(launch, "sm_90")
    [line] = [
        line
        for line in compile_table.read_results()["targets"]["sm_90"]
        if line["kernel"] == "gathered_activation"
        and line.get("entry") == ["gather", "bf16", "many"]
        and (line["variant"], line["odd"]) == ("relu", False)
    ]
    assert needs["shared_bytes"] == line["shared_bytes"]
    assert needs["programs"] == line["programs"] == 2


# Predictions --------------------------------------------------------------------------------------


def test_the_document_shows_what_the_model_predicts() -> None:
    page = predicted.PAGE.read_text(encoding="utf-8")
    assert predicted.with_table(page) == page, "write it anew: python -m benchmarks.gpu.predicted"
    changed = page.replace("ms** | – |", "ms** | 1 |", 1)
    assert changed != page
    assert predicted.with_table(changed) == page
    with pytest.raises(ValueError, match="has no <!-- predicted -->"):
        predicted.with_table("no marks")


def test_only_known_contenders_are_predicted() -> None:
    ours = predicted.predicted_ms(H200, MLP, "ours: triton", "bfloat16")
    dense = predicted.predicted_ms(H200, MLP, "dense baseline", "bfloat16")
    equal = predicted.predicted_ms(H200, MLP, "dense, equal MACs", "bfloat16")
    assert ours is not None
    assert dense is not None
    assert equal is not None
    assert equal < dense < 2.2 * equal  # twice the work
    assert equal < ours
    assert predicted.predicted_ms(H200, MLP, "ScatterMoE", "bfloat16") is None
    assert predicted.predicted_ms(H200, ATTENTION, "dense baseline", "bfloat16") is None
    full = predicted.predicted_ms(H200, MLP, "ours: triton", "float32")
    assert full is not None
    assert full > 3 * ours


# Measured beside predicted ------------------------------------------------------------------------


def test_every_measured_kernel_has_a_prediction() -> None:
    """The names under which phases are measured are the model's, and all of its products'."""
    for setting, banks in ((MLP, [""]), (ATTENTION, ["V ", "O "])):
        names = {kernel.name: kernel for kernel in predicted.layer_kernels(H200, setting)}
        for bank in banks:
            wanted = {
                f"{bank}{k} {way}" for k in ("K1", "Rd", "K2") for way in ("forward", "backward")
            }
            found = wanted & set(names)
            assert found == (wanted if not bank else found)
            assert len(found) == (6 if not bank else 4)
        products = [name for name, kernel in names.items() if kernel.flops]
        assert len(products) == 6


def test_phases_of_the_rest_launch_what_they_are_named_for() -> None:
    """On a machine without a GPU: which kernels of Triton's each would start, and that its prediction
    is in the list.
    """
    model = kernel_times.RECIPES["moeut_244m"]().model
    shape = Shape(model, 2048, 1024)
    listed = {kernel.name for kernel in layer_kernels(H200, shape, has_experts=True)}
    launched = {}
    for phase in kernel_times.dense_phases(model, 2048, "cpu"):
        with recorded("sm_90") as noted:
            phase.run()
        names = [name for wanted in phase.names.values() for name in wanted]
        assert set(names) <= listed
        kernels = [kernel.fn.__name__ for kernel, *_ in noted.launches]
        launched[", ".join(names)] = kernels
        if kernel_times.ALL not in phase.names:
            assert list(phase.names) == kernels
    backward = ["_add_norm_backward", "_sum_partial"]
    assert launched["norm and casts"] == launched["residual, norm and casts"] == ["_add_norm"]
    assert launched["norm and casts, backward"] == backward
    assert launched["residual, norm and casts, backward"] == backward


@pytest.mark.parametrize("setting", [MLP, ATTENTION], ids=["feed-forward", "attention"])
def test_gradients_launch_what_they_are_named_for(setting: Setting) -> None:
    names = {kernel.name for kernel in predicted.layer_kernels(H200, setting)}
    matrices = ("V K3",) if setting.is_switchhead else ("K3 up", "K3 down")
    wanted = kernel_times._gradients(*matrices)
    assert {name for found in wanted.values() for name in found} <= names
    with recorded("sm_90") as noted:
        if setting.is_switchhead:
            call_linear("many", (1024, 128), torch.bfloat16)
        else:
            call_mlp("many", (1024, 128), torch.bfloat16)
    kernels = [kernel.fn.__name__ for kernel, *_ in noted.launches]
    for function, found in wanted.items():
        assert kernels.count(function) == len(found)


def test_events_are_matched_with_predictions() -> None:
    """Two calls, with another kernel between; medians by the place in a call."""
    once = [("rows_product", 3.0), ("other", 9.0), ("ragged_product", 5.0), ("ragged_product", 7.0)]
    again = [(name, span + 2) for name, span in once]
    names = {"rows_product": ("K2 forward",), "ragged_product": ("K3 up", "K3 down")}
    found = kernel_times.matched([*once, *again], names, times=2)
    assert found == {"K2 forward": 4.0, "K3 up": 6.0, "K3 down": 8.0}
    whole = kernel_times.matched(once + again, {kernel_times.ALL: ("sort",)}, times=2)
    assert whole == {"sort": (3 + 9 + 5 + 7) + 4.0}
    with pytest.raises(ValueError, match="gone ran 0 times in 2 calls, not 1 times in each"):
        kernel_times.matched(once, {"gone": ("K1",)}, times=2)
    with pytest.raises(ValueError, match="the profiler saw nothing on the GPU"):
        kernel_times.matched([], {kernel_times.ALL: ("sort",)}, times=2)


def test_the_summary_shows_ratios() -> None:
    fast = kernel_times.Measured("244M", "K1 forward", 222.0, 111.0, "L2")
    unknown = kernel_times.Measured("244M", "K2 forward", 50.0, None, "")
    assert (fast.ratio, unknown.ratio) == (2.0, None)
    lines = [vars(line) | {"ratio": line.ratio} for line in (fast, unknown)]
    table = kernel_times.kernel_table({"hardware": "h200", "kernels": lines})
    assert [list(column.cells) for column in table.columns][4] == ["–", "2.00"]
    predicted_244m = predicted.predicted_ms(H200, MLP, "ours: triton", "bfloat16")
    assert predicted_244m is not None
    entry = {
        "name": "ours: triton",
        "setting": "244M",
        "dtype": "bfloat16",
        "role": "ours",
        "cells": [{"skew": 0.5, "fastest_ms": 3 * predicted_244m, "of_ceiling": 0.3}],
        "saved_over_ideal": None,
        "error": None,
        "why_not": None,
    }
    expected = json.loads(gpu.EXPECTED.read_text(encoding="utf-8"))
    layers = gpu.layer_table({"entries": [entry]}, expected, H200)
    [row] = zip(*(column.cells for column in layers.columns), strict=True)
    assert f"{predicted_244m:.3f}" in row
    assert "3.00" in row
    step = {"size": "244m", "precision": "bfloat16", "seq_len": 1024, "batch": 16, "ratio": 1.5}
    best = {"backend": "triton", "compiled": False}
    step |= {"seconds": {"moeut": 0.2, "dense": 0.1}, "tokens_per_s": {"moeut": 1.0}}
    steps = gpu.step_table({"cases": [step | {"sides": {"moeut": {"best": best}}}]}, 1.0, H200)
    [row] = zip(*(column.cells for column in steps.columns), strict=True)
    found = predicted.step_prediction(H200, gpu.RECIPES["moeut_244m"]().model)
    assert row[-1].startswith(f"{0.2 / found.seconds:.2f}, ")


def test_without_a_gpu_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernel_times", "--out", str(tmp_path)])
    monkeypatch.setattr(kernel_times.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU here"):
        kernel_times.main()
    assert not list(tmp_path.iterdir())
