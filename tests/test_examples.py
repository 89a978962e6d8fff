"""The examples of a router, a loss, a dispatcher and a source work on two ranks with shared
experts.

docs/extend.md shows them. The ranks find them like a job's, through `MOEBIUS_FOLDER`.
"""

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bytes_run import prepare_bytes
from meshes import meshed, model_on
from pairwise import slow_but
from parts import make_config
from torch import Tensor
from torch_modes import counted_flops
from trained import by_step, different, newest_state, run_training
from world import run_ranks

from moebius.data_pipeline.make.prepare import prepare
from moebius.model.config.model_config import ModelConfig
from moebius.model.cost import count_parameters, forward_flops, is_upper_bound
from moebius.model.execution.depth_losses import weighted_losses
from moebius.model.execution.recompute import Recompute
from moebius.model.initialise import initialise
from moebius.model.loops.steps import PassOptions
from moebius.model.transformer import Transformer
from moebius.planning.communication import dispatch_direction, exchange_traffic
from moebius.planning.workload import Bank
from moebius.plugins import FOLDER, PluginError, import_own
from moebius.train.config.run_config import Config

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ROUTER, DISPATCHER = "add_a_router:TopPRouter", "add_a_dispatcher:HALF_WIDTH"
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
LOSS, SOURCE = "add_a_loss:read_early", "python:add_a_source:walks?stay=0.9&documents=64"


@pytest.fixture(autouse=True)
def _started_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(EXAMPLES))


def part_of(path: str) -> Any:
    return import_own(path, where="a test", wants="anything", fits=lambda found: True)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_bytes(tmp_path_factory.mktemp("data"))


def train_on_ranks(config: Config, run_dir: Path, num_ranks: int = 2) -> list[dict[str, Any]]:
    """Returns the steps' records."""
    there = {FOLDER: str(EXAMPLES)}
    ended = run_ranks(run_training, num_ranks, config, run_dir, environment=there)
    assert ended == ["finished"] * num_ranks
    return list(by_step(run_dir).values())


def small(shards: Path, **changes: Any) -> Config:
    sizes = {"steps": 6, "micro_batch": 4}
    return make_config(shards, **{"mesh": {"ep": 2}, "train": sizes, "data__seq_len": 32} | changes)


# The router -----------------------------------------------------------------------------------------------------------


def model_with_the_router() -> ModelConfig:
    attention = {"kind": "dense", "num_heads": 2, "d_head": 8}
    router = {"kind": ROUTER, "p": 0.5}
    return make_config(model__attention=attention, model__feed_forward__router=router).model


def tokens_of(rank: int) -> Tensor:
    return torch.randint(257, (3, 7), generator=torch.Generator().manual_seed(rank))


def test_a_row_gets_as_many_experts_as_it_takes() -> None:
    """A loop over rows adds experts until the earlier ones' probability reaches p."""
    router_class = part_of(ROUTER)
    config = router_class.Config(kind=ROUTER, p=0.6)
    router = router_class(config, 5, 6, init=lambda shape, generator: torch.randn(shape))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    x_TD = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    routes = router(x_TD, batch_size=4).routes
    found: list[dict[int, float]] = [{} for _ in x_TD]
    for row, expert, weight in zip(routes.source_N, routes.expert_N, routes.weight_N, strict=True):
        found[row][expert.item()] = weight.item()
    for x_D, chosen in zip(x_TD, found, strict=True):
        p_E = (router.weight @ x_D).softmax(0)
        expected, total = {}, 0.0
        for expert in p_E.argsort(descending=True).tolist():
            if total >= 0.6:
                break
            expected[expert] = pytest.approx(p_E[expert].item(), rel=1e-5)
            total += p_E[expert].item()
        assert chosen == expected
    assert len({len(chosen) for chosen in found}) > 2  # rows do differ
    assert torch.equal(routes.source_N, routes.target_N)


def test_the_family_knows_what_the_router_costs() -> None:
    config = model_with_the_router()
    assert is_upper_bound(config)
    assert forward_flops(config, 9).training == counted_flops(config, 9)
    assert count_parameters(config, 9).active == count_parameters(config, 9).total


