"""What a machine with a GPU measured is never lost: not by an error, a hang, a kill, or a kernel that
takes the whole process with it. Shown without a GPU.
"""

import ast
import json
import pkgutil
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from triton.compiler.errors import CompilationError

from benchmarks import report, step
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import ceilings, tune_tiles
from benchmarks.kernels import expert_layer
from benchmarks.kernels.layers import Contender, ExpertLayer, Setting, dense, grouped
from moebius.cli.main import main
from moebius.cluster.check import doctor
from moebius.cluster.check.findings import Finding
from moebius.kernels.triton import tiles as triton_tiles
from moebius.kernels.triton.tiles import TILES, Tile

NO_Z = CompilationError("x = 1\ny = z", ast.Name("z", lineno=2, col_offset=4), "no z")
ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")


class Restarted(Exception):
    """Stands for the fresh process, whose command line it holds."""


@pytest.fixture(autouse=True)
def gpu_that_breaks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretends a GPU, whose context is broken once something is in the list."""
    broken: list[str] = []

    def restart(module: str, *words: str) -> None:
        broken.clear()
        raise Restarted(module, *words)

    for module in (expert_layer, ceilings, tune_tiles):
        monkeypatch.setattr(module, "require_gpu", lambda: None)
        monkeypatch.setattr(module, "is_broken", lambda: bool(broken))
        monkeypatch.setattr(module, "restart", restart)
    return broken


def raiser(error: BaseException) -> Callable[..., Any]:
    def run(*_: object, **__: object) -> Any:
        raise error

    return run


# All parts ----------------------------------------------------------------------------------------


def test_right_comes_before_fast_and_all_of_it_fits(tmp_path: Path) -> None:
    every = gpu.parts(tmp_path, tmp_path / "run")
    names = ["doctor", "tests", "layer", "step", "train", "ceilings", "tuning"]
    assert [part.name for part in every] == names
    assert sum(part.limit_s for part in every) < gpu.WHOLE_S
    assert all((report.ROOT / name.partition("::")[0]).is_file() for name in gpu.TESTS)


def test_a_part_that_hangs_or_fails_costs_the_others_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, log = tmp_path / "child", tmp_path / "log"
    hang = (
        "import subprocess; p = subprocess.Popen(['sleep', '60']); print('figure 1', flush=True);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); p.wait()"
    )
    programs = {"hangs": (hang, 2.0), "fails": ("raise SystemExit(3)", 10.0), "works": ("", 10.0)}
    every = [
        gpu.Part(name, (sys.executable, "-c", program), limit_s)
        for name, (program, limit_s) in programs.items()
    ]
    started = time.monotonic()
    ended = gpu.run_all(every, 60.0, log)
    late = gpu.run_all(every[2:], gpu.LEAST_S - 1, log)
    assert [part.state for part in ended] == ["stopped after 2 s", "exit code 3", "ok"]
    assert late[0].state.startswith("not begun")
    assert time.monotonic() - started < 30
    shown = capsys.readouterr().out
    assert shown.index("figure 1") < shown.index("hangs: stopped") < shown.index("fails: exit")
    assert "figure 1" in log.read_text()
    pid = int(child.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_findings_are_printed_before_the_next_can_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def findings() -> Iterator[Finding]:
        yield Finding("kernels, float32", "ok", "within 1e-06")
        assert "within 1e-06" in capsys.readouterr().out
        yield Finding("NCCL", "fail", "hung")

    monkeypatch.setattr(doctor, "look_at_gpus", findings)
    with pytest.raises(SystemExit, match="1"):
        main(["doctor", "--gpu"])


# Layers -------------------------------------------------------------------------------------------


def layer_entries(folder: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / "expert_layer_cpu.json").read_text())["entries"]
    return {entry["name"]: entry for entry in found}


@pytest.fixture
def measure_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the benchmark with these contenders between a dense layer and torch's grouped product."""
    monkeypatch.setattr(expert_layer, "CPU_SETTINGS", (Setting("mlp", 40, 16, 8, 6, 3),))
    monkeypatch.setattr(expert_layer, "keep_freed_memory", lambda: False)
    monkeypatch.setattr(expert_layer.gc, "freeze", lambda: None)

    def run(ours: dict[str, Callable[..., Any]], *words: str) -> dict[str, dict[str, Any]]:
        middle = [Contender(name, "ours", partial(ExpertLayer, run=ours[name])) for name in ours]
        last = Contender("grouped_mm", "peer", partial(ExpertLayer, run=grouped))
        every = [Contender("dense", "ceiling", dense(24)), *middle, last]
        monkeypatch.setattr(expert_layer, "contenders", lambda setting, modes: every)
        command = f"x --dtypes float32 --threads 1 --rounds 2 --seconds 0 --out {tmp_path}"
        monkeypatch.setattr(sys, "argv", [*command.split(), *words])
        expert_layer.main()
        return layer_entries(tmp_path)

    return run


