"""Nothing from outside is unpickled, and no file of a stranger names code.

tests/cluster/nodes/test_rendezvous.py tests strangers at a job's ports.
"""

import ast
import contextlib
import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from bytes_run import prepare_bytes
from jobs import run_here
from made_folder import header_of, source_entry
from parts import make_config
from safetensors.torch import save_file
from small_corpus import shards_of_words

import moebius
from moebius import plugins
from moebius.cli.console import console, print_message, print_plain
from moebius.cli.main import build_parser
from moebius.cluster import submit as submitting
from moebius.cluster.job import JobError, Journal, Launch, State
from moebius.cluster.launch import launch_here, opened_folder, refusals
from moebius.cluster.places import ray_session
from moebius.data_pipeline.make import prepare as preparing
from moebius.data_pipeline.make.commit import ManifestWriter
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.distributed.checkpoint import pieces
from moebius.distributed.checkpoint.format import (
    CheckpointError,
    find_checkpoint,
    read_meta,
)
from moebius.distributed.checkpoint.source import SOURCE_FILES, Source, keep_small_files
from moebius.export.hf.family_folder import Origin, origin_of
from moebius.model.config.model_config import ModelConfig
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.families.import_run import import_published
from moebius.train.families.mixtral import MIXTRAL
from moebius.train.families.table import open_family
from moebius.train.loop import train
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record import run_folder
from moebius.train.record.run_folder import checkpoint_config, open_run

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
    ("train/families/import_run.py", "pickle"),  # an exception of torch.load is named by it
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


# A file names no code ----------------------------------------------------------------------------

