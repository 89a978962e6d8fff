"""The study of growth: its drawn models are the grown ones, at equal FLOPs, and its report pairs seeds."""

from dataclasses import replace

import pytest
from compared import finish, write_lines

import moebius
from moebius_science.compare.plan import changed
from moebius_science.files import read_json
from moebius_science.growth import CASES, RATES, GrowthStudy, half, steps_for


def grown(experts):
    """Returns what the first word of a growth changes."""
    twice = {"feed_forward.num_experts": 2 * experts.num_experts}
    finer = {"feed_forward.d_expert": 8, "feed_forward.router.top_k": 2 * experts.router.top_k}
    loops = {"loops.prelude": 1, "loops.coda": 1, "loops.inject": "linear", "num_layers": 6}
    return {"split=2": twice | finer, "experts=x2": twice, "prelude=0:1": loops}


def test_drawn_models_are_those_that_grow_and_cost_what_the_trunks_do(tmp_path):
    study = GrowthStudy(tmp_path, (), 1)
    trunks = {arm.name: arm.config for arm in study.sweep()[RATES[0]].arms}
    drawn = {arm.name: arm.config for arm in study.drawn_sweep()[RATES[0]].arms}
    assert drawn.keys() == CASES.keys()
    for case, (trunk, words) in CASES.items():
        model = trunks[trunk].model
        assert model.changed(grown(model.feed_forward)[words[0]]) == drawn[case].model
        budget = moebius.size_of(trunks[trunk]).training_flops / 2
        assert moebius.size_of(drawn[case]).training_flops == pytest.approx(budget, rel=2e-3)
        assert steps_for(drawn[case], trunks[trunk]) == drawn[case].train.steps
        assert (drawn[case].data, drawn[case].optim.beta2) == (
            trunks[trunk].data,
            trunks[trunk].optim.beta2,
        )
        checkpoint = trunks[trunk].checkpoint
        assert half(trunks[trunk]) % checkpoint.every == 0


@pytest.mark.slow  # plans twelve comparisons
def test_report_waits_for_the_sweeps_and_pairs_what_has_finished(tmp_path):
    study = GrowthStudy(tmp_path, (), 1)
    assert "have not finished" in study.report().words
    for request in [*study.sweep().values(), *study.drawn_sweep().values()]:
        for run in request.runs:
            _finish(run, 2.0)
    trunks, drawn = study.trunks((0, 1)), study.drawn((0, 1))
    for run in trunks.runs:
        _finish(run, 3.0)
    for run in drawn.runs:
        _finish(run, 4.0)
        steps = half(trunks.runs[0].config) + run.config.train.steps
        config = changed(run.config, train={"steps": steps})
        folder = study.grown_folder(run.arm, run.seed)
        _finish(replace(run, config=config, folder=folder), 2.5)
    report = study.report()
    assert report.picture is not None
    seeds = read_json(tmp_path / "losses.json")["losses"]["sigma_moe_loops"]
    last = {"continued": 3.0, "grown": 2.5, "drawn": 4.0, "after": -0.5}
    assert seeds == {"0": last, "1": last}
    rows = report.tables[0].rows
    assert [row[1:6] + row[7:8] + row[9:] for row in rows] == [
        ("2", "3.000", "2.500", "4.000", "-0.500", "-1.500", "-0.500")
    ] * len(CASES)


def _finish(run, loss):
    """Writes a run that ends with a loss, and was evaluated every 25 steps."""
    finish(run)
    steps = [*range(25, run.config.train.steps, 25), run.config.train.steps]
    lines = [{"kind": "eval", "time": 1.0, "step": step, "loss": loss} for step in steps]
    write_lines(run.folder / "metrics.jsonl", lines)
