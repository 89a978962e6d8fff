"""A user's own parts, named as `module:name`: they work like built-in ones and survive a resume.

Anything wrong with one is one clear error.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bytes_run import prepare_bytes
from parts import make_config
from tiny_job import MOEBIUS
from torch import Tensor
from trained import by_step, column, different, newest_state, run_training
from world import run_ranks

import moebius
from moebius.data_pipeline.words import run_and_step
from moebius.distributed.checkpoint.format import find_checkpoint, read_meta
from moebius.distributed.process.agreement import AgreementError
from moebius.evaluation.zero_shot import chosen_tasks
from moebius.export.hf.model_folder import check_promises
from moebius.plugins import FOLDER, PluginError
from moebius.train import __main__ as program
from moebius.train import optim
from moebius.train.config.errors import EXIT_MISTAKE
from moebius.train.config.reference import commented
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.loop import train
from moebius.train.metrics.spikes import SkipPolicy

PARTS = """
import torch
from torch import nn
from moebius.evaluation.tasks.table import TASKS
from moebius.model.attention.attention import DenseAttention
from moebius.model.config.attention_config import WithPositionsConfig
from moebius.model.initialise import ones, parameter
from moebius.model.layers import LayerNorm
from moebius.model.routers.router import Router, RouterConfig
from moebius.model.routers.sigmoid import SigmoidConfig, SigmoidRouter
from moebius.train.optim import make_optimizer
from moebius.train.config.schedule import SCHEDULE

def squared_relu(z):
    return z.relu().square()

def swish(z):
    return z * z.sigmoid()

def first_row(z):
    return z[:1]

class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = parameter(width, init=ones)

    def forward(self, x):
        return nn.functional.rms_norm(x.float(), self.weight.shape, self.weight)

class SameNorm(LayerNorm):
    pass

def sgd(named_parameters, config, momentum=0.9):
    parameters = [parameter for _, parameter in named_parameters]
    return torch.optim.SGD(parameters, lr=config.learning_rate, momentum=momentum)

def adamw(named_parameters, config):
    return make_optimizer(config, named_parameters)

def adafactor(named_parameters, config):
    return torch.optim.Adafactor([parameter for _, parameter in named_parameters])

