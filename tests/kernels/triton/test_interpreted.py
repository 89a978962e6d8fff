"""Runs the Triton kernels' tests in the interpreter, in a separate session because it must be
selected before any import.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "chosen",
    [
        *(
            pytest.param(chosen, marks=pytest.mark.slow)
            for chosen in ("not slow and not nightly", "slow and not nightly")
        ),
        pytest.param("nightly", marks=pytest.mark.nightly),
    ],
)
def test_the_kernels_in_the_interpreter(chosen: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        chosen,
        str(HERE / "interpreted"),
    ]
    ended = subprocess.run(
        command,
        cwd=HERE.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-5_000:]


def test_without_triton_the_backend_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['triton'] = None; import moebius.kernels.triton.backend"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert 'pip install "triton>=3.6,<3.10"' in ended.stderr.splitlines()[-1]
