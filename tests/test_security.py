"""Nothing from outside is unpickled: a text search, and a job that runs without pickle.

tests/cluster/nodes/test_rendezvous.py tests strangers at a job's ports.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import run_here
from parts import make_config
from small_corpus import shards_of_words

from moebius.cluster.job import JobError, Launch, State
from moebius.cluster.places import ray_session
from moebius.train.record.run_folder import open_run

ROOT = Path(__file__).resolve().parents[1]
BESIDE_THE_LIBRARY = {"tests", "benchmarks", "examples", "docs", "build", ".venv", ".ci"}

# Whoever calls one of these runs what another process, or a file, says.
UNPICKLES = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("all_gather_object", "gather_object", "send_object_list", "recv_object_list"),
    *("broadcast_object_list", "scatter_object_list", "_object_to_tensor", "_tensor_to_object"),
    *("read_pickle", "load_module"),
    *("state_dict_saver", "state_dict_loader", "async_save"),
}
BUILTINS = {"eval", "exec"}  # as calls; `model.eval` is something else
ALLOWED = {
    ("distributed/checkpoint/loading.py", "pickle"): "an exception of torch.load is named by it",
    (
        "distributed/checkpoint/writing.py",
        "pickle",
    ): "it writes an index for others, and reads none",
    ("export/published.py", "pickle"): "an exception of torch.load is named by it",
    ("data_pipeline/make/pools.py", "pickle"): "an exception is tried before it travels",
}


def library() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] not in BESIDE_THE_LIBRARY:
            yield name, ast.parse(path.read_text(encoding="utf-8"))


# Calls that are safe with an option.
NEEDED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
}


def faults(tree: ast.AST) -> set[str]:
    """Returns unpickling words, and calls without the option that makes them safe."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found |= {part for module in modules for part in module.split(".")} & UNPICKLES
        elif isinstance(node, ast.Name):
            found |= {node.id} & UNPICKLES
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & UNPICKLES
        elif isinstance(node, ast.Call) and (fault := fault_of_call(node)):
            found.add(fault)
    return found


def fault_of_call(node: ast.Call) -> str | None:
    name = ast.unparse(node.func)
    if name in BUILTINS:  # `model.eval()` is none
        return name
    option, value = NEEDED.get(name, (None, None))
    given = {word.arg: word.value for word in node.keywords}.get(option)
    is_safe = isinstance(given, ast.Constant) and given.value is value
    return None if option is None or is_safe else f"{name} without {option}={value}"


def test_the_library_unpickles_nothing() -> None:
    found = {(name, fault) for name, tree in library() for fault in faults(tree)}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed as d; d.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list as tell",
        "import dill.source",
        "eval('1')",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f)",
        "from torch.distributed.checkpoint.state_dict_loader import load",
    ],
)
def test_a_planted_fault_is_found(planted: str) -> None:
    assert faults(ast.parse(planted))


RANK = """
import runpy, sys
import torch.distributed.distributed_c10d as c10d

def refuse(*_):
    raise AssertionError("an object collective was called")

c10d._object_to_tensor = c10d._tensor_to_object = refuse
runpy.run_module("moebius.train", run_name="__main__")
"""


@pytest.mark.slow
def test_a_job_that_saves_fails_and_resumes_calls_no_object_collective(tmp_path: Path) -> None:
    """Neither does torch.distributed.checkpoint on our behalf."""
    config = make_config(
        shards_of_words(tmp_path, 60),
        train__steps=8,
        checkpoint__every=2,
        job__ranks_per_node=2,
    )
    run_dir = tmp_path / "run"
    open_run(config, run_dir)
    command = (sys.executable, "-c", RANK, str(run_dir))
    launch = Launch(str(run_dir), ranks_per_node=2, command=command, rehearse_failure_at_step=4)
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
