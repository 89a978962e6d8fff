"""What a machine with a GPU measured is never lost: not by an error, a hang, a kill, or a kernel that
takes the whole process with it. Shown without a GPU.
"""

import ast
import json
import pkgutil
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks import report, step
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import ceilings, tune_tiles
from benchmarks.gpu.attempt import UNFINISHED
from benchmarks.kernels import expert_layer
from benchmarks.kernels.layers import Contender, ExpertLayer, Setting, dense, grouped
from moebius.cli.main import main
from moebius.cluster.check import doctor
from moebius.cluster.check.findings import Finding
from moebius.kernels.triton import tiles as triton_tiles
from moebius.kernels.triton.tiles import TILES, Tile

ERRORS = {
    "compiler": CompilationError("x = 1\ny = z", ast.Name("z", lineno=2, col_offset=4), "no z"),
    "resources": OutOfResources(300_000, 232_448, "shared memory"),
    "assembler": PTXASError("ptxas died"),
    "memory": torch.OutOfMemoryError("CUDA out of memory"),
}
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


BREAKING_TESTS = """
import pytest
from benchmarks.gpu import pytest_plugin
pytest_plugins = ["benchmarks.gpu.pytest_plugin"]
@pytest.mark.parametrize("number", range(4))
def test_one(number):
    assert not pytest_plugin.is_broken()
    if number == 0:
        pytest_plugin.is_broken = lambda: True
        raise RuntimeError("CUDA error: an illegal memory access")
"""


