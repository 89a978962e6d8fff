"""A C++ library is compiled once per machine, and failures are explained."""

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moebius.kernels.cpu import build as cpp_library
from moebius.kernels.cpu.build import CppLibrary

needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CppLibrary:
    """A library that adds two numbers, on a machine with an empty cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    (tmp_path / "compiled").mkdir()
    source = tmp_path / "sum.cpp"
    source.write_text('extern "C" long moebius_sum(long a, long b) { return a + b; }')
    return CppLibrary(
        name="moebius_sum",
        sources=[source],
        flags=["-O1"],
        otherwise="add by hand",
    )


@needs_a_compiler
def test_it_is_compiled_once_and_nothing_else_is_left(
    library: CppLibrary, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert library.load().call("sum", 2, 3) == 5
    assert capsys.readouterr().err == "compiling moebius_sum, once on this machine\n"
    folder = library.file.parent
    assert set(folder.iterdir()) == {library.file, folder / "lock"}
    monkeypatch.setattr(cpp_library.subprocess, "run", pytest.fail)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.reason_against() is None
    assert library.load().call("sum", 2, 2) == 4


@needs_a_compiler
def test_a_processor_of_another_kind_has_a_file_of_its_own(
    library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An x86 node and an ARM node may share a home folder, and neither loads the other's file."""
    library.load()
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(cpp_library.platform, "machine", lambda machine=machine: machine)
        assert library.file.exists() == (machine == os.uname().machine)


def test_processes_that_start_together_compile_it_once(
    library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def run(command: list[str], **_options: object) -> None:
        compiled.append(command)
        time.sleep(0.2)  # the others are there meanwhile
        Path(command[-1]).touch()

    monkeypatch.setattr(cpp_library.subprocess, "run", run)
    threads = [threading.Thread(target=library.compile, args=(library.file,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert library.file.exists()


def test_another_source_and_other_flags_are_another_library(
    library: CppLibrary, tmp_path: Path
) -> None:
    changed = tmp_path / "changed.cpp"
    changed.write_text("// nothing")
    files = {each.file for each in (library, replace(library, sources=[changed]))}
    assert len(files | {replace(library, flags=["-O2"]).file}) == 3


@needs_a_compiler
def test_a_source_that_does_not_compile_says_what_the_compiler_says(library: CppLibrary) -> None:
    library.sources[0].write_text("int answer = forty_two;")
    with pytest.raises(ValueError, match=r"could not be compiled; add by hand(.|\n)*forty_two"):
        library.load()
    assert [file.name for file in library.file.parent.iterdir()] == ["lock"]


def test_without_a_compiler_one_is_told_what_to_do(
    library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert library.reason_against() == (
        "there is no C++ compiler 'no-such-compiler': install g++, or name another in the "
        "environment variable CXX"
    )
    with pytest.raises(ValueError, match="could not be compiled; add by hand"):
        library.load()


def test_a_folder_that_cannot_be_written_is_told(
    library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "true")
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    monkeypatch.setattr(cpp_library.os, "access", lambda path, _mode: path != folder)
    assert library.reason_against() == (
        f"{folder} is not writable, so nothing can be compiled there: name another folder in "
        "TORCH_EXTENSIONS_DIR"
    )
