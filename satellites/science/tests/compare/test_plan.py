"""Arms of equal size: what is scaled, what must be the same, and what is stale."""

from pathlib import Path

import pytest
from compared import TINY, finish, planned

import moebius
from moebius_science.compare.file import CompareError, sweep_file
from moebius_science.compare.plan import plan_arms, refuse_stale
from moebius_science.compare.sizes import matched_size

SCALED = 'scaled = "model.feed_forward.num_experts"'


def test_parameters_are_matched_by_the_best_value_of_the_scaled_field(tmp_path: Path):
    _, (baseline, single), _ = planned(tmp_path)
    assert baseline.value is None
    target = baseline.size.parameters.total
    assert single.scaled == "model.feed_forward.num_experts"

    def parameters(experts: int) -> float:
        config = single.config.model_dump(mode="json")
        config["model"]["feed_forward"]["num_experts"] = experts
        return matched_size(type(single.config).model_validate(config), "parameters")

    assert single.value is not None
    best = min(range(2, 120), key=lambda experts: abs(parameters(experts) - target))
    assert single.value == best
    assert single.deviation == pytest.approx(parameters(best) / target - 1)


def test_flops_can_be_matched_by_steps_with_the_schedule_following(tmp_path: Path):
    text = TINY.replace(SCALED, 'scaled = "train.steps"\nmatch = "flops"')
    text = text.replace("steps = 6", "steps = 400")
    text = text.replace('recipe = "moeut_g1"', 'recipe = "moeut_g1"\nmodel.num_layers = 4')
    _, (baseline, deep), _ = planned(tmp_path, text)
    train, optim = deep.config.train, deep.config.optim
    ratio = deep.size.flops.forward / baseline.size.flops.forward
    assert train.steps == deep.value == round(400 / ratio)
    assert optim.warmup_steps == round(0.05 * train.steps)
    assert optim.over(train.steps).decay_steps == train.steps - optim.warmup_steps
    assert train.eval_every == train.steps // 2


def test_the_file_may_say_itself_how_often_is_evaluated(tmp_path: Path):
    text = TINY.replace("[common.train]", "[common.train]\neval_every = 4")
    _, arms, _ = planned(tmp_path, text)
    assert [arm.config.train.eval_every for arm in arms] == [4, 4]
    text = TINY.replace('recipe = "moeut_g1"', 'recipe = "moeut_g1"\ntrain.eval_every = 5')
    _, arms, _ = planned(tmp_path, text)
    assert [arm.config.train.eval_every for arm in arms] == [3, 5]
    text = TINY.replace('recipe = "moeut_g1"', 'recipe = "moeut_g1"\noptim.warmup_steps = 4')
    _, arms, _ = planned(tmp_path, text)
    assert [arm.config.optim.warmup_steps for arm in arms] == [0, 4]
    with pytest.raises(CompareError, match=r"steps = 6 and a train\.steps of its own"):
        planned(tmp_path, TINY.replace("[common.train]", "[common.train]\nsteps = 4"))


def test_a_sweep_has_an_arm_for_every_combination():
    sweeps = [
        "optim.learning_rate=1e-3,3e-4",
        "model.feed_forward.router.kind=sigmoid,token_choice",
    ]
    file = sweep_file("smoke", sweeps, ["train.steps=7"])
    assert list(file.arms) == [
        *("learning_rate_0.001-kind_sigmoid", "learning_rate_0.001-kind_token_choice"),
        *("learning_rate_0.0003-kind_sigmoid", "learning_rate_0.0003-kind_token_choice"),
    ]
    arms = plan_arms(file, ["train.steps=7"], origin="--sweep")
    assert [arm.config.optim.learning_rate for arm in arms] == [1e-3, 1e-3, 3e-4, 3e-4]
    assert {arm.config.train.steps for arm in arms} == {7}
    own = moebius.recipe("smoke")
    assert own.job.num_nodes == 2  # of which one machine does the work, with as many ranks
    assert {(arm.config.job.num_nodes, arm.config.world_size) for arm in arms} == {(1, 4)}
    rate = own.optim.learning_rate
    file = sweep_file("smoke", [f"optim.learning_rate=7e-3,{rate}"], [])
    assert file.baseline == f"learning_rate_{rate}"  # the recipe's own value