@pytest.mark.slow
def test_a_test_that_breaks_the_context_ends_its_worker_alone(tmp_path: Path) -> None:
    (tmp_path / "test_breaking.py").write_text(BREAKING_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    words = ["-q", "-n", "1", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini")]
    command = [sys.executable, "-m", "pytest", *words, str(tmp_path)]
    ended = subprocess.run(
        command, cwd=report.ROOT, capture_output=True, text=True, check=False
    ).stdout
    assert "CUDA error: an illegal memory access" in ended
    assert "2 failed, 3 passed" in ended, ended  # the crash is reported too


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


def test_a_contender_that_fails_is_a_reason(measure_layers: Callable[..., Any]) -> None:
    found = measure_layers({name: raiser(error) for name, error in ERRORS.items()})
    assert found["compiler"]["why_not"].startswith("CompilationError: at 2:4: x = 1 y = z ^ no z")
    assert found["resources"]["why_not"].startswith("OutOfResources: out of resource: shared")
    assert found["assembler"]["why_not"] == "PTXASError: PTXAS error: ptxas died"
    assert found["memory"]["why_not"] == "OutOfMemoryError: CUDA out of memory"
    for name in ("dense", "grouped_mm"):
        assert found[name]["why_not"] is None
        assert found[name]["cells"][0]["of_ceiling"] > 0


def test_after_a_broken_context_a_fresh_process_does_the_rest(
    measure_layers: Callable[..., Any], gpu_that_breaks: list[str], tmp_path: Path
) -> None:
    calls = []

    def breaks(*_: object) -> Any:
        calls.append(1)
        gpu_that_breaks.append("illegal access")
        raise ILLEGAL

    with pytest.raises(Restarted) as fresh:
        measure_layers({"breaks": breaks})
    before = layer_entries(tmp_path)
    assert before["dense"]["first_ms"] > 0
    assert before["grouped_mm"]["why_not"] is None
    found = measure_layers({"breaks": breaks}, *fresh.value.args[1:])
    assert len(calls) == 1
    assert found["breaks"]["why_not"].endswith("illegal memory access was encountered")
    assert all(found[name]["cells"] for name in ("dense", "grouped_mm"))


HANGING_LAYER = """
import sys, time
from benchmarks.kernels import expert_layer
from benchmarks.kernels.layers import Contender, ExpertLayer, Setting, dense
expert_layer.CPU_SETTINGS = (Setting("mlp", 40, 16, 8, 6, 3),)
hangs = Contender("hangs", "ours", lambda bank: ExpertLayer(bank, lambda *_: time.sleep(600)))
expert_layer.contenders = lambda setting, modes: [Contender("dense", "ceiling", dense(24)), hangs]
expert_layer.main()
"""


@pytest.mark.slow
def test_a_kill_leaves_what_was_measured_and_names_what_hung(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGING_LAYER, "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=report.ROOT, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "expert_layer_cpu.json").exists() or (
            layer_entries(tmp_path)["hangs"]["why_not"] != UNFINISHED
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert layer_entries(tmp_path)["dense"]["first_ms"] > 0


# Steps --------------------------------------------------------------------------------------------

CASE = step.Case("44m", "cpu", "float32", 1, 8, 1, 1, 2, False, 20.0)


def test_a_side_runs_with_what_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(case: step.Case, side: str, way: step.Way, *_: object) -> Any:
        if way.backend == "triton":
            raise ERRORS["resources"]
        return way

    monkeypatch.setattr(step, "build", build)
    monkeypatch.setattr(step, "timed_step", lambda *_: 0.5)
    tried: list[dict[str, Any]] = []
    case = replace(CASE, device="cuda")
    bench = step.Bench(case, "moeut", None, tmp_path, tried, lambda: None)  # pyright: ignore
    best = bench.best_run(step.Clock(60), 1.0, step.ways_of(case, "moeut", {}))
    assert best is not None
    assert best[1].backend == "grouped_mm"
    assert tried[0]["why_not"].startswith("OutOfResources")
    assert "is_fatal" not in tried[0]


@pytest.mark.parametrize("side", step.FUSED)
def test_a_side_goes_without_a_fused_kernel(side: str) -> None:
    """In its own steps alone; the product's function must be where the benchmark replaces it."""
    kept = pkgutil.resolve_name(step.FUSED[side])
    with step.without(side):
        assert pkgutil.resolve_name(step.FUSED[side])("triton") is False
    with step.without("moeut"):
        assert pkgutil.resolve_name(step.FUSED[side]) is kept


DIES = """
import json, os, sys, time
from pathlib import Path
out = Path(sys.argv[1])
before = json.loads(out.read_text()) if out.exists() else None
tried = [{"backend": "triton", "why_not": "began", "is_fatal": True}]
out.write_text(json.dumps({"sides": {"moeut": {"tried": tried}}, **({"ratio": 1.5} if before else {})}))
if before is None:
    os.kill(os.getpid(), 9)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("hang_s", "why_not"), [(0, None), (600, "stopped (--limit)")])
def test_a_step_without_what_killed_its_process(
    hang_s: int, why_not: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def process_of(case: step.Case, out: Path) -> Iterator[subprocess.Popen[bytes]]:
        out.with_suffix(".err").write_text("")
        process = subprocess.Popen([sys.executable, "-c", DIES, str(out), str(hang_s)])
        yield process
        process.kill()
        process.wait()

    monkeypatch.setattr(step, "process_of", process_of)
    monkeypatch.setattr(step, "POLL_S", 0.05)
    *_, last = step.in_own_process(CASE, time.monotonic() + (1 if hang_s else 20))
    assert last["ratio"] == 1.5
    assert last["sides"]["moeut"]["tried"][0]["backend"] == "triton"
    assert last.get("why_not") == why_not


# Ceilings and tiles -------------------------------------------------------------------------------


def test_a_ceiling_that_breaks_the_context_is_left_out_of_the_rest(
    gpu_that_breaks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> float:
        gpu_that_breaks.append("illegal access")
        raise ILLEGAL

    names = ("add_tb_per_s_128", "add_tb_per_s_256", "gather_tb_per_s_128")
    rates = (raiser(ERRORS["compiler"]), breaks, lambda: 2.5)
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


def test_a_table_has_the_fastest_tile_so_far_whatever_comes_next(
    gpu_that_breaks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TILES, KEY, TILES[KEY])  # put back
    table, out = shutil.copy(str(triton_tiles.__file__), tmp_path / "table.py"), tmp_path / "out"
    monkeypatch.setattr(triton_tiles, "__file__", str(table))
    facts = {"gpu": "H100", "commit": "295efc3b"}
    monkeypatch.setattr(tune_tiles, "environment", lambda: facts)
    monkeypatch.setattr(tune_tiles, "TOKENS", {"few": 4})
    first, second, third, fourth, *others = tune_tiles.candidates(KEY)
    ran: list[Tile] = []

    def timed(key: tune_tiles.Key) -> float | str:
        ran.append(TILES[key])
        if TILES[key] == fourth:
            gpu_that_breaks.append("illegal access")
            return str(ILLEGAL)
        return {first: 2.0, third: 1.0}.get(TILES[key], 3.0)

    def best_is_third() -> bool:
        key, sides = ", ".join(f'"{part}"' for part in KEY), str(astuple(third))
        return f"({key}): Tile{sides},\n" in (out / "table.py").read_text()

    monkeypatch.setattr(tune_tiles, "_timed", timed)
    reasons = {second: "CompilationError: no z"}
    monkeypatch.setattr(tune_tiles, "compile_all", lambda key, tiles: reasons)
    command = ["x", "--kernels", "rows", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(Restarted) as fresh:
        tune_tiles.main()
    assert ran == [first, third, fourth]
    assert best_is_third()
    TILES[KEY] = third  # as the fresh process reads it
    monkeypatch.setattr(sys, "argv", [*command, *fresh.value.args[1:]])
    tune_tiles.main()
    assert ran == [first, third, fourth, first, *others]
    measured = json.loads((out / "tune_tiles.json").read_text())["measured"]
    found = {Tile(*sides): ms for *sides, ms in measured["/".join(KEY)]}
    assert found[second] == "CompilationError: no z"
    assert found[fourth] == str(ILLEGAL)
    assert best_is_third()
