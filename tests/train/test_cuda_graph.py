"""Micro-batches as CUDA graphs, without a GPU: runs that replay recorded passes (recorded_graph.py) train
as eager runs do, bit for bit; and why passes are not captured, in words.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from family import tiny_config
from pairwise import slow_but
from parts import make_config
from recorded_graph import RecordingDriver
from small_model import TINY
from torch import Tensor
from trained import different, newest_state, run_training

from moebius.distributed.gradients import GradientReducer
from moebius.distributed.layout import plan_layout
from moebius.model.balance import RunningSum
from moebius.model.documents import mark_documents
from moebius.model.execution.draws import draws_of
from moebius.model.loops.depth import PassDepth
from moebius.model.loops.steps import PassOptions
from moebius.model.transformer import Transformer
from moebius.train import cuda_graph, loop
from moebius.train import run as parts_of_a_run
from moebius.train.config.errors import ConfigError
from moebius.train.config.run_config import Config
from moebius.train.cuda_graph import MicroBatchGraph, Passes, passes_of, reason_against
from moebius.train.loss import MicroBatchLoss
from moebius.train.metrics.run_lines import write_start
from moebius.train.micro_batches import MicroBatch
from moebius.train.recipes.family import FAMILY
from moebius.train.run import Run, StepResult

# Recipes that are not captured, and why
WHY_NOT = {
    **dict.fromkeys(
        ("switch", "switch_causal", "gshard", "x_moe_torchscale", "transition"), "how many routes"
    ),
    "sut": "model.halting",
    "parcae_small": "model.loops.depth.per",
    "parcae_moe": "model.loops.depth.per",
}
CAPTURED = [name for name in FAMILY if name not in WHY_NOT]
# Of each half, resumed after the first: the first and the last step measure loops, two do not. The first
# pass of either form is eager, the second is captured and replayed. After every other step the run
# evaluates and saves a checkpoint.
HALF, MICRO_BATCHES = 4, 2
TRAIN = {"global_batch": 16, "micro_batch": 8, "eval_every": 2, "log_every": HALF}
Found = tuple[list[dict[str, Any]], dict[str, Tensor]]


def config_of(data: Path, name: str, changes: Mapping[str, Any] = {}, **train: Any) -> Config:
    model = tiny_config(name, {"vocab_size": 257, **changes})
    settings = {"kernels__backend": "segments", "checkpoint__every": 2}
    return make_config(data, model=model, train=TRAIN | train, **settings)


@contextmanager
def recorded(*, is_required: bool = True) -> Iterator[RecordingDriver]:
    """Makes runs replay recorded passes."""
    driver = RecordingDriver()

    def make(config: Config, model: Transformer, *_: Any, **__: Any) -> MicroBatchGraph:
        return MicroBatchGraph(model, driver, is_required=is_required)

    with mock.patch.object(parts_of_a_run, "passes_of", make):
        yield driver


def nothing(_run: Run) -> None:
    """Happens after a step, unless a test says otherwise."""


def trained(
    config: Config, run_dir: Path, *, halves: int = 1, after: Callable[[Run], None] = nothing
) -> Found:
    """Returns the sums and the norm of every step, and weights and moments at the end.

    `after` is called after every step.
    """
    steps, make_step = list[dict[str, Any]](), loop.step

    def step(run: Run, *given: Any, **named: Any) -> StepResult:
        result = make_step(run, *given, **named)
        sums = {name: value.tolist() for name, value in result.meter.reduce().items()}
        steps.append(sums | {"norm": result.grad_norm})
        after(run)
        return result

    with mock.patch.object(loop, "step", step):
        for half in range(1, halves + 1):
            values = config.model_dump(mode="json")
            values["train"]["steps"] = half * HALF
            run_training(Config.model_validate(values), run_dir)
    return steps, newest_state(run_dir)


def check_equal(found: Found, expected: Found) -> None:
    assert found[0] == expected[0]
    assert not different(found[1], expected[1])


WAYS = [("float32", "none"), ("bfloat16", "none"), ("float32", "full"), ("bfloat16", "selective")]
FAST = ("moeut", "float32", "none")


def replayed() -> Iterator[Any]:
    """Yields every recipe in every way; by turns two ways of each are in CI."""
    for number, name in enumerate(CAPTURED):
        for place, way in enumerate(WAYS):
            mark = pytest.mark.slow if (number + place) % 2 == 0 else pytest.mark.nightly
            case = name, *way
            yield case if case == FAST else pytest.param(*case, marks=mark)


@pytest.mark.parametrize(
    ("name", "precision", "recompute"),
    [*replayed()],
)
def test_replays_train_as_passes_do(
    name: str, precision: str, recompute: str, data: Path, tmp_path: Path
) -> None:
    config = config_of(data, name, precision=precision, recompute=recompute)
    eager = trained(config, tmp_path / "eager", halves=2)
    with recorded() as driver:
        check_equal(trained(config, tmp_path / "graph", halves=2), eager)
    if config.model.loops.depth.kind == "fixed":
        assert (driver.captures, driver.replays) == (2 * 2, 2 * 2 * (2 * MICRO_BATCHES - 1))
    assert driver.replays


def move_parameters(run: Run) -> None:
    """Gives all parameters other memory after a step, as moves of experts do."""
    for parameter in run.parameters:
        parameter.data = parameter.data.clone()


DRAWN = {"loops.depth.kind": "list", "loops.depth.values": (4, 2)}
SWITCHES = {
    "feed_forward.router.capacity_factor": None,
    "feed_forward.router.switch_step": 2,
}
# What a replay would get wrong in silence: a recipe and what happens in it, and the fault to plant.
Fault = tuple[type, str, Callable[..., Any]]


def not_copied(captured: Any, inputs: list[Tensor]) -> Any:
    for old, new in zip(captured.inputs, inputs, strict=True):
        old.copy_(new)
    captured.replay()
    return captured.result


def old_inputs(captured: Any, inputs: list[Tensor], run: Any = cuda_graph._Captured.run) -> Any:
    return run(captured, captured.inputs)


def old_draws(captured: Any, inputs: list[Tensor], run: Any = cuda_graph._Captured.run) -> Any:
    return run(captured, [*inputs[:2], *captured.inputs[2:]])


def set_to_none(reducer: GradientReducer) -> None:
    for parameter in reducer._alone:
        parameter.grad = None


def without(part: int, form_of: Callable[..., Any] = MicroBatchGraph.form_of) -> Callable[..., Any]:
    """Returns a `form_of` that leaves a part out."""

    def found(*given: Any) -> Any:
        form = list(form_of(*given))
        del form[part]
        return tuple(form)

    return found


def sum_in_dictionary(running: RunningSum, name: str, local: Tensor) -> Tensor:
    totals, key = running._totals, running._prefix + name
    totals[key] = totals[key] + local.detach() if key in totals else local.detach().clone()
    return totals[key]


PLANTED: dict[str, tuple[str, Mapping[str, Any], Callable[[Run], None], Fault]] = {
    "reports are not copied": ("moeut", {}, nothing, (cuda_graph._Captured, "run", not_copied)),
    "tokens are not copied": ("dense", {}, nothing, (cuda_graph._Captured, "run", old_inputs)),
    "gradients are set to None": (
        *("dense", {}, nothing),
        (GradientReducer, "zero_in_place", set_to_none),
    ),
    "parameters move": (
        *("dense", {}, move_parameters),
        (MicroBatchGraph, "_where", lambda graph: iter(())),
    ),
    "a router stops mixing": (
        *("transition", SWITCHES, nothing),
        (MicroBatchGraph, "form_of", without(-1)),
    ),
    "loops are drawn": ("huginn_small", DRAWN, nothing, (MicroBatchGraph, "form_of", without(-3))),
    "loops are measured": ("moeut", {}, nothing, (MicroBatchGraph, "form_of", without(-3))),
    "the draws' key is a literal": (
        *("moeut", {"feed_forward.router.expert_dropout": 0.2}, nothing),
        (cuda_graph._Captured, "run", old_draws),
    ),
    "sums are in a dictionary": (
        *("moeut", {"feed_forward.router.balance_scope": "global_batch"}, nothing),
        (RunningSum, "add", sum_in_dictionary),
    ),
}


@pytest.mark.parametrize("name", slow_but(PLANTED, "reports are not copied"))
def test_what_a_replay_would_get_wrong_is_seen(name: str, data: Path, tmp_path: Path) -> None:
    recipe, changes, after, fault = PLANTED[name]
    config = config_of(data, recipe, changes, eval_every=0)
    eager = trained(config, tmp_path / "eager", after=after)
    with recorded():
        check_equal(trained(config, tmp_path / "graph", after=after), eager)
    with recorded(), mock.patch.object(*fault):
        wrong = trained(config, tmp_path / "wrong", after=after)
    assert wrong[0] != eager[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["switch", "gshard", "sut", "x_moe_torchscale"])
def test_what_cannot_be_captured_runs_eagerly_and_is_said_once(
    name: str, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(data, name, log_every=100, eval_every=0)
    eager = trained(config, tmp_path / "eager")
    with recorded(is_required=False) as driver:
        check_equal(trained(config, tmp_path / "graph"), eager)
    assert (driver.warm_ups, driver.captures, driver.replays) == (1, 0, 0)
    [said] = [each.message for each in caplog.records if "CUDA graph" in each.message]
    assert "a size depends on values); passes run eagerly from here on" in said


# One graph, without a run


def a_pass(length: int = 6, **options: Any) -> tuple[MicroBatch, PassOptions]:
    tokens_BS = torch.arange(2 * length).view(2, length)
    return MicroBatch(tokens_BS, tokens_BS + 1), PassOptions(**options)


def test_every_form_has_its_graph_and_the_fifth_runs_eagerly() -> None:
    weight, driver = torch.ones((), requires_grad=True), RecordingDriver()
    graph = MicroBatchGraph(Transformer(tiny_config("dense")), driver)

    def work(micro_batch: MicroBatch, *, options: PassOptions) -> MicroBatchLoss:
        loss = (micro_batch.inputs_BS * micro_batch.targets_BS * weight).sum()
        return MicroBatchLoss(
            loss, loss.detach(), loss.detach(), {"more": loss.detach() + 1}, {}, {}
        )

    for _ in range(3):
        for length in range(1, 6):
            given = a_pass(length)
            found, expected = graph.run(work, *given), Passes().run(work, *given)
            assert (found.loss, found.auxiliary) == (expected.loss, expected.auxiliary)
            assert graph.fits(*given) == (length < 5)
    assert (driver.warm_ups, driver.captures, driver.replays) == (4, 4, 8)
    plain, options = a_pass(1)
    assert not graph.fits(replace(plain, loss_mask_BS=torch.ones(2, 1, dtype=torch.bool)), options)
    ids_BS, device = torch.zeros(2, 1, dtype=torch.int32), torch.device("cpu")
    documents = mark_documents(ids_BS, device, attention=True, balance=False)
    assert not graph.fits(replace(plain, documents=documents), options)
    graph.forget()
    assert graph.fits(*a_pass(5))


def test_whatever_changes_the_launches_is_in_the_form() -> None:
    graph = MicroBatchGraph(Transformer(tiny_config("dense")), RecordingDriver())
    draws = draws_of("7/0", torch.arange(2)), draws_of("7/1", torch.arange(2, 4))
    passes = [
        a_pass(draws=draws[0]),
        a_pass(7),
        a_pass(depth=PassDepth(2)),
        a_pass(depth=PassDepth(3)),
        a_pass(depth=PassDepth(3, 1)),
        a_pass(measures_loops=True),
        a_pass(recompute="full"),
        a_pass(equal_rows=True),
    ]
    assert len({graph.form_of(*each) for each in passes}) == len(passes)
    assert graph.form_of(*a_pass(draws=draws[1])) == graph.form_of(*passes[0])


def test_a_pass_that_must_be_captured_and_cannot_be_ends_the_run(
    data: Path, tmp_path: Path
) -> None:
    with (
        recorded(),
        pytest.raises(RuntimeError, match=r"a size depends on values\); set train.cuda"),
    ):
        trained(config_of(data, "switch", log_every=100), tmp_path)


# Why not

OWN = "my_parts:own"
GLOBAL = {"model__feed_forward__router__balance_scope": "global_batch"}
CHANGES: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"train__cuda_graph": False}, "train.cuda_graph=false"),
    ({"mesh__ep": 2}, "ranks exchange rows within a pass"),
    ({"mesh__sharding": "fsdp"}, "mesh.sharding=fsdp"),
    ({"train__compile": True}, "train.compile=true"),
    ({"train__recompute": "full"}, None),
    ({"data__packing": "best_fit"}, "documents and padding"),
    ({"model__feed_forward__activation": OWN}, OWN),
    ({"model__feed_forward__router__balance_form": OWN}, OWN),
    ({"train__losses": {OWN: 0.1}}, OWN),
    ({"model__feed_forward__router__expert_dropout": 0.1}, None),
    (GLOBAL, None),
    ({**GLOBAL, "mesh__dp_replicate": 2}, "sums over ranks"),
    ({"model__attention__positions__yarn": {"factor": 4}}, None),
    ({"model__loops__condition": "embedding"}, None),
]


def why_not(config: Config, *, backend: str = "triton", device: str = "cuda") -> str | None:
    layout = plan_layout(config.mesh, config.mesh.dp_replicate or config.mesh.ep)
    model = Transformer(TINY if OWN in str(config.model) else config.model)  # no such module exists
    return reason_against(config, model, layout, backend=backend, device=torch.device(device))


@pytest.mark.parametrize(("changes", "expected"), CHANGES)
def test_a_run_says_why_its_passes_are_not_captured(
    changes: dict[str, Any], expected: str | None
) -> None:
    found = why_not(make_config(**changes))
    assert found == expected or (found and expected and expected in found)


def test_only_gpus_and_triton_capture() -> None:
    assert why_not(make_config(), device="cpu") == "the run is on cpu"
    assert (
        why_not(make_config(), backend="grouped_mm")
        == "kernels.backend is grouped_mm instead of triton"
    )


@pytest.mark.parametrize("name", FAMILY)
def test_recipes_say_whether_they_are_captured(name: str) -> None:
    found = why_not(config_of(Path(), name))
    assert WHY_NOT[name] in found if found else name not in WHY_NOT


def passes(**changes: Any) -> Passes:
    config, device = make_config(**changes), torch.device("cpu")
    layout, model = plan_layout(config.mesh, 1), Transformer(config.model)
    return passes_of(config, model, layout, backend="segments", device=device)


def test_a_graph_that_is_asked_for_and_impossible_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="cuda_graph=true is impossible: the run is on cpu; set it"
    ):
        passes(train__cuda_graph=True)
    assert type(passes()) is Passes


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("cuda", {}, "captured"),
        ("cuda", {"train__cuda_graph": False}, "no, train.cuda_graph=false"),
        ("cpu", {}, None),
    ],
)
def test_the_start_line_of_a_gpu_tells(
    device: str, changes: dict[str, Any], expected: str | None
) -> None:
    config, run = make_config(**changes), mock.Mock(parameters=[], backend="triton")
    run.config, run.process.device = config, torch.device(device)
    run.model, run.mesh.layout = Transformer(config.model), plan_layout(config.mesh, 1)
    write_start(run, None, {})
    assert run.log.write.call_args.kwargs.get("cuda_graph") == expected