def test_runs_differ_in_seeds_alone(tmp_path: Path):
    _, _, runs = planned(tmp_path)
    assert [run.name for run in runs[:3]] == ["moeut, seed 0", "single, seed 0", "moeut, seed 1"]
    assert len({run.folder for run in runs}) == 6
    for run in runs:
        assert run.config.data.seed == run.config.train.seed == run.seed
    assert len({run.config.data.directory for run in runs}) == 1


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("tolerance = 0.05", "tolerance = 0", "and the target is"),
        (f"{SCALED}\ntolerance = 0.05", "tolerance = 0.0001", "name the whole-number field to scale"),
        ("feed_forward.num_experts", "feed_forward.activation", "must be a whole number"),
        ("feed_forward.num_experts", "feed_forward.nothing", "scaled = 'model.feed_forward.nothing' is None"),
        (SCALED, 'scaled = "train.eval_rows"\ntarget = 900_000', "the size does not grow with it"),
        ('label = "MoEUT"', "data.seq_len = 16", "data.seq_len: moeut has 16, single 32"),
        ('label = "MoEUT"', "train.global_batch = 8", "train.global_batch: moeut has 8, single 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_said_with_its_values(
    tmp_path: Path, before: str, after: str, words: str
):
    assert before in TINY
    with pytest.raises(CompareError) as error:
        planned(tmp_path, TINY.replace(before, after, 1))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"moeut_g1"', '"moeut_g9"', "there is no recipe 'moeut_g9'; did you mean"),
        ('label = "MoEUT"', "model.d_modle = 3", "tiny.toml, arm moeut"),
    ],
)
def test_an_arm_that_is_no_configuration(tmp_path: Path, before: str, after: str, words: str):
    with pytest.raises(moebius.ConfigError) as error:
        planned(tmp_path, TINY.replace(before, after, 1))
    assert words in str(error.value)


def test_overrides_hold_for_every_arm_and_not_for_what_the_file_derives(tmp_path: Path):
    _, arms, _ = planned(tmp_path, overrides=["optim.learning_rate=0.5"])
    assert {arm.config.optim.learning_rate for arm in arms} == {0.5}
    with pytest.raises(CompareError, match="give --steps"):
        planned(tmp_path, overrides=["train.steps=7"])
    with pytest.raises(CompareError, match=r"give --steps N instead of train\.tokens"):
        planned(tmp_path, overrides=["train.tokens=7000"])
    with pytest.raises(CompareError, match=r"arm moeut: give train\.steps or train\.tokens"):
        planned(tmp_path, TINY.replace("steps = 6\n", ""), overrides=["train.epochs=2"])
    with pytest.raises(CompareError, match="give --seeds"):
        planned(tmp_path, overrides=["train.seed=7"])


def test_a_changed_file_names_the_arms_that_are_stale(tmp_path: Path):
    _, _, runs = planned(tmp_path)
    for run in runs:
        finish(run)
    refuse_stale(runs, tmp_path)
    _, _, longer = planned(tmp_path, TINY.replace("every = 2", "every = 3"))
    refuse_stale(longer, tmp_path)  # what it keeps changes nothing in what it computes
    _, _, watched = planned(tmp_path, TINY.replace("evaluations = 2", "evaluations = 6"))
    assert watched[0].config.train.eval_every == 1
    refuse_stale(watched, tmp_path)  # nor do evaluations
    changed = TINY.replace('recipe = "moeut_g1"', 'recipe = "moeut_g1"\noptim.learning_rate = 0.5')
    _, _, other = planned(tmp_path, changed)
    with pytest.raises(CompareError) as error:
        refuse_stale(other, tmp_path)
    assert "--restart single\n" in str(error.value)
    assert "  single: optim.learning_rate: 0.001 → 0.5" in str(error.value)
    _, _, shorter = planned(tmp_path, TINY.replace("steps = 6", "steps = 4"))
    with pytest.raises(CompareError, match=r"train\.steps: 6 → 4"):
        refuse_stale(shorter, tmp_path)