class Everything(torch.optim.Optimizer):
    # state that starts as a copy of the weights, numbers in groups, and steps counted from 1
    def __init__(self, groups):
        super().__init__(groups, {"distance": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        moved = torch.zeros(())
        for group in self.param_groups:
            group.setdefault("calls", 0)
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(z=p.clone(), average=p.clone(), step=1)
                moved += (p.grad * (state["z"] - p)).sum().abs() + p.grad.abs().max()
        torch.distributed.all_reduce(moved)
        for group in self.param_groups:
            group["calls"] += 1
            group["distance"] = max(group["distance"], moved.item() / group["calls"])
            for p in group["params"]:
                state = self.state[p]
                rate = group["lr"] * min(group["distance"], 1) / state["step"] ** 0.5
                state["z"].sub_(rate * p.grad)
                p.lerp_(state["z"], 1 / group["calls"])
                state["average"].lerp_(p, 0.5)
                state["step"] += 1

def everything(named_parameters, config):
    [(_, embedding), *others] = named_parameters
    frozen = {"params": [embedding], "lr": 0.0}
    rest = [parameter for _, parameter in others]
    return Everything([frozen, {"params": rest, "lr": 2 * config.learning_rate}])

def in_a_tensor(named_parameters, config):
    rate = torch.tensor(config.learning_rate)
    return torch.optim.AdamW([p for _, p in named_parameters], lr=rate, foreach=False)

class Elsewhere(torch.optim.SGD):
    def step(self, closure=None):
        self.state["all"] = 1

def elsewhere(named_parameters, config):
    return Elsewhere([parameter for _, parameter in named_parameters])

def forgetful(named_parameters, config):
    return torch.optim.SGD([parameter for _, parameter in named_parameters[1:]])

def none(*given):
    return None

def constant(step, config, factor=1.0):
    return factor * config.learning_rate

def cosine(step, config):
    return torch.tensor(SCHEDULE.get("cosine")(step, config), dtype=torch.float64)

def load_cost(mean, fraction):
    return fraction.shape[-1] * fraction

class OwnRouterConfig(SigmoidConfig):
    kind: str
    shift: float = 0.0

class OwnRouter(SigmoidRouter):
    Config = OwnRouterConfig

class OtherForward(OwnRouter):
    def forward(self, x):
        return super().forward(x)

class NoPromises(Router):
    Config = RouterConfig

class NoForward(OwnRouter):
    forward = Router.forward

class OtherConfig(OwnRouter):
    Config = dict

def no_rate(named_parameters, config):
    return torch.optim.SGD(named_parameters, config)

def no_states(states):
    return states.hidden.mean()

class OwnAttentionConfig(WithPositionsConfig):
    pass

class OwnAttention(DenseAttention):
    Config = OwnAttentionConfig

TASK = TASKS["piqa"]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns the command's folder, the only one with the module."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "parts_of_a_test.py").write_text(PARTS, encoding="utf-8")
    monkeypatch.setenv(FOLDER, str(tmp_path / "own"))
    before = list(sys.path)
    yield tmp_path / "own"
    sys.path[:] = before
    sys.modules.pop("parts_of_a_test", None)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_bytes(tmp_path_factory.mktemp("data"))


def trained(config: Config, run_dir: Path) -> list[float]:
    """Returns the losses of all the run's steps so far."""
    run_dir.mkdir(exist_ok=True)
    config.save(run_dir / "config.json")
    assert train(Config.load(run_dir / "config.json"), run_dir) == "finished"
    return [line["loss"] + line["regularisation"] for line in by_step(run_dir).values()]


DENSE = {"kind": "dense", "num_heads": 2, "d_head": 8}
SIGMOID = {"kind": "sigmoid", "top_k": 2, "balance_form": "load"}
OWN_ROUTER = {"kind": "parts_of_a_test:OwnRouter", "top_k": 2}


@pytest.mark.quick(1)
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("key", "own", "known"),
    [
        ("model__norm_layer", "SameNorm", "layernorm"),
        ("optim__kind", "adamw", "adamw"),
        ("optim__schedule", "cosine", "cosine"),
        ("model__feed_forward__activation", "swish", "silu"),
        ("model__feed_forward__router__balance_form", "load_cost", "load"),
        ("model__feed_forward__router__kind", "OwnRouter", "sigmoid"),
        ("model__attention__kind", "OwnAttention", "dense"),
    ],
)
def test_a_part_like_the_built_in_one_trains_to_the_same_losses(
    key: str, own: str, known: str, shards: Path, tmp_path: Path
) -> None:
    losses = []
    for name in (f"parts_of_a_test:{own}", known):
        changes: dict[str, Any] = {
            "model__feed_forward__router": SIGMOID,
            "model__attention": DENSE,
            "model__feed_forward__expert_bias": True,
            "model__feed_forward__num_shared_experts": 1,
        }
        section = key.removesuffix("__kind")
        change = {section: changes[section] | {"kind": name}} if section in changes else {key: name}
        config = make_config(shards, **changes | change)
        assert Config.model_validate(config.model_dump(mode="json")) == config
        assert name in commented(config)
        losses.append(trained(config, tmp_path / name.partition(":")[0]))
    exact = own not in ("swish", "load_cost")
    assert losses[0] == (losses[1] if exact else pytest.approx(losses[1], rel=1e-4))
    assert losses[0][-1] < losses[0][0]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["sgd", "sgd?momentum=0", "adamw"])