EVIL = """
from pathlib import Path
Path("PWNED").touch()
from moebius.train.families.mixtral import MIXTRAL as FAMILY
from moebius.model.routers.sigmoid import SigmoidConfig, SigmoidRouter
from moebius.model.layers import LayerNorm
from moebius.distributed.dispatch.table import DISPATCHERS

class RouterConfig(SigmoidConfig):
    kind: str

class Router(SigmoidRouter):
    Config = RouterConfig

class Norm(LayerNorm): pass
def text(**settings): return ["Once upon a time."]
def number(*given, **settings): return given[0]
"""
NAME = "runs.foreign.evil"  # as Python finds it in the folder of the command


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns the folder of a command, with a stranger's folder runs/foreign that has a module."""
    (tmp_path / "runs" / "foreign").mkdir(parents=True)
    (tmp_path / "runs" / "foreign" / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    for name in (plugins.FOLDER, plugins.PARTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugins, "_foreign", set())
    monkeypatch.setattr(plugins, "_trusted", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(
        inspect, "_filesbymodname", {}
    )  # a package of one test, no package in another
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("runs", "evil", "mine", "linked", "alias"):
            del sys.modules[name]


def written(folder: Path, **changes: Any) -> Path:
    """Writes the config.json of a run with values that this process has not checked."""
    values = make_config().model_dump(mode="json")
    for path, value in changes.items():
        *sections, key = path.split("__")
        section = values
        for name in sections:
            section = section[name]
        section[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"


def of_run(place: Path, key: str, value: Any) -> None:
    """Does what `resume` does with a run's config.json."""
    config = Config.load(written(place / "runs" / "foreign", **{key: value}))
    refusals(config, place / "runs" / "new")
    with opened_folder(config, place / "runs" / "new"):
        preparing.prepare(config.prepare, place / "data")


def of_trunk(place: Path, key: str, value: Any) -> None:
    """Goes on with a run that says it branched off from a checkpoint."""
    folder = place / "runs" / "foreign"
    values = json.loads(written(folder, **{key: value}).read_text())
    source = Source(kind="branch", given="x", path=str(folder / "checkpoints" / "2"), digest="x")
    (folder / "source.json").write_text(source.as_text())
    (folder / "metrics.jsonl").write_text('{"kind": "train"}\n')
    meta = SimpleNamespace(meta={"config": values, "progress": {"step": 2}}, step=2)
    with mock.patch.object(run_folder, "read_meta", return_value=meta):
        run_folder.steps_before(folder, None)


def of_data(place: Path, key: str, value: Any) -> None:
    """Trains on prepared data whose header has other values of `prepare`."""
    asked = PrepareConfig(tokenizer="bytes").model_dump() | {key: value}
    config = PrepareConfig.model_validate(asked)
    spec = {"spec": config.spec, "spec_hash": config.spec_hash, "batch_tokens": 1}
    data = place / "runs" / "foreign"
    ManifestWriter(data).append(header_of([source_entry("text")], segment_tokens=1, **spec))
    found = resolve("own_text", [f"data.directory={data}"], RECIPES)
    assert getattr(found.prepare, key) == getattr(config, key)
    preparing.look_ahead(found.prepare, data)


def of_model_type(place: Path, key: str, value: str) -> None:
    """Opens a published folder."""
    folder = place / "runs" / "foreign"
    (folder / "config.json").write_text(json.dumps({key: value}))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    open_family(folder)


def of_source(place: Path, key: str, value: str) -> None:
    """Exports a run that says which family its published folder was of."""
    folder = place / "runs" / "foreign"
    source = Source(kind="folder", given="x", path="x", digest="x", family=value)
    assert key in source.model_fields_set
    (folder / "source.json").write_text(source.as_text())
    origin_of(folder, make_config().model)


def of_toml(place: Path, key: str, value: str) -> None:
    """Trains with a file that lies in a run."""
    folder = written(place / "runs" / "foreign").parent
    (folder / "checkpoints").mkdir()
    (folder / "mine.toml").write_text(f'{key} = "{value}"\n')
    resolve(str(folder / "mine.toml"), (), RECIPES).import_parts()


ROUTER = "model__feed_forward__router"
OPENED: list[tuple[Callable[[Path, str, Any], None], str, Callable[[str], Any]]] = [
    (of_model_type, "model_type", lambda name: f"{name}:FAMILY"),
    (of_source, "family", lambda name: f"{name}:FAMILY"),
    (of_toml, "recipe", lambda name: f"{name}:text"),
    (of_toml, "model.norm_layer", lambda name: f"{name}:Norm"),
    (of_trunk, f"{ROUTER}__kind", lambda name: f"{name}:Router"),
    (of_data, "input", lambda name: [f"python:{name}:text?language=en"]),
    (of_data, "filters", lambda name: [f"{name}:number"]),
    (of_data, "tokenizer", lambda name: f"python:{name}:text"),
    (of_run, f"{ROUTER}__kind", lambda name: f"{name}:Router"),
    (of_run, f"{ROUTER}__balance_form", lambda name: f"{name}:number"),
    (of_run, "model__feed_forward__activation", lambda name: f"{name}:number"),
    (of_run, "model__norm_layer", lambda name: f"{name}:Norm"),
    (of_run, "model__attention", lambda name: {"kind": f"{name}:Router"}),
    (of_run, "optim__kind", lambda name: f"{name}:number?momentum=0"),
    (of_run, "optim__schedule", lambda name: f"{name}:number"),
    (of_run, "mesh__dispatcher", lambda name: f"{name}:number"),
    (of_run, "train__losses", lambda name: {f"{name}:number?x=1": 1.0}),
    (of_run, "prepare__input", lambda name: [f"python:{name}:text"]),
    (of_run, "prepare__validation_input", lambda name: [f"python:{name}:text"]),
    (of_run, "prepare__filters", lambda name: [f"{name}:number"]),
    (of_run, "prepare__tokenizer", lambda name: f"python:{name}:text"),
]


@pytest.mark.parametrize(("opens", "key", "value"), OPENED)
def test_a_stranger_s_file_names_no_code(
    opens: Callable[[Path, str, Any], None], key: str, value: Callable[[str], Any], place: Path
) -> None:
    said = "--family module:name" if opens is of_model_type else f"{plugins.PARTS}={NAME}:"
    with pytest.raises(ValueError, match=said):
        opens(place, key, value(NAME))
    assert not (place / "PWNED").exists()


def linked(place: Path) -> str:
    (place / "linked.py").symlink_to(place / "runs" / "foreign" / "evil.py")
    return "linked:text"


def below_a_link(place: Path) -> str:
    (place / "alias").symlink_to(place / "runs" / "foreign")
    return "alias.evil:text"


def leads_out(place: Path) -> str:
    (place / "runs" / "foreign" / "evil.py").rename(place / "elsewhere.py")
    (place / "runs" / "foreign" / "evil.py").symlink_to(place / "elsewhere.py")
    return f"{NAME}:text"


def on_the_path(place: Path) -> str:
    sys.path.insert(0, str(place / "runs" / "foreign"))
    return "evil:text"


def beside_the_run(place: Path) -> str:
    """A stranger's archive with a run and a package around it."""
    (place / "runs" / "__init__.py").write_text(EVIL)
    return "runs:text"


def by_a_parent(place: Path) -> str:
    (place / "runs" / "foreign" / "__init__.py").write_text('open("PWNED", "w")')
    (place / "runs" / "foreign" / "more").mkdir()
    (place / "runs" / "foreign" / "more" / "part.py").write_text("text = print")
    return "runs.foreign.more.part:text"


def through_an_own_module(place: Path) -> str:
    (place / "mine.py").write_text("import os, subprocess\nfrom pathlib import Path\n")
    return "mine:os.system"


@pytest.mark.parametrize(
    "made",
    [
        *(linked, below_a_link, leads_out, on_the_path, beside_the_run, by_a_parent),
        through_an_own_module,
        *(lambda place: "os:system", lambda place: "subprocess:run", lambda place: "torch:save"),
        *(lambda place: "moebius.data_pipeline.files:write_atomically", lambda place: "this:c"),
        lambda place: "__main__:__loader__.load_module",
    ],
)
def test_a_stranger_s_name_leads_to_a_module_of_the_user_s_or_nowhere(
    made: Callable[[Path], str], place: Path
) -> None:
    """However Python would find it; the same name typed by the user is imported."""
    name = made(place)
    before = set(sys.modules)

    def read_and_import() -> Any:
        plugins.distrust({"some": [{"key": f"python:{name}?x=1"}]}, place / "runs" / "foreign")
        return plugins.import_own(name, where="key", wants="a function")

    with pytest.raises(plugins.PluginError, match=rf"type its key=value again, or .*={name}"):
        read_and_import()
    assert not (place / "PWNED").exists()
    assert "this" not in set(sys.modules) - before
    if not name.startswith(("this", "__main__")):  # which prints; which has no such function
        plugins.trust([f"some.key=['{name}']"])
        assert read_and_import()


def config_of_newest(run: Path) -> Config:
    """Reads the configuration in a checkpoint, as an export does."""
    checkpoint = find_checkpoint(run)
    return checkpoint_config(checkpoint, read_meta(checkpoint).meta)


def test_a_run_of_one_s_own_goes_on_with_its_own_parts(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the user's needs no word; one that lies in the run is run only if it is typed."""
    run = place / "runs" / "foreign"

    def everything() -> None:
        moebius.load(run)
        moebius.load_config(run, "train.steps=2")
        moebius.start_from(run, "own_text")
        config_of_newest(run)

    def forget() -> None:
        plugins._foreign.clear()
        plugins._trusted.clear()
        for name in ("runs", "runs.foreign", NAME):
            sys.modules.pop(name, None)
        (place / "PWNED").unlink(missing_ok=True)

    monkeypatch.setenv(plugins.PARTS, f"{NAME}:Router")
    router = {"kind": f"{NAME}:Router", "top_k": 2}
    config = make_config(prepare_bytes(place), model__feed_forward__router=router, train__steps=1)
    config.save(run / "config.json")
    assert train(config, run) == "finished"
    forget()
    everything()  # named in the environment
    monkeypatch.delenv(plugins.PARTS)
    forget()
    for opens in (
        lambda: moebius.load(run),
        lambda: moebius.load_config(run, "train.steps=2"),
        lambda: moebius.start_from(run, "own_text"),
        lambda: moebius.start_from(f"{run}@1", None, "train.steps=2"),
        lambda: config_of_newest(run),
    ):
        with pytest.raises(ValueError, match=f"MOEBIUS_PARTS={NAME}:Router before the command"):
            opens()
    assert not (place / "PWNED").exists()
    moebius.load_config(run, f"model.feed_forward.router.kind={NAME}:Router")  # typed
    forget()
    shutil.rmtree(place / "runs" / "foreign" / "__pycache__", ignore_errors=True)
    (place / "own" / "runs" / "foreign").mkdir(parents=True)
    (place / "own" / "runs" / "__init__.py").touch()
    (run / "evil.py").rename(place / "own" / "runs" / "foreign" / "evil.py")
    sys.path.insert(0, str(place / "own"))
    everything()  # a module of the user's
    assert plugins.PARTS not in os.environ
    environment = launch_here(Config.load(run / "config.json"), run).environment
    assert environment[plugins.PARTS] == f"{NAME}:Router"  # what ranks import is decided here


@pytest.mark.parametrize(
    ("address", "is_own"),
    [("192.0.2.7:6379", False), ("127.0.0.1:6379", True), ("auto", True), ("10.0.0.1:1", True)],
)
def test_only_the_user_names_a_cluster_of_the_network(
    address: str, is_own: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray runs what a cluster sends, so a stranger's journal names none."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:1")
    asked: list[Any] = []
    monkeypatch.setattr(submitting, "submit", lambda *_, **given: asked.append(given["address"]))
    run = place / "runs" / "foreign"
    config = Config.load(written(run))
    Journal(run).append(State.SUBMITTED, generation=0, reason="", details={"where": address})
    Journal(run).append(State.FAILED, generation=1, reason="")
    refused = pytest.raises(JobError, match=f"--address {address}")
    with contextlib.nullcontext() if is_own else refused:
        submitting.resume(config, run)
    submitting.resume(config, run, address=address)
    assert asked == [address] * (1 + is_own)


# Files that are copied ---------------------------------------------------------------------------


def to_a_file(kept: Path, secret: Path) -> None:
    (kept / "notes.txt").symlink_to(secret)


def to_a_folder(kept: Path, secret: Path) -> None:
    (kept / "assets").symlink_to(secret.parent)


def itself(kept: Path, secret: Path) -> None:
    kept.rmdir()
    kept.symlink_to(secret.parent)


def too_large(kept: Path, secret: Path) -> None:
    for number in range(3):
        (kept / f"{number}.bin_").write_bytes(b"x" * 400)


@pytest.mark.parametrize("plant", [to_a_file, to_a_folder, itself, too_large])
def test_a_run_gives_away_no_file_outside_it(
    plant: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in an export nor in a run that starts from it."""
    monkeypatch.setattr(pieces, "_MOST_SMALL_BYTES", 1000)
    (tmp_path / "home").mkdir()
    secret = tmp_path / "home" / "secret"
    secret.write_text("secret")
    run, new = tmp_path / "run", tmp_path / "new"
    for folder in (run / SOURCE_FILES, run / "checkpoints" / "step_00000001", new):
        folder.mkdir(parents=True)
    source = Source(
        kind="checkpoint", given="", path=str(run / "checkpoints" / "step_00000001"), digest=""
    )
    os.mkfifo(run / "fifo")
    (run / SOURCE_FILES / "LICENSE").write_text("free")
    keep_small_files(source, new)
    assert (new / SOURCE_FILES / "LICENSE").read_text() == "free"
    (run / SOURCE_FILES / "LICENSE").unlink()
    plant(run / SOURCE_FILES, secret)
    with pytest.raises(CheckpointError, match=r"is a link|at most"):
        keep_small_files(source, new)
    with pytest.raises(CheckpointError, match=r"is a link|at most"):
        assert Origin(MIXTRAL, run, ModelConfig()).files
    assert not list(new.rglob("*"))


def test_a_run_folder_is_the_owner_s_whatever_the_umask(tmp_path: Path) -> None:
    config = make_config()
    model = moebius.build(config)
    torch.save(dict(model.state_dict()), tmp_path / "weights.pth")
    umask = os.umask(0)
    try:
        open_run(config, tmp_path / "trained")
        with contextlib.suppress(ValueError):  # the names are not the published ones
            import_published(tmp_path / "weights.pth", tmp_path / "imported", config)
    finally:
        os.umask(umask)
    for run in tmp_path.glob("*ed"):
        assert run.stat().st_mode & 0o777 == 0o700, run


# What a terminal shows ---------------------------------------------------------------------------


def test_a_foreign_text_gives_a_terminal_no_orders(capsys: pytest.CaptureFixture[str]) -> None:
    foreign = "a\x1b]0;b\x1b[2Jc\x9b1m\u202ed"
    print_message("error", foreign)
    print_plain(foreign)
    console().print(foreign, markup=False)
    with pytest.raises(SystemExit):
        build_parser().parse_args(["train", "smoke", f"--step={foreign}"])
    shown = "".join(capsys.readouterr())
    assert shown.count(r"a\x1b]0;b\x1b[2Jc\x9b1m\u202ed") == 4
    assert not set(shown) & set("\x1b\x9b\u202e")