def test_after_a_broken_context_a_fresh_process_does_the_rest(
    measure_layers: Callable[..., Any], gpu_that_breaks: list[str], tmp_path: Path
) -> None:
    calls = []

    def breaks(*_: object) -> Any:
        calls.append(1)
        gpu_that_breaks.append("illegal access")
        raise ILLEGAL

    ours = {"compiler": raiser(NO_Z), "breaks": breaks}
    with pytest.raises(Restarted) as fresh:
        measure_layers(ours)
    before = layer_entries(tmp_path)
    assert before["dense"]["first_ms"] > 0
    assert before["grouped_mm"]["why_not"] is None
    found = measure_layers(ours, *fresh.value.args[1:])
    assert len(calls) == 1
    assert found["compiler"]["why_not"].startswith("CompilationError: at 2:4: x = 1 y = z ^ no z")
    assert found["breaks"]["why_not"].endswith("illegal memory access was encountered")
    assert all(found[name]["cells"] for name in ("dense", "grouped_mm"))


# Steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", step.FUSED)
def test_a_side_goes_without_a_fused_kernel(side: str) -> None:
    """In its own steps alone; the product's function must be where the benchmark replaces it."""
    kept = pkgutil.resolve_name(step.FUSED[side])
    with step.without(side):
        assert pkgutil.resolve_name(step.FUSED[side])("triton") is False
    with step.without("moeut"):
        assert pkgutil.resolve_name(step.FUSED[side]) is kept


# Ceilings and tiles -------------------------------------------------------------------------------


def test_a_ceiling_that_breaks_the_context_is_left_out_of_the_rest(
    gpu_that_breaks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> float:
        gpu_that_breaks.append("illegal access")
        raise ILLEGAL

    names = ("add_tb_per_s_128", "add_tb_per_s_256", "gather_tb_per_s_128")
    rates = (raiser(NO_Z), breaks, lambda: 2.5)
    monkeypatch.setattr(ceilings, "motions", lambda: zip(names, rates, strict=True))
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path)])
    with pytest.raises(Restarted, match="ceilings', '--go-on'"):
        ceilings.main()
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), "--go-on"])
    ceilings.main()
    found = json.loads((tmp_path / "gpu_ceilings.json").read_text())["ceilings"]
    assert found["add_tb_per_s_128"].startswith("CompilationError")
    assert found["add_tb_per_s_256"].startswith("RuntimeError: CUDA error: an illegal")
    assert found["gather_tb_per_s"] == 2.5
    assert "add_tb_per_s" not in found


KEY = ("rows", "bf16", "few")


def test_a_table_has_the_fastest_tile_so_far_when_the_context_breaks(
    gpu_that_breaks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TILES, KEY, TILES[KEY])  # put back
    table, out = shutil.copy(str(triton_tiles.__file__), tmp_path / "table.py"), tmp_path / "out"
    monkeypatch.setattr(triton_tiles, "__file__", str(table))
    monkeypatch.setattr(tune_tiles, "environment", lambda: {"gpu": "H100", "commit": "295efc3b"})
    monkeypatch.setattr(tune_tiles, "TOKENS", {"few": 4})
    first, second, third, fourth, *_ = tune_tiles.candidates(KEY)

    def timed(key: tune_tiles.Key) -> float | str:
        if TILES[key] == fourth:
            gpu_that_breaks.append("illegal access")
            return str(ILLEGAL)
        return {first: 2.0, third: 1.0}[TILES[key]]

    monkeypatch.setattr(tune_tiles, "_timed", timed)
    monkeypatch.setattr(tune_tiles, "compile_all", lambda key, tiles: {second: "no z"})
    monkeypatch.setattr(sys, "argv", ["x", "--kernels", "rows", "--out", str(out)])
    with pytest.raises(Restarted, match="tune_tiles"):
        tune_tiles.main()
    key, sides = ", ".join(f'"{part}"' for part in KEY), str(astuple(third))
    assert f"({key}): Tile{sides},\n" in (out / "table.py").read_text()
    measured = json.loads((out / "tune_tiles.json").read_text())["measured"]
    found = {Tile(*sides): ms for *sides, ms in measured["/".join(KEY)]}
    assert found == {first: 2.0, second: "no z", third: 1.0, fourth: str(ILLEGAL)}
