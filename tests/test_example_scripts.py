"""The notebook and the Python scripts run as a reader would run them."""

import itertools
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbformat import NotebookNode

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"


def run_example(folder: Path, name: str, *arguments: str) -> str:
    """Returns what a script of examples/ prints when run in that folder."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_expert_parallelism_in_twenty_lines(tmp_path: Path) -> None:
    said = run_example(tmp_path, "expert_parallelism_in_twenty_lines.py")
    away = re.findall(r"rank (\d): (\d+) of 12 routes went to the other rank; equal to one", said)
    assert sorted(rank for rank, _ in away) == ["0", "1"]
    assert all(0 < int(number) < 12 for _, number in away)


@pytest.mark.slow
def test_train_on_own_text_and_look_inside_its_router(tmp_path: Path) -> None:
    for page in (EXAMPLES.parent / "docs").glob("*.md"):
        shutil.copy(page, tmp_path / f"{page.stem}.txt")
    said = run_example(tmp_path, "train_on_own_text.py", "*.txt", "--steps", "2")
    assert re.search(r"after 2 steps \(training loss \d+\.\d{3}\) the model writes:\n\nThe ", said)
    assert "step 2: log-probability -" in said
    assert (tmp_path / "runs" / "own_text" / "summary.png").exists()

    said = run_example(tmp_path, "look_inside_a_router.py", "runs/own_text", "--text", "The band")
    table, _, loads = said.partition("\n\n")
    heading, *rows = table.splitlines()
    assert re.findall(r"depth (\d)", heading) == ["1", "2", "3", "4", "5", "6"]
    assert rows
    assert all(len(re.findall(r"\d+", row.partition("'")[2])) >= 6 * 5 for row in rows)
    found = re.findall(r"depth (\d): (\d+) of 32 experts in use, the fullest has ([\d.]+)", loads)
    assert [int(depth) for depth, *_ in found] == [1, 2, 3, 4, 5, 6]
    assert all(1 <= float(fullest) <= 32 for *_, fullest in found)


def kinds_of(notebook: NotebookNode) -> list[list[str]]:
    """Returns every code cell's outputs: the stream's name or the richest MIME type.

    Repeated outputs in a row, such as progress, count once.
    """
    kinds = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [
                output.get("name") or sorted(output.get("data", {}))[0] for output in cell.outputs
            ]
            kinds.append([kind for kind, _ in itertools.groupby(outputs)])
    return kinds


@pytest.mark.slow
def test_the_notebook_runs_and_its_stored_outputs_are_of_such_a_run(tmp_path: Path) -> None:
    stored, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    place = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=250, kernel_name="python3", resources=place).execute()
    assert kinds_of(notebook) == kinds_of(stored)
    assert ["image/png"] in kinds_of(stored), "GitHub shows the picture"
    assert "SUCCEEDED: 40 steps" in nbformat.writes(stored)
    (loss,) = re.findall(r"training loss ([\d.]+)", nbformat.writes(notebook))
    assert float(loss) < 4.5, "it has learned something: ln 257 = 5.55"


@pytest.mark.slow
def test_interrupting_the_kernel_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """The cell continues: `fit` returns how the run ended, and the view appears once."""
    cell = (
        "import moebius\n"
        "config = moebius.recipe('own_text', 'train.steps=10000', 'prepare.tokenizer=bytes',\n"
        "    'prepare.input=embedded',\n"
        "    model={'vocab_size': 257, 'd_model': 32, 'attention': {'d_head': 8}},\n"
        "    data={'seq_len': 32}, prepare={'vocab_size': 257}, train={'log_every': 1})\n"
        "status = moebius.fit(config, 'runs/mine')\n"
        "print(status.state.value, status.step)"
    )
    manager, client = start_new_kernel(cwd=str(tmp_path))
    try:
        asked = client.execute(cell)
        metrics, deadline = tmp_path / "runs" / "mine" / "metrics.jsonl", time.monotonic() + 150
        while not metrics.exists() or '"kind": "train"' not in metrics.read_text():
            assert time.monotonic() < deadline, "no step was made"
            time.sleep(0.2)
        manager.interrupt_kernel()
        messages = []
        while not messages or messages[-1]["content"].get("execution_state") != "idle":
            message = client.get_iopub_msg(timeout=150)
            if message["parent_header"].get("msg_id") == asked:
                messages.append(message)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    kinds = [message["msg_type"] for message in messages]
    said = "".join(message["content"].get("text", "") for message in messages)
    assert "error" not in kinds
    state, step = said.split()
    assert state == "STOPPED"
    assert (tmp_path / "runs" / "mine" / "checkpoints" / f"step_{int(step):08d}").is_dir()
    assert kinds.count("update_display_data") > 1, "the view was redrawn in place"