def logits_on_ranks() -> Tensor:
    with meshed(ep=2) as (process, mesh):
        return model_on(mesh, model_with_the_router())(tokens_of(process.rank)).logits_BSV.detach()


def test_the_router_is_spread_over_ranks_without_another_line() -> None:
    model = Transformer(model_with_the_router())
    initialise(model, 0)
    found = run_ranks(logits_on_ranks, 2, environment={FOLDER: str(EXAMPLES)})
    for rank, logits_BSV in enumerate(found):
        torch.testing.assert_close(logits_BSV, model(tokens_of(rank)).logits_BSV, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_router_trains_on_two_ranks(shards: Path, tmp_path: Path) -> None:
    router = {"kind": ROUTER, "p": 0.5}
    config = small(shards, model__feed_forward__router=router)
    steps = train_on_ranks(config, tmp_path / "run")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.05
    routes = {step["exchange"]["0/feed_forward"]["rows_one_per_route"] for step in steps}
    assert len(routes) > 1, "the number of experts follows the tokens"


def test_a_router_knows_its_depth_step_whatever_is_recomputed() -> None:
    router = {"kind": "add_a_router_per_loop:PerLoopRouter", "top_k": 2, "num_steps": 4}
    shape = {"num_layers": 4, "layers_per_group": 1}
    config = make_config(model=shape, model__feed_forward__router=router).model
    found: list[dict[str, Tensor]] = []
    for recompute in RECOMPUTE:
        model = Transformer(config)
        initialise(model, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            tokens = tokens_of(number)
            options = PassOptions(recompute=recompute)
            output = model(tokens[:, :-1], targets_BS=tokens[:, 1:], options=options)
            optimizer.zero_grad()
            (output.cross_entropy + output.regularisation_B.sum()).backward()
            optimizer.step()
        found.append(model.state_dict())
    assert [different(found[0], other) for other in found[1:]] == [[], []]
    [learned_L] = [t for key, t in found[0].items() if key.endswith("router.log_temperature")]
    assert len(set(learned_L.tolist())) == 4


def test_a_router_that_counts_its_calls_is_noticed_under_recomputation() -> None:
    config = make_config(model__feed_forward__router={"kind": "token_choice", "top_k": 2}).model
    model = Transformer(config)
    initialise(model, 0)
    router: Any = next(router for _, kind, router in model.routers() if kind == "feed_forward")
    router.calls = 0

    def count(*_: Any) -> None:
        router.calls += 1

    router.register_forward_hook(count)
    model(tokens_of(0), options=PassOptions(recompute="none"))
    with pytest.raises(PluginError, match=r"feed_forward\.calls.*reads_step"):
        model(tokens_of(0), options=PassOptions(recompute="full"))


# The dispatcher -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("recompute", slow_but(["none", "selective"], "none"))
def test_the_dispatcher_gives_the_bits_of_the_oracle_where_rows_are_bfloat16(
    shards: Path, tmp_path: Path, recompute: str
) -> None:
    """`alltoall` equals one rank bit for bit."""
    changes = {"train__precision": "bfloat16", "train__recompute": recompute}
    found = {}
    for name in (DISPATCHER, "alltoall"):
        run_dir = tmp_path / name.partition(":")[0]
        steps = train_on_ranks(small(shards, mesh__dispatcher=name, **changes), run_dir)
        found[name] = [step["loss"] for step in steps], newest_state(run_dir)
    (ours, own), (theirs, oracle) = found.values()
    assert ours == theirs
    assert ours[-1] < ours[0] - 0.05
    assert not different(own, oracle)


@pytest.mark.slow
def test_the_dispatcher_halves_the_bytes_of_float32(shards: Path, tmp_path: Path) -> None:
    sent = {}
    for name in (DISPATCHER, "alltoall"):
        config = small(shards, mesh__dispatcher=name, mesh__check_every=1)
        steps = train_on_ranks(config, tmp_path / name.partition(":")[0])
        sent[name] = steps[0]["exchange"]["0/feed_forward"]["bytes_intra_node"], steps[-1]["loss"]
    (ours, our_loss), (theirs, their_loss) = sent.values()
    width, gates = 16, 2  # the gate weights of the way there stay float32
    routes = theirs / (4 * (2 * width + 1))
    assert ours == routes * (2 * 2 * width + 2 * gates)
    assert our_loss == pytest.approx(their_loss, abs=0.01)
    assert our_loss != their_loss


def test_the_planner_knows_the_dispatcher() -> None:
    bank = Bank("experts", "feed_forward", 16, 4, 512, 512, 128, 0)
    own, alltoall, dedup = (
        exchange_traffic(
            dispatch_direction(bank, 2), tokens=64, ep=4, ranks_per_node=2, dispatcher=name
        )
        for name in (DISPATCHER, "alltoall", "dedup")
    )
    assert own == alltoall != dedup


# The loss -------------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_all_logits() -> None:
    """Reads out every state but the last with whole logits; deeper steps count more."""
    model = Transformer(make_config().model)
    initialise(model, 0)
    tokens = torch.randint(257, (3, 9), generator=torch.Generator().manual_seed(0))
    without = model(tokens[:, :-1], targets_BS=tokens[:, 1:])
    options = PassOptions(depth_losses=weighted_losses({f"{LOSS}?power=2": 0.5}))
    output = model(tokens[:, :-1], targets_BS=tokens[:, 1:], options=options)
    states: list[Tensor] = []
    for layer in model.group:
        layer.register_forward_hook(lambda *call: states.append(call[-1][0]))
    model(tokens[:, :-1], targets_BS=tokens[:, 1:])
    assert model.final_norm is not None
    expected = torch.nn.functional.cross_entropy(
        model.head(model.final_norm(states[0])).mT, tokens[:, 1:]
    )
    value_B = output.auxiliary["read_early?power=2"]
    torch.testing.assert_close(value_B, expected.detach().expand(3))
    added_B = output.regularisation_B - without.regularisation_B
    torch.testing.assert_close(added_B, 0.5 * expected.expand(3), rtol=0, atol=1e-6)
    model.eval()
    assert not model(tokens[:, :-1], targets_BS=tokens[:, 1:]).regularisation_B.any()


@pytest.mark.slow
def test_the_loss_teaches_every_depth_step_and_two_ranks_equal_one_process(
    shards: Path, tmp_path: Path
) -> None:
    sharded = small(shards, train__losses={LOSS: 0.5}, mesh__sharding="fsdp")
    steps = train_on_ranks(sharded, tmp_path / "two")
    alone = small(shards, train__losses={LOSS: 0.5}, mesh={"ep": 1})
    for ours, theirs in zip(steps, train_on_ranks(alone, tmp_path / "one", 1), strict=True):
        for name in ("loss", "regularisation"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
    first, *_, last = steps
    early = [step["auxiliary_losses"]["read_early"] for step in (first, last)]
    assert early[1] < early[0] - 0.05
    assert last["loss"] < first["loss"] - 0.05


# The source -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_source_has_the_entropy_that_it_says(tmp_path: Path) -> None:
    config = make_config(
        tmp_path / "shards",
        prepare__input=[SOURCE],
        prepare__shuffle_documents=True,
        data__seq_len=64,
        optim={"learning_rate": 2e-2, "warmup_steps": 5, "decay_steps": 60},
        train={"steps": 60, "log_every": 1},
    )
    prepare(config.prepare, config.data.directory)
    steps = train_on_ranks(config, tmp_path / "run", 1)
    part_of("add_a_source:walks")
    at_best = sys.modules["add_a_source"].entropy(0.9)
    assert at_best == pytest.approx(0.325 + 0.1 * math.log(26), rel=0.1)
    last = sum(step["loss"] for step in steps[-5:]) / 5
    assert at_best - 0.05 < last < math.log(26) < steps[0]["loss"]


# As a reader runs them ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["router", "loss", "dispatcher", "source"])
def test_the_example_runs_and_draws_its_picture(name: str, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / f"add_a_{name}.py", tmp_path)
    settings = (EXAMPLES / "small.toml").read_text(encoding="utf-8")
    (tmp_path / "small.toml").write_text(settings.replace("steps = 120", "steps = 3"))
    command = [sys.executable, f"add_a_{name}.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"add_a_{name}.png").stat().st_size > 10_000
    picture = EXAMPLES.parent / "docs" / f"add_a_{name}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