def test_a_run_with_own_parts_resumes_bit_for_bit(
    optimizer: str, shards: Path, tmp_path: Path
) -> None:
    def config(steps: int) -> Config:
        return make_config(
            shards,
            optim={"kind": f"parts_of_a_test:{optimizer}", "learning_rate": 0.1},
            optim__schedule="parts_of_a_test:constant?factor=0.5",
            model__norm_layer="parts_of_a_test:RMSNorm",
            model__feed_forward__activation="parts_of_a_test:squared_relu",
            train__steps=steps,
        )

    whole = trained(config(4), tmp_path / "whole")
    trained(config(2), tmp_path / "halves")
    assert trained(config(4), tmp_path / "halves") == whole
    assert column(tmp_path / "whole", "learning_rate") == [0.05] * 4


@pytest.mark.slow
def test_an_own_optimizers_groups_rates_and_state_are_its_own(
    folder: Path, shards: Path, tmp_path: Path
) -> None:
    def run(name: str, steps: int) -> dict[str, Tensor]:
        config = make_config(
            shards,
            optim={"kind": "parts_of_a_test:everything", "learning_rate": 0.05, "decay_steps": 4},
            train__steps=steps,
            mesh__ep=2,
        )
        run_ranks(run_training, 2, config, tmp_path / name, environment={FOLDER: str(folder)})
        return newest_state(tmp_path / name)

    whole, half = run("whole", 4), run("halves", 2)
    resumed = run("halves", 4)
    assert not different(whole, resumed)
    assert column(tmp_path / "halves") == column(tmp_path / "whole")
    for moment in ("z", "average"):  # of the frozen group
        assert torch.equal(whole[f"optimizer.{moment}.embedding"], half["model.embedding"])
    changed = [name for name in different(half, whole) if name.startswith("model.")]
    assert "model.embedding" not in changed
    assert len(changed) > 10
    meta = read_meta(find_checkpoint(tmp_path / "whole", None)).meta
    assert [group["calls"] for group in meta["groups"]] == [4, 4]
    assert meta["groups"][1]["distance"] > 1e-3


def test_an_optimizer_that_changes_more_than_numbers_of_a_group_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(2, 2)
    group = {"params": model.parameters(), "mode": "slow", "calls": 0}
    own = torch.optim.SGD([group], lr=0.1)
    monkeypatch.setattr(optim, "make_optimizer", lambda *_, **__: own)
    assert optim.optimizer_of(optim.OptimConfig(), model) is own
    own.param_groups[0]["calls"] = 1
    assert optim.changed_numbers(own) == [{"calls": 1}]
    own.param_groups[0]["mode"] = "fast"
    with pytest.raises(PluginError, match="SGD changes 'mode' of a group, a str"):
        optim.changed_numbers(own)


