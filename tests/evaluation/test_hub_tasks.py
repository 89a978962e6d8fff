"""Tasks from a local hub that serves the published sets in their own form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import serve_hub
from hub_sets import hub_repositories

from moebius.cli.main import main
from moebius.evaluation.tasks.hub import hub_records
from moebius.evaluation.tasks.table import TASKS
from moebius.evaluation.tasks.task import TaskError

SENTENCES = [f"It was the {n} th day , and `` she '' did n't go ." for n in range(20)]
COUNTS = {"hellaswag": 2, "lambada": 2, "blimp": 3, "cbt": 4, "piqa": 2, "arc_easy": 2}
COUNTS |= {"arc_challenge": 1, "winogrande": 1, "copa": 1, "openbookqa": 1, "boolq": 2, "siqa": 1}
COUNTS |= {"wsc273": 2}  # of the scored split; of blimp, the first phenomena

READ = """
import dataclasses, json, sys
from moebius.cli.main import main
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.evaluation.tasks.items import read_items, read_records
from moebius.evaluation.tasks.table import TASKS
from moebius.evaluation.tasks.task import Encoder

few = dataclasses.replace(TASKS["blimp"].hub, configurations=TASKS["blimp"].hub.configurations[:3])
found = {}
for name, task in (TASKS | {"blimp": dataclasses.replace(TASKS["blimp"], hub=few)}).items():
    if task.hub is not None:
        found[name] = [record for _, record in read_records("hub", name, task)]
        assert len(read_items(name, task, "hub", Encoder(BytesTokenizer(), 9999), 1).questions) == 1
print(json.dumps(found))
main(["eval", sys.argv[1], "--data", "hub", "--tasks", "piqa,arc_easy", "--json"])
"""


@pytest.mark.slow
def test_every_task_that_is_on_the_hub(tmp_path: Path, bytes_run: Path) -> None:
    """The conversions are compared with the harness in test_lm_eval_model.py, but CBT's."""
    pytest.importorskip("datasets", reason="the extra `hub`")
    with serve_hub(hub_repositories()) as (endpoint, _):
        hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", READ, str(bytes_run)]
        ended = subprocess.run(command, env=os.environ | hub, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "Generating" not in ended.stderr  # no progress bar without a terminal
    records, _, report = ended.stdout.partition("\n")
    found = json.loads(records)
    assert {name: len(of_task) for name, of_task in found.items()} == COUNTS
    assert [one["kind"] for one in found["cbt"]] == ["V", "P", "NE", "CN"]
    assert found["cbt"][0]["context"] == SENTENCES
    assert found["cbt"][0]["candidates"][-1] == found["cbt"][0]["answer"] == "V"
    tasks = json.loads(report)["tasks"]
    assert {name: task["items"] for name, task in tasks.items()} == {"piqa": 2, "arc_easy": 2}


def test_a_set_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `hub`")

    def fails(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    said = r"'piqa': baber/piqa cannot be fetched from the hub \(ConnectionError: no network\); .*--data"
    with pytest.raises(TaskError, match=said):
        list(hub_records("piqa", TASKS["piqa"].hub))


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
