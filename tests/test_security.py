"""Nothing that comes from elsewhere is unpickled: the words are looked for, and a job runs without.

tests/cluster/nodes/test_rendezvous.py plays the stranger who knocks at a job's ports.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import run_here
from small_corpus import sentences
from test_main_job import make_config

from moebius.cluster.job import JobError, Launch, State
from moebius.cluster.places import ray_session
from moebius.data_pipeline.make.prepare import prepare
from moebius.train.record.run_folder import open_run

ROOT = Path(__file__).resolve().parents[1]
BESIDE_THE_LIBRARY = {"tests", "benchmarks", "examples", "docs", "build", ".venv", ".ci"}

# Whoever calls one of these runs what another process, or a file, says.
UNPICKLES = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("all_gather_object", "gather_object", "send_object_list", "recv_object_list"),
    *("broadcast_object_list", "scatter_object_list", "_object_to_tensor", "_tensor_to_object"),
    *("read_pickle", "load_module", "eval", "exec"),
    *("state_dict_saver", "async_save"),
}
ALLOWED = {
    ("distributed/checkpoint/reading.py", "pickle"): "an exception of torch.load is named by it",
    ("export/published.py", "pickle"): "an exception of torch.load is named by it",
    ("data_pipeline/make/pools.py", "pickle"): "an exception is tried before it travels",
}


def library() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] not in BESIDE_THE_LIBRARY:
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def words(tree: ast.AST) -> set[str]:
    """Everything that is imported or named."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found |= {part for module in modules for part in module.split(".")}
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def unsafe_calls(tree: ast.AST) -> list[str]:
    """Calls that are safe with an option, and lack it."""
    needed = {
        "torch.load": ("weights_only", True),
        "np.load": ("allow_pickle", False),
        "dcp_load": ("no_dist", True),
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in needed:
            continue
        option, value = needed[ast.unparse(node.func)]
        given = {word.arg: word.value for word in node.keywords}
        said = given.get(option)
        if not isinstance(said, ast.Constant) or said.value is not value:
            found.append(f"line {node.lineno}: {ast.unparse(node.func)} without {option}={value}")
    return found


def test_the_library_unpickles_nothing():
    found = {
        (name, word)
        for name, tree in library()
        for word in words(tree) & UNPICKLES
        if not (word in ("eval", "exec") and not calls_builtin(tree, word))
    }
    assert found == set(ALLOWED)
    assert {name: unsafe_calls(tree) for name, tree in library() if unsafe_calls(tree)} == {}


def calls_builtin(tree: ast.AST, word: str) -> bool:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Name) and called.id == word for called in calls)


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed as d; d.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list as tell",
        "import dill.source",
    ],
)
def test_a_planted_word_is_found(planted):
    assert words(ast.parse(planted)) & UNPICKLES


@pytest.mark.parametrize(
    "planted",
    ["torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)", "dcp_load(s, no_dist=x)"],
)
def test_a_planted_call_is_found(planted):
    assert unsafe_calls(ast.parse(planted))


RANK = """
import runpy, sys
import torch.distributed.distributed_c10d as c10d

def refuse(*_):
    raise AssertionError("an object collective was called")

c10d._object_to_tensor = c10d._tensor_to_object = refuse
runpy.run_module("moebius.train", run_name="__main__")
"""


@pytest.mark.slow
def test_a_job_that_saves_fails_and_resumes_calls_no_object_collective(tmp_path):
    """Also on our behalf: torch.distributed.checkpoint's collectives would be such."""
    (tmp_path / "text.txt").write_text("\n\n".join(sentences(1, 120)), encoding="utf-8")
    config = make_config(
        tmp_path,
        *("job.num_nodes=1", "job.ranks_per_node=2", "job.rehearse_failure_at_step=none"),
        *("mesh.dp_replicate=1", "train.steps=8", "train.eval_every=8", "checkpoint.every=2"),
    )
    run_dir = tmp_path / "run"
    open_run(config, run_dir)
    prepare(config.data, config.data.directory)
    launch = Launch(
        str(run_dir),
        ranks_per_node=2,
        command=(sys.executable, "-c", RANK, str(run_dir)),
        rehearse_failure_at_step=4,
    )
    status = run_here(launch)
    assert status.state is State.SUCCEEDED, status
    assert (status.generation, status.step) == (2, 8)
    history = (run_dir / "metrics.jsonl").read_text()
    assert '"resumed_from_step": 2' in history or '"resumed_from_step": 4' in history


@pytest.mark.parametrize(
    ("address", "answer", "allowed", "refused"),
    [
        ("192.0.2.7:6379", None, "", True),
        ("192.0.2.7:6379", None, "1", False),
        ("192.0.2.7:6379", ("UNAUTHENTICATED", "no token"), "", False),
        ("192.0.2.7:6379", ("UNAVAILABLE", "gone"), "", False),
        ("127.0.0.1:6379", None, "", False),
        ("[::1]:6379", None, "", False),
        ("localhost:6379", None, "", False),
    ],
)
def test_a_cluster_on_the_network_that_asks_for_no_token_is_refused(
    address: str,
    answer: tuple[str, str] | None,
    allowed: str,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_session, "_ask_for_cluster_id", lambda *_: answer)
    monkeypatch.setattr(ray_session, "_check_reachable", lambda _: None)
    monkeypatch.setenv(ray_session.ALLOW_UNAUTHENTICATED, allowed)
    if not refused:
        ray_session.refuse_unauthenticated(address)
        return
    with pytest.raises(JobError, match=r"asks for no token.*--allow-unauthenticated"):
        ray_session.refuse_unauthenticated(address)
