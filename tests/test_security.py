"""Nothing from outside is unpickled: a text search, and a job that runs without pickle.

tests/cluster/nodes/test_rendezvous.py tests strangers at a job's ports.
"""

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import run_here
from parts import make_config
from small_corpus import shards_of_words

import moebius
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
    ("distributed/checkpoint/writing.py", "pickle"),  # it writes an index for others, reads none
    ("export/published.py", "pickle"),  # an exception of torch.load is named by it
    ("data_pipeline/make/pools.py", "pickle"),  # an exception is tried before it travels
}


def library() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] not in BESIDE_THE_LIBRARY:
            yield name, ast.parse(path.read_text(encoding="utf-8"))


# Calls that are safe with an option.
NEEDED = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}


def faults(tree: ast.AST) -> set[str]:
    """Returns unpickling words, and calls without the option that makes them safe."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias | ast.ImportFrom):
            named = node.name if isinstance(node, ast.alias) else node.module
            found |= set((named or "").split(".")) & UNPICKLES
        elif isinstance(node, ast.Name):
            found |= {node.id} & UNPICKLES
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & UNPICKLES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            safe = NEEDED.get(name)
            if name in BUILTINS or (safe and safe not in map(ast.unparse, node.keywords)):
                found.add(name)
    return found


def test_the_library_unpickles_nothing() -> None:
    found = {(name, fault) for name, tree in library() for fault in faults(tree)}
    assert found == ALLOWED


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
    assert (status.state, status.generation, status.step) == (State.SUCCEEDED, 2, 8), status
    starts = moebius.history(run_dir).records()
    assert any(line.get("resumed_from_step") in (2, 4) for line in starts)


@pytest.mark.parametrize(
    ("address", "answer", "allowed"),
    [
        ("192.0.2.7:6379", None, "1"),
        ("192.0.2.7:6379", ("UNAUTHENTICATED", "no token"), ""),
        ("192.0.2.7:6379", ("UNAVAILABLE", "gone"), ""),
        *((f"{host}:6379", None, "") for host in ("127.0.0.1", "[::1]", "localhost")),
        ("192.0.2.7:6379", None, ""),
    ],
)
def test_a_cluster_on_the_network_that_asks_for_no_token_is_refused(
    address: str, answer: tuple[str, str] | None, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "_ask_for_cluster_id", lambda *_: answer)
    monkeypatch.setattr(ray_session, "_check_reachable", lambda _: None)
    monkeypatch.setenv(ray_session.ALLOW_UNAUTHENTICATED, allowed)
    refused = pytest.raises(JobError, match=r"asks for no token.*--allow-unauthenticated")
    is_open = (answer, allowed) == (None, "") and address.startswith("192")
    with refused if is_open else contextlib.nullcontext():
        ray_session.refuse_unauthenticated(address)
