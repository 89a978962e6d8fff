"""The measures and the rule of satellites/science/claims/, and a run from text to verdict."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import write_texts

import moebius
from moebius_science.claims import __main__ as claims
from moebius_science.claims.judge import CLAIMS, FINDINGS, Finding, granularity_helps, share_kept
from moebius_science.claims.measures import (
    activated_fraction,
    effective_experts,
    log_slope,
    random_activated_fraction,
    representation_collapse,
    steps_to_reach,
    thinned,
)
from moebius_science.claims.pictures import draw
from moebius_science.claims.runs import routings
from moebius_science.claims.toys import (
    ARMS,
    GRANULARITIES,
    WINDOWS,
    granular,
    toy,
)


def test_collapse_of_three_clusters_equals_the_hand_computation() -> None:
    # About the mean of the means the between covariance is diag(6, 2, 0); every cluster is a cross
    # of arms 1 and 2, so the within covariance is diag(1/2, 2). RC = 0.5/6 + 2/2; the third
    # dimension, in which means agree, is left out.
    means = torch.tensor([[3.0, 0, 5], [-3.0, 0, 5], [0.0, 3, 5]])
    cross = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0], [0, 2.0, 0], [0, -2.0, 0]])
    rows = (means[:, None] + cross).flatten(0, 1)
    labels = torch.tensor([7, 2, 4]).repeat_interleave(4)
    expected = 0.5 / 6 + 2 / 2
    assert representation_collapse(rows, labels) == pytest.approx(expected, rel=1e-12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert representation_collapse(rows[order] + 100, labels[order]) == pytest.approx(
        expected, rel=1e-9
    )


def test_tighter_clusters_have_a_smaller_collapse_figure_and_one_class_has_none() -> None:
    generator = torch.Generator().manual_seed(0)
    means, noise = (
        torch.randn(5, 1, 8, generator=generator),
        torch.randn(5, 40, 8, generator=generator),
    )
    labels = torch.arange(5).repeat_interleave(40)
    wide, tight = ((means + width * noise).flatten(0, 1) for width in (1.0, 0.1))
    assert representation_collapse(tight, labels) < 0.05 * representation_collapse(wide, labels)
    assert math.isnan(representation_collapse(wide, torch.zeros_like(labels)))


def test_activated_fraction_by_hand() -> None:
    experts = torch.tensor([[0, 1], [0, 1], [2, 3], [0, 3]])
    assert activated_fraction(experts, window_rows=2, num_experts=8) == pytest.approx(
        (2 + 3) / 2 / 8
    )
    assert activated_fraction(experts, window_rows=4, num_experts=8) == pytest.approx(4 / 8)


@pytest.mark.parametrize(("num_experts", "top_k", "rows"), [(8, 1, 4), (40, 2, 16), (96, 3, 48)])
def test_random_routing_activates_what_the_expectation_says(
    num_experts: int, top_k: int, rows: int
) -> None:
    windows = 3000
    scores = torch.rand(windows * rows, num_experts, generator=torch.Generator().manual_seed(0))
    measured = activated_fraction(
        scores.topk(top_k).indices, window_rows=rows, num_experts=num_experts
    )
    # A window's fraction deviates by less than sqrt(p(1 − p)/E), for which experts are used is
    # negatively correlated.
    expected = random_activated_fraction(top_k, num_experts, rows)
    assert abs(measured - expected) < 4 * math.sqrt(
        expected * (1 - expected) / num_experts / windows
    )


def test_effective_experts() -> None:
    assert effective_experts(torch.tensor([5, 5, 5, 5])) == pytest.approx(4)
    assert effective_experts(torch.tensor([9, 0, 0, 0])) == pytest.approx(1)
    assert effective_experts(torch.tensor([1, 1, 0, 0])) == pytest.approx(2)


def test_steps_to_reach_lies_on_straight_lines_and_takes_the_first_crossing() -> None:
    curve = [(0, 6.0), (10, 4.0), (20, 3.0), (30, 3.5), (40, 2.0)]
    assert steps_to_reach(curve, 5.0) == pytest.approx(5.0)
    assert steps_to_reach(curve, 3.25) == pytest.approx(17.5)
    assert steps_to_reach(curve, 4.0) == pytest.approx(10.0)
    assert steps_to_reach(curve, 6.5) == 0
    assert steps_to_reach(curve, 1.9) == math.inf


def test_log_slope_of_an_exponential_is_its_rate_per_thousand_steps() -> None:
    assert log_slope(
        [(step, 3 * math.exp(-0.7 * step / 1000)) for step in (0, 50, 300, 1000)]
    ) == pytest.approx(-0.7)
    assert math.isnan(log_slope([(10, 2.0)]))


def test_thinning_keeps_both_ends() -> None:
    curve = [(step, float(step)) for step in range(1003)]
    kept = thinned(curve)
    assert (len(kept), kept[0], kept[-1]) == (100, curve[0], curve[-1])
    assert thinned(curve[:100]) == curve[:100]


@pytest.mark.parametrize(
    ("values", "side", "verdict"),
    [
        ((0.3, 0.31, 0.32, 0.3, 0.31), "at most", "holds"),
        ((0.3, 0.31, 0.32, 0.3, 0.9), "at most", "undecided"),
        ((0.7, 0.71, 0.72, 0.7, 0.71), "at most", "does not hold"),
        ((0.7, 0.71, 0.72, 0.7, 0.71), "above", "holds"),
        ((0.7, 0.71, 0.72, math.inf, 0.71), "at most", "undecided"),
        ((0.3, 0.3, 0.3, 0.3), "at most", "too few seeds"),
    ],
)
def test_the_rule(values: tuple[float, ...], side: str, verdict: str) -> None:
    assert Finding("M8", "", "", values, side, 0.6, "").verdict == verdict  # pyright: ignore[reportArgumentType]


def test_a_verdict_is_corrected_for_the_number_of_findings() -> None:
    arms = {arm: [toy_run()] * 5 for claim in CLAIMS.values() for arm in claim.arms}
    arms |= granular_runs((3.0, 2.8, 2.7), (3.0, 3.0, 2.99))
    assert sum(len(claim.judge(arms)) for claim in CLAIMS.values()) == FINDINGS


def granular_runs(
    with_norm: tuple[float, ...], without: tuple[float, ...]
) -> dict[str, list[dict]]:
    """Returns five equal seeds with the given final losses at G = 1, 4, 8."""
    losses = {True: with_norm, False: without}
    return {
        granular(value, norm=norm): [{"validation_loss": [(0, 6.0), (9, losses[norm][n])]}] * 5
        for norm in losses
        for n, value in enumerate(GRANULARITIES)
    }


def test_granularity_has_two_verdicts() -> None:
    def verdicts(*losses: tuple[float, ...]) -> list[str]:
        return [finding.verdict for finding in granularity_helps(granular_runs(*losses))]

    assert verdicts((3.0, 2.8, 2.7), (3.0, 3.0, 2.99)) == ["holds", "holds"]
    assert verdicts((3.0, 2.8, 2.7), (3.0, 2.8, 2.7)) == ["holds", "does not hold"]
    assert verdicts((3.0, 2.8, 2.8), (3.0, 3.0, 3.0)) == [
        "does not hold",
        "undecided",
    ]  # no gain, so none can vanish
    assert verdicts((3.0, 3.1, 3.2), (3.0, 3.0, 3.0)) == ["does not hold", "undecided"]
    assert share_kept((3.0, 2.9, 2.9), (3.0, 2.8, 2.6)) == pytest.approx(1 / 3)


def toy_run(
    *, curve=((0, 6.0), (50, 4.0), (100, 3.0)), violation=1.0, collapse=(1.0, 1.0), ratio=0.9
) -> dict:
    """Returns a record like those of claims/runs.py, with everything that judges and pictures read."""

    def layer(value: float) -> dict:
        windows = {
            f"activated_{window}{kind}": ratio
            for window in WINDOWS
            for kind in ("", "_random", "_ratio")
        }
        return {
            "collapse": value,
            "effective_experts": 4.0,
            "num_experts": 8,
            "experts_used": 8,
            **windows,
        }

    probes = [{"step": 10 * n, "layers": [layer(value)]} for n, value in enumerate(collapse)]
    return {
        "validation_loss": list(curve),
        "steps": 100,
        "training_flops_per_token": 2.0,
        "step_s": 0.1,
        "max_violation": [(step, violation) for step in range(20)],
        "routings": probes,
    }


# For each claim arms for which it holds, and arms for which it does not; what decides is in one
# place.
QUICK, SLOW = ((0, 6.0), (50, 2.9), (100, 2.5)), ((0, 6.0), (50, 5.0), (100, 3.5))


JUDGED = {
    "M8": ({"dense": {}, "MoT": {"curve": QUICK}}, {"dense": {}, "MoT": {"curve": SLOW}}),
    "M11": (
        {"MoT": {}, "MoT, uniform": {"curve": SLOW}},
        {"MoT": {}, "MoT, uniform": {"curve": QUICK}},
    ),
    "T3": (
        {"top-1, balance 0": {"violation": 5.0}, "top-1, balance 0.01": {"violation": 2.0}},
        {"top-1, balance 0": {"violation": 3.0}, "top-1, balance 0.01": {"violation": 2.0}},
    ),
    "X2": (
        {
            "top-1, balance 0.01": {"collapse": (4.0, 2.0, 1.0)},
            "X-MoE": {"collapse": (4.0, 4.0, 5.0)},
        },
        {
            "top-1, balance 0.01": {"collapse": (4.0, 4.0, 5.0)},
            "X-MoE": {"collapse": (4.0, 2.0, 1.0)},
        },
    ),
    "H3": (
        {
            "SMoE": {},
            "fine-grained": {"ratio": 0.92},
            "MH-MoE h=2": {"ratio": 0.95},
            "MH-MoE h=3": {"ratio": 0.96},
        },
        {
            "SMoE": {"ratio": 0.97},
            "fine-grained": {},
            "MH-MoE h=2": {"ratio": 0.95},
            "MH-MoE h=3": {"ratio": 0.96},
        },
    ),
}


@pytest.mark.parametrize("claim", JUDGED)
def test_every_judge_knows_the_two_sides(claim: str) -> None:
    def verdicts(*seeds: dict[str, dict]) -> set[str]:
        runs = {arm: [toy_run(**seed[arm]) for seed in seeds] for arm in CLAIMS[claim].arms}
        return {finding.verdict for finding in CLAIMS[claim].judge(runs)}

    holding, failing = JUDGED[claim]
    assert verdicts(*[holding] * 5) == {"holds"}
    assert verdicts(*[failing] * 5) == {"does not hold"}
    assert verdicts(holding, failing, holding, failing, holding) == {"undecided"}
    assert verdicts(*[holding] * 4) == {"too few seeds"}


def ending(loss: float) -> dict:
    return toy_run(curve=((0, 6.0), (100, loss)))


def test_uniform_mixing_is_compared_with_learned_mixing_of_its_own_seed() -> None:
    """Seeds differ by more than arms do, so the difference within each seed decides."""

    def verdict(learned: tuple[float, ...], uniform: tuple[float, ...]) -> str:
        runs = {
            "MoT": [ending(loss) for loss in learned],
            "MoT, uniform": [ending(loss) for loss in uniform],
        }
        return CLAIMS["M11"].judge(runs)[0].verdict

    learned = (3.0, 3.2, 3.1, 3.3, 2.9)
    assert verdict(learned, (3.01, 3.21, 3.11, 3.31, 2.911)) == "holds"
    assert verdict(learned, (3.01, 3.21, 3.09, 3.31, 2.91)) == "undecided"
    assert verdict(learned, (2.99, 3.19, 3.09, 3.29, 2.891)) == "does not hold"


def test_the_second_half_of_the_probes_is_told_and_does_not_decide() -> None:
    falling, rising = (1.0, 8.0, 4.0, 2.0), (8.0, 1.0, 2.0, 4.0)
    runs = {
        "top-1, balance 0.01": [toy_run(collapse=falling)] * 5,
        "X-MoE": [toy_run(collapse=rising)] * 5,
    }
    (finding,) = CLAIMS["X2"].judge(runs)
    halving = 100 * math.log(2)  # of ln RC per 1000 steps, at one probe in 10
    assert f"over the second half of the probes {-halving:.2f}, {halving:.2f}" in finding.detail
    assert "experts used 100%, 100% of all (effective 50%, 50%)" in finding.detail
    assert (
        finding.verdict == "does not hold"
    )  # over all probes: falling 0.1 ln 2 a step, rising −0.1 ln 2


@pytest.mark.parametrize("claim", [*JUDGED, "G1"])
def test_every_claim_has_a_picture(claim: str, tmp_path: Path) -> None:
    arms = {arm: JUDGED[claim][0][arm] if claim in JUDGED else {} for arm in CLAIMS[claim].arms}
    draw(
        claim,
        {arm: [toy_run(**values)] * 3 for arm, values in arms.items()},
        tmp_path / "picture.png",
    )
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def config_of(name: str, *, data: str = "data", text: str = "embedded") -> moebius.Config:
    return toy(ARMS[name], seed=0, steps=10, text=text, data=data, device="cpu")


def test_the_arms_of_a_claim_cost_what_they_should() -> None:
    flops = {name: moebius.size_of(config_of(name)).flops for name in ARMS}
    for claim in ("M8", "M11", "T3", "X2", "G1"):
        of_claim = {flops[arm].feed_forward for arm in CLAIMS[claim].arms}
        assert of_claim == {flops["dense"].feed_forward}
    assert len({flops[arm].feed_forward + flops[arm].sub_tokens for arm in CLAIMS["H3"].arms}) == 1


def test_caught_routings_are_those_of_the_validation_rows_in_order(tmp_path: Path) -> None:
    text = write_texts(tmp_path / "text.jsonl", 200)
    config = moebius.prepare(config_of("MH-MoE h=2", data="", text=str(text)), tmp_path)
    model = moebius.build(config).eval()
    loaded = moebius.LoadedModel(model, None, config, 0)  # type: ignore[arg-type]
    layers = routings(loaded)
    assert len(layers) == 2
    assert layers[0].x_TD.shape[1] == 48  # of a sub-token
    rows = next(loaded.rows(max_rows=256))
    asked = []
    hook = model.get_submodule("group.2.feed_forward.router").register_forward_hook(
        lambda _, given, out: asked.append(out)
    )
    with torch.no_grad():
        model(rows.tokens_BS[:1])
    hook.remove()
    assert torch.equal(layers[0].experts_TK[: 64 * 2], asked[0].wanted_TK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_runs_from_text_to_verdict(tmp_path: Path) -> None:
    text = write_texts(tmp_path / "text.jsonl", 400)
    words = ["--claims", "X2", "--seeds", "1", "--steps", "2", "--jobs", "1", "--device", "cpu"]
    places = ["--text", text, "--results", tmp_path / "results", "--folder", tmp_path / "runs"]
    command = [sys.executable, "-m", "moebius_science.claims", *words, *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "too few seeds" in done.stdout
    results = json.loads((tmp_path / "results" / "claims_X2.json").read_text())
    assert [finding["verdict"] for finding in results["findings"]] == ["too few seeds"]
    assert {run["arm"] for run in results["runs"]} == set(CLAIMS["X2"].arms)
    for run in results["runs"]:
        assert [probe["step"] for probe in run["routings"]] == [1, 2]
        assert all(layer["collapse"] > 0 for probe in run["routings"] for layer in probe["layers"])
        assert [step for step, _ in run["validation_loss"]] == [0, 1, 2]
    assert (tmp_path / "results" / "claims_X2.png").read_bytes().startswith(b"\x89PNG")


def test_recorded_runs_are_judged_again_without_training(tmp_path: Path) -> None:
    holding = {
        arm: [toy_run(**values) | {"arm": arm}] * 5 for arm, values in JUDGED["X2"][0].items()
    }
    holding["X-MoE"] = [
        *holding["X-MoE"][:4],
        {"arm": "X-MoE", **toy_run(collapse=(4.0, math.nan, 5.0))},
    ]
    file, trained = (
        tmp_path / "claims_X2.json",
        {"environment": {"commit": "that trained"}, "settings": {"seeds": 5}},
    )
    runs = [record for records in holding.values() for record in records]
    file.write_text(
        claims.compact(trained | {"findings": [{"verdict": "of an old rule"}], "runs": runs})
    )
    recorded = json.loads(file.read_text())
    claims.judge_again(claims.parse(["--judge", str(file)]))
    judged = json.loads(file.read_text())
    assert [finding["verdict"] for finding in judged["findings"]] == [
        "undecided"
    ]  # a seed has no number
    assert judged["findings"][0]["values"][4] == "nan"
    assert [judged[name] for name in ("environment", "settings", "runs")] == [
        *trained.values(),
        recorded["runs"],
    ]
    assert judged["judged_at"]["commit"] != "that trained"
    assert (tmp_path / "claims_X2.png").exists()