@pytest.mark.slow
def test_a_run_whose_first_updates_were_skipped_resumes(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(steps: int) -> Config:
        return make_config(shards, optim={"kind": "parts_of_a_test:everything"}, train__steps=steps)

    with monkeypatch.context() as patch:
        patch.setattr(SkipPolicy, "why_skipped", lambda *given: ("no targets", None))
        trained(config(2), tmp_path / "run")
    assert not any(name.startswith("optimizer.") for name in newest_state(tmp_path / "run"))
    trained(config(4), tmp_path / "run")
    meta = read_meta(find_checkpoint(tmp_path / "run", None)).meta
    assert meta["progress"]["updates"] == 2
    assert meta["groups"][0]["calls"] == 2


ROUTER, ACTIVATION = "model__feed_forward__router__kind", "model__feed_forward__activation"


def changed(key: str, own: str) -> dict[str, Any]:
    """Returns the change that puts an own part there; of a loss, with its weight."""
    name = f"parts_of_a_test:{own}"
    return {key: {name: 1.0} if key == "train__losses" else name}


@pytest.mark.parametrize(
    ("key", "own", "told"),
    [
        (ROUTER, "OtherForward", "unexpected keyword argument 'batch_size'"),
        (ROUTER, "NoForward", "NoForward must implement forward"),
        ("optim__kind", "no_rate", "'OptimConfig' and 'float'"),
        ("optim__kind", "swish", "cannot be called"),
        ("train__losses", "no_states", "has no attribute 'hidden'"),
    ],
)
def test_a_rank_says_that_no_restart_mends_a_part_of_another_kind(
    key: str,
    own: str,
    told: str,
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (run := tmp_path / "run").mkdir()
    make_config(shards, **changed(key, own)).save(run / "config.json")
    monkeypatch.setattr(sys, "argv", ["train", str(run)])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == EXIT_MISTAKE
    assert told in capfd.readouterr().err


@pytest.mark.parametrize(
    ("key", "own", "message"),
    [
        ("optim__kind", "in_a_tensor", "keeps the tensor 'lr' in a group: keep a number there"),
        ("optim__kind", "elsewhere", "Elsewhere keeps state under 1 other keys than parameters"),
        ("optim__kind", "TASK", r"parts_of_a_test:TASK is a .*: it must be a function of \(named"),
        ("optim__kind", "none", "returned a NoneType: it must return a torch.optim.Optimizer"),
        ("optim__kind", "forgetful", r"leaves out 1 of \d+ parameters, for example embedding"),
        ("optim__kind", "adafactor", r"'\w+_var' .* checkpoints hold tensors of a parameter's own"),
        ("optim__schedule", "nothing", "optim.schedule: parts_of_a_test has no 'nothing'"),
        ("optim__schedule", "none", "returned None for step 0: it must return the learning rate"),
        ("mesh__dispatcher", "none", "none is a function .*: it must be a DispatcherEntry"),
        ("model__norm_layer", "none", "norm_layer: .* it must be a subclass of torch.nn.Module"),
        (
            ACTIVATION,
            "first_row",
            r"made \(1, \d+\) of \(\d+, \d+\): it must act element by element",
        ),
        ("train__losses", "none", "none returned NoneType: it must return one value per sequence"),
    ],
)
def test_what_is_wrong_with_a_part_is_one_clear_error(
    key: str, own: str, message: str, shards: Path, tmp_path: Path
) -> None:
    with pytest.raises(PluginError, match=message):
        trained(make_config(shards, **changed(key, own)), tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model__attention__kind", "parts_of_a_test:none", "a subclass of Attention whose Config"),
        (ROUTER, "parts_of_a_test:OwnAttention", "it must be a subclass of Router"),
        (ROUTER, "parts_of_a_test:OtherConfig", "it must be a subclass of Router that sets Config"),
        (ROUTER, "parts_of_a_test:NoPromises", "'parts_of_a_test:NoPromises' must define promises"),
        (ROUTER[:-6], OWN_ROUTER | {"shfit": 1}, "has no key 'shfit'.*did you mean shift"),
    ],
)
def test_a_configuration_refuses_what_is_no_part(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**{key: value})


@pytest.mark.slow
def test_a_checkpoint_is_loaded_where_its_model_s_parts_are(
    folder: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts needed only for training may be absent."""
    trained(make_config(shards, model__feed_forward__router=OWN_ROUTER), tmp_path / "router")
    trained(make_config(shards, optim__kind="parts_of_a_test:adamw"), tmp_path / "optimizer")
    assert moebius.load(tmp_path / "router").config.model.experts is not None
    monkeypatch.setenv(FOLDER, str(tmp_path))
    sys.path.remove(str(folder))
    del sys.modules["parts_of_a_test"]
    with pytest.raises(ConfigError, match=r"there is no module 'parts_of_a_test': start from the"):
        moebius.load(tmp_path / "router")
    assert moebius.load(tmp_path / "optimizer").step == 4


def test_ranks_compare_the_modules_of_own_parts(shards: Path, tmp_path: Path) -> None:
    """One of two ranks has another file of that name."""
    config = make_config(shards, mesh__ep=2, optim__kind="compared_parts:adamw")
    (tmp_path / "run").mkdir()
    config.save(tmp_path / "run" / "config.json")
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "compared_parts.py").write_text(PARTS + "\n" * rank)
    for found in run_ranks(refusal, 2, str(tmp_path)):
        assert "module compared_parts" in found


def refusal(folder: str) -> str:
    os.environ[FOLDER] = str(Path(folder, os.environ["RANK"]))
    with pytest.raises(AgreementError) as caught:
        train(Config.load(Path(folder, "run", "config.json")), Path(folder, "run"))
    return str(caught.value)


def test_no_model_with_own_parts_is_exported_to_transformers() -> None:
    changes = changed("model__norm_layer", "RMSNorm")
    model = make_config(model__feed_forward__router=OWN_ROUTER, **changes).model
    message = r"model.norm_layer='parts_of_a_test:RMSNorm' and model.feed_forward.router.kind=.*cannot be exported"
    with pytest.raises(ConfigError, match=message):
        check_promises(model)


def test_a_task_of_ones_own_is_scored_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "TASK.jsonl").touch()
    assert list(chosen_tasks(["parts_of_a_test:TASK"], tmp_path)) == ["TASK"]
    with pytest.raises(PluginError, match="--tasks: parts_of_a_test:none is a function"):
        chosen_tasks(["parts_of_a_test:none"], tmp_path)


@pytest.mark.slow
def test_the_ranks_of_a_job_import_from_the_folder_of_the_command(
    folder: Path, shards: Path, tmp_path: Path
) -> None:
    """Python itself does not search there; a missing module is reported before ranks start."""
    config = make_config(
        shards,
        prepare__input=[str(shards.parent / "text.jsonl")],
        model__feed_forward__router=OWN_ROUTER,
        mesh__ep=2,
        job__ranks_per_node=2,
    )
    (tmp_path / "asked").mkdir()
    config.save(tmp_path / "asked" / "config.json")
    environment = {key: value for key, value in os.environ.items() if key != FOLDER}
    environment["PYTHONSAFEPATH"] = "1"

    def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MOEBIUS, *words],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )

    given = ("train", str(tmp_path / "asked" / "config.json"), "--run-dir", str(tmp_path / "run"))
    done = run(*given, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    refused = run("resume", str(tmp_path / "run"), cwd=tmp_path)
    assert refused.returncode == 2
    assert "there is no module 'parts_of_a_test'" in " ".join(refused.stderr.split())
    again = run("resume", str(tmp_path / "run"), "train.steps=6", cwd=folder)
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.parametrize(
    ("named", "run", "step"),
    [
        ("a", "a", None),
        ("a@100", "a", 100),
        ("a@step_00000100", "a", 100),
        ("a@last", "a", 100),
        ("a/checkpoints/step_00000100", "a", 100),
        ("folder@7", "folder@7", None),
        ("folder@7@8", "folder@7", 8),
        ("folder@7/checkpoints/step_00000008", "folder@7", 8),
        ("copied/step_00000100", "copied/step_00000100", None),
        ("nowhere@best", "nowhere@best", None),
        ("link", "a", 100),
    ],
)
def test_a_checkpoint_has_one_way_of_names(
    named: str, run: str, step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a/checkpoints/step_00000100", "folder@7", "copied/step_00000100"):
        Path(folder).mkdir(parents=True)
    Path("link").symlink_to("a/checkpoints/step_00000100")
    found = run_and_step(named)
    assert (Path(found[0]).resolve(), found[1]) == (Path(run).resolve(), step)
    assert run_and_step(named, step) == found
    if step is not None:
        with pytest.raises(ValueError, match="name two steps"):
            run_and_step(named, step + 1)
    with pytest.raises(ValueError, match=r"step follows the @, as in a@100, or best.* of step 100"):
        run_and_step("a@beast")
