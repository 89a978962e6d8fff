"""Tasks from a local hub that serves the published sets in their own form."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import serve_hub
from hub_sets import hub_repositories

from moebius.cli.main import main
from moebius.evaluation.tasks.hub import BLIMP_PHENOMENA, hub_records
from moebius.evaluation.tasks.table import TASKS
from moebius.evaluation.tasks.task import TaskError

CHOICES = ["a stone", "a gate", "the sea", "rain"]
SENTENCES = [f"It was the {n} th day , and `` she '' did n't go ." for n in range(20)]
OPTIONS = ["sea", "sun", "day", "dog", "cat", "hat", "man", "bed", "cup"]

# Expected records of each task, in the scored split.
EXPECTED: dict[str, list[dict[str, Any]]] = {
    "lambada": [
        {"text": "He saw the hat and took the hat"},
        {"text": "She shut the door and\nleft by the door"},
    ],
    "blimp": [
        {"UID": name, "sentence_good": "Who left?", "sentence_bad": "Who leave?"}
        for name in BLIMP_PHENOMENA
    ],
    "cbt": [
        {
            "kind": kind,
            "context": SENTENCES,
            "question": "She saw the XXXXX and ran .",
            "answer": kind,
            "candidates": [*OPTIONS, kind],
        }
        for kind in ("V", "P", "NE", "CN")
    ],
    "hellaswag": [
        {
            "query": "Removing ice: [header] How to wait [title] Sit. [step] The man sits. then",
            "fragment": "then",
            "endings": [", he waits.", ", he [substeps] goes.", ", it rains.", ", all end."],
            "label": label,
        }
        for label in ("3", "0")
    ],
    "piqa": [
        {"goal": "Boil it.", "sol1": "Use fire.", "sol2": "Use ice.", "label": label}
        for label in (0, 1)
    ],
    "arc_easy": [
        {"question": "Which?", "choices": CHOICES, "label": 1},
        {"question": "What?", "choices": CHOICES, "label": 3},
    ],
    "arc_challenge": [{"question": "Which one?", "choices": CHOICES, "label": 2}],
    "winogrande": [{"sentence": "A _ met it.", "option1": "gate", "option2": "sea", "answer": "2"}],
    "copa": [
        {"premise": "It rained.", "choice1": "It is wet.", "choice2": "It is dry."}
        | {"question": "effect", "label": 0}
    ],
    "openbookqa": [{"question": "Fog is at", "choices": CHOICES, "label": 2}],
    "boolq": [{"question": "is it wet", "passage": "It rained.", "label": n} for n in (0, 1)],
    "siqa": [
        {"context": "It rained.", "question": "Why?", "label": "3"}
        | {"answerA": "fog", "answerB": "no", "answerC": "rain"}
    ],
    "wsc273": [
        {"context_options": [f"{start} the {end}" for end in ends], "continuation": rest, "gold": 1}
        for start, ends, rest in (
            ("The gate met the sea when", ("gate", "sea"), "  rose."),
            ("I saw", ("gate's", "sea's"), "  end."),
        )
    ],
}

READ = """
import json, sys
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.evaluation.tasks.items import read_items, read_records
from moebius.evaluation.tasks.table import TASKS
from moebius.evaluation.tasks.task import Encoder

found = {}
for name in json.loads(sys.argv[1]):
    found[name] = [record for _, record in read_records("hub", name, TASKS[name])]
    assert len(read_items(name, TASKS[name], "hub", Encoder(BytesTokenizer(), 9999), 1).questions) == 1
print(json.dumps(found))
"""
EVAL = "import sys; from moebius.cli.main import main; main(sys.argv[1:])"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment that sends the hub's libraries to the local server."""
    pytest.importorskip("datasets", reason="the extra `hub`")
    home = tmp_path_factory.mktemp("hub")
    with serve_hub(hub_repositories()) as (endpoint, _):
        yield {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}


def python(
    hub: dict[str, str], program: str, *arguments: object
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=hub, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_task_that_is_on_the_hub(hub: dict[str, str]) -> None:
    names = [name for name, task in TASKS.items() if task.hub is not None]
    assert set(names) == set(EXPECTED)
    ended = python(hub, READ, json.dumps(names))
    assert ended.returncode == 0, ended.stderr
    assert "Generating" not in ended.stderr  # no progress bar without a terminal
    found = json.loads(ended.stdout)
    for name, expected in EXPECTED.items():
        picked = [
            {key: record[key] for key in wanted}
            for record, wanted in zip(found[name], expected, strict=True)
        ]
        assert picked == expected, name


@pytest.mark.slow
def test_tasks_from_the_hub_on_the_command_line(hub: dict[str, str], bytes_run: Path) -> None:
    asked = ("eval", bytes_run, "--data", "hub", "--tasks")
    ended = python(hub, EVAL, *asked, "piqa,arc_easy", "--json")
    assert ended.returncode == 0, ended.stderr
    tasks = json.loads(ended.stdout)["tasks"]
    assert {name: task["items"] for name, task in tasks.items()} == {
        "piqa": 2,
        "arc_easy": 2,
    }
    gone = {**hub, "HF_ENDPOINT": f"{hub['HF_ENDPOINT']}/nothing", "HF_HOME": f"{hub['HF_HOME']}/2"}
    ended = python(gone, EVAL, *asked, "piqa")
    assert ended.returncode == 2
    said = " ".join(ended.stderr.split())
    assert "task 'piqa': baber/piqa cannot be fetched from the hub (DatasetNotFoundError" in said
    assert "or pass a folder with its file (--data)" in said
    assert "Traceback" not in ended.stderr


def test_a_task_that_is_not_on_the_hub(
    bytes_run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TaskError, match="task 'cbt_style' is not on the hub; pass a folder"):
        list(hub_records("cbt_style", TASKS["cbt_style"].hub))
    monkeypatch.setitem(sys.modules, "datasets", None)  # as without the extra
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(bytes_run), "--tasks", "piqa", "--data", "hub"])
    assert ended.value.code == 2
    assert "pip install 'moebius[hub]'" in " ".join(capfd.readouterr().err.split())
