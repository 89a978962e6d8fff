"""The measures of the optimizer study, on made-up curves."""

import pytest
from compared import finish, write_lines

from moebius_science.compare.results import RunResult
from moebius_science.optimizers import MODELS, RATES, OptimizerStudy, beyond, doublings, steps_to


def run(*losses: float) -> RunResult:
    """Returns a run that was evaluated every 10 steps."""
    curve = [(10 * place, loss) for place, loss in enumerate(losses, 1)]
    return RunResult("arm", 0, 10 * len(losses), losses[-1], curve, 0.1, 1.0, {}, ("c",))


def test_steps_to_a_loss_are_of_the_first_time_and_between_evaluations():
    curve = run(4.0, 3.0, 3.5, 2.0).curve
    assert steps_to(curve, 3.25) == pytest.approx(17.5)
    assert steps_to(curve, 3.0) == 20
    assert steps_to(curve, 4.5) == 10  # not before the first evaluation
    with pytest.raises(ValueError, match=r"1.9 is below all of the curve's 4 points"):
        steps_to(curve, 1.9)


def test_doublings_swap_their_sign_with_the_arms():
    fast, slow = run(4.0, 3.0, 2.5, 2.0), run(5.0, 4.0, 3.5, 3.0)
    assert doublings(fast, slow) == -1  # 20 of 40 steps
    assert doublings(slow, fast) == 1
    assert doublings(slow, slow) == 0


def test_only_arms_that_are_best_at_an_edge_get_a_rate_beyond_it():
    first, second, *_, last = RATES
    found = beyond({"low": first, "inside": second, "high": last, "also_high": last})
    assert found == {first / 2: ["low"], last * 2: ["high", "also_high"]}
    assert beyond({}) == {}


def test_arms_of_a_model_differ_in_the_optimizer_alone(tmp_path):
    sweep = OptimizerStudy(tmp_path, (), 1).sweep()
    assert list(sweep) == list(RATES)
    for rate, request in sweep.items():
        configs = {arm.name: arm.config for arm in request.arms}
        for model in MODELS:
            adamw, muon = configs[f"{model}_adamw"], configs[f"{model}_muon"]
            assert (adamw.optim.kind, muon.optim.kind) == ("adamw", "muon")
            assert adamw.optim.learning_rate == muon.optim.learning_rate == rate
            assert muon.optim.model_copy(update={"kind": "adamw"}) == adamw.optim
            assert (adamw.model, adamw.data, adamw.train) == (muon.model, muon.data, muon.train)


@pytest.mark.slow  # plans fifteen comparisons
def test_report_waits_for_the_sweep_and_pairs_what_has_finished(tmp_path):
    """All made-up losses are equal, so the first rate is best, and being an edge it is halved."""
    study = OptimizerStudy(tmp_path, (), 1)
    assert "has not finished" in study.report().words
    for request in study.requests():
        for each in request.runs:
            if not each.folder.exists():
                finish(each)
                steps = each.config.train.steps
                curve = [{"step": 10, "loss": 3.0}, {"step": steps, "loss": 2.0}]
                lines = [{"kind": "eval", "time": 1.0, **point} for point in curve]
                write_lines(each.folder / "metrics.jsonl", lines)
    assert min(study.sweep()) == RATES[0] / 2
    found = study.report()
    assert found.words == "30 of 30 runs, 15 of 15 short"
    assert found.picture
    assert [row[:6] for row in found.tables[-1].rows] == [
        (name, "2.0000", "2.0000", "+0.0000", "+0.0000 … +0.0000", "1.00")
        for name in MODELS.values()
    ]
