"""The examples of a router and a dispatcher hold what they promise; docs/extend.md quotes them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from world import run_ranks

from moebius.cli.main import build_parser
from moebius.distributed.dispatch.table import DISPATCHERS
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.parallelize import build_model
from moebius.distributed.process.process import Process, start_process
from moebius.model.balance import RunningSum
from moebius.model.config.model_config import ModelConfig
from moebius.model.cost import count_parameters, counted_flops, forward_flops, is_upper_bound
from moebius.model.initialise import initialise
from moebius.model.routers.table import ROUTERS
from moebius.model.transformer import Transformer
from moebius.planning.communication import dispatch_direction, exchange_traffic
from moebius.planning.workload import Bank

ROOT = Path(__file__).resolve().parents[1]
DISPATCHER = ROOT / "examples" / "add_a_dispatcher.py"
ROUTER = ROOT / "examples" / "add_a_router.py"


def load_example(path: Path = ROUTER) -> ModuleType:
    """The example, whose router or dispatcher is registered."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example():
    yield load_example()
    del ROUTERS["top_p"]


def config_of(p: float) -> ModelConfig:
    return config_with({"kind": "top_p", "p": p})


def config_with(router: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dotted(
        {
            "vocab_size": 31,
            "d_model": 16,
            "num_layers": 2,
            "layers_per_group": 2,
            "attention.num_heads": 2,
            "attention.d_head": 8,
            "norm": "pre",
            "attention.kind": "dense",
            "feed_forward.num_experts": 6,
            "feed_forward.d_expert": 10,
            "feed_forward.router": router,
        }
    )


def tokens_of(rank: int) -> Tensor:
    return torch.randint(31, (3, 7), generator=torch.Generator().manual_seed(rank))


def built(config: ModelConfig, process: Process, *, dispatcher: str) -> Transformer:
    """Returns this rank's part of the model on two ranks, EP 2."""
    mesh = build_mesh(plan_layout(MeshConfig(ep=2, dispatcher=dispatcher), 2), process)
    options: dict[str, Any] = {"backend": "auto", "seed": 0, "device": process.device}
    return build_model(config, mesh, dispatcher=dispatcher, **options)


@pytest.mark.slow
def test_the_example_learns_and_says_so() -> None:
    done = subprocess.run(
        [sys.executable, ROUTER], capture_output=True, text=True, timeout=60, check=True
    )
    lines = re.findall(
        r"step (\d+)  loss ([\d.]+)  experts per token ([\d.]+)  load max/mean ([\d.]+)",
        done.stdout,
    )
    assert [int(step) for step, *_ in lines] == [10, 20, 30, 40]
    losses, experts, loads = ([float(line[i]) for line in lines] for i in (1, 2, 3))
    assert losses[-1] < losses[0] < 5.6  # ln 256 = 5.55
    assert all(1 <= number <= 8 for number in experts)
    assert all(1 <= load <= 8 for load in loads)


def routed(example: ModuleType) -> tuple[Any, Tensor, Any]:
    """Returns the example's router, 40 rows and where it sends them."""
    router = example.TopPRouter(
        example.TopPConfig(p=0.6), 5, 6, init=lambda shape, generator: torch.randn(shape)
    )
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    x_TD = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    return router, x_TD, router(x_TD, batch_size=4)


def test_a_row_gets_as_many_experts_as_it_takes(example: ModuleType) -> None:
    """A loop over rows: experts are added until the probability of those before reaches p."""
    router, x_TD, routing = routed(example)
    routes = routing.routes
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


def test_its_losses_count_what_was_served(example: ModuleType) -> None:
    """A loop again: the load of every sequence, and E·Σ_e f_e·P_e with f the share of all choices."""
    router, x_TD, routing = routed(example)
    sums = router.statistics(routing, 4)
    load_BE = torch.zeros(4, 6, dtype=torch.int64)
    served = zip(routing.routes.source_N.tolist(), routing.routes.expert_N.tolist(), strict=True)
    for row, expert in served:
        load_BE[row // 10, expert] += 1
    assert torch.equal(sums["load"], load_BE)
    p_TE = (x_TD @ router.weight.T).softmax(-1)
    share_E = load_BE.sum(0) / load_BE.sum()
    balancing, unsure = router.losses(sums, RunningSum())
    torch.testing.assert_close(balancing.value_B.mean(), 6 * (p_TE.mean(0) * share_E).sum())
    torch.testing.assert_close(unsure.value_B.mean(), torch.special.entr(p_TE).sum(-1).mean())


def test_its_losses_reach_the_model(example: ModuleType) -> None:
    model = Transformer(config_of(0.5))
    initialise(model, 0)
    output = model(tokens_of(0))
    assert output.auxiliary.keys() == {"load_balancing", "routing_entropy"}
    output.regularisation_B.mean().backward()
    gradient = model.get_parameter("group.0.feed_forward.router.weight").grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_the_family_knows_what_it_costs(example: ModuleType) -> None:
    config = config_of(0.5)
    assert is_upper_bound(config)
    assert forward_flops(config, 9).training == counted_flops(config, 9)
    assert count_parameters(config, 9).active == count_parameters(config, 9).total


def logits_on_ranks() -> Tensor:
    load_example()
    with start_process("cpu", timeout_s=30) as process:
        model = built(config_of(0.5), process, dispatcher="auto")
        return model(tokens_of(process.rank)).logits_BSV.detach()


def test_it_is_spread_over_ranks_without_another_line(example: ModuleType) -> None:
    model = Transformer(config_of(0.5))
    initialise(model, 0)
    for rank, logits_BSV in enumerate(run_ranks(logits_on_ranks, 2)):
        torch.testing.assert_close(logits_BSV, model(tokens_of(rank)).logits_BSV, rtol=0, atol=1e-5)


# The dispatcher -----------------------------------------------------------------------------------------------------


def difference_of_the_dispatcher() -> float:
    return load_example(DISPATCHER).largest_difference()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_dispatcher_of_ones_own_equals_one_rank(num_ranks: int) -> None:
    assert max(run_ranks(difference_of_the_dispatcher, num_ranks)) < 1e-4


def recomputed_with_the_dispatcher() -> list[dict[str, Tensor]]:
    """Logits and gradients with the example's dispatcher, with and without recomputation."""
    load_example(DISPATCHER)
    found = []
    with start_process("cpu", timeout_s=30) as process:
        for mode in ("none", "selective", "full"):
            config = config_with({"kind": "token_choice", "top_k": 2})
            model = built(config, process, dispatcher="sorted")
            model.recompute_layers(mode)
            logits_BSV = model(tokens_of(process.rank)).logits_BSV
            logits_BSV.square().mean().backward()
            gradients = {
                name: parameter.grad
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            found.append({"logits": logits_BSV.detach(), **gradients})
    return found


def test_a_dispatcher_of_ones_own_is_recomputed_bit_for_bit() -> None:
    for none, *others in run_ranks(recomputed_with_the_dispatcher, 2):
        assert len(none) > 5
        for other in others:
            assert other.keys() == none.keys()
            assert all(torch.equal(other[name], none[name]) for name in none)


def test_the_command_and_the_planner_know_the_dispatcher() -> None:
    """One line in the table, and its name may be said, and its traffic is known."""
    with pytest.raises(ValueError, match="dispatcher 'sorted' is unknown: choose auto, local"):
        MeshConfig(dispatcher="sorted")
    load_example(DISPATCHER)
    try:
        assert MeshConfig(dispatcher="sorted").dispatcher == "sorted"
        bank = Bank("experts", "feed_forward", 16, 4, 512, 512, 128, 0)
        sent = {
            name: exchange_traffic(
                dispatch_direction(bank, 2), tokens=64, ep=4, ranks_per_node=2, dispatcher=name
            )
            for name in ("sorted", "alltoall", "dedup")
        }
        assert sent["sorted"] == sent["alltoall"] != sent["dedup"]
        assert (
            build_parser().parse_args(["plan", "smoke", "--dispatcher", "sorted"]).dispatcher
            == "sorted"
        )
    finally:
        del DISPATCHERS["sorted"]
