"""The rates of every schedule, their lengths, and what a run is told of them."""

import math
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from moebius.plugins import PluginError
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.config.schedule import (
    decay_is_over,
    learning_rate_at,
    rates_line,
    shape_notes,
)
from moebius.train.optim import OptimConfig
from moebius.train.recipes.hub import HUB
from moebius.train.recipes.published import PUBLISHED
from moebius.train.recipes.smoke import RECIPES


def rates(optim: OptimConfig, steps: int, count: int | None = None) -> list[float]:
    run = optim.over(steps)
    return [learning_rate_at(run, step) for step in range(count or steps)]


def test_the_published_rates() -> None:
    run = OptimConfig(warmup_steps=0.04, decay_steps=1.0).over(100_000)
    assert (run.warmup_steps, run.decay_steps) == (4000, 100_000)
    expected = {0: 6.25e-8, 3999: 2.5e-4, 4000: 2.5e-4, 54000: 1.375e-4, 99999: 2.5888e-5}
    for step, rate in expected.items():
        assert learning_rate_at(run, step) == pytest.approx(rate, rel=1e-4), step


@pytest.mark.parametrize("name", PUBLISHED | HUB)
def test_fractions_give_the_published_rates_bit_for_bit_and_follow_shorter_runs(name: str) -> None:
    config = RECIPES[name]()
    steps, optim = config.train.steps, config.optim
    peak, floor = optim.learning_rate, optim.final_fraction
    warmup, decay = 2500, steps - 2500
    if name in HUB:
        warmup, decay = 2000, 98_000
    elif name.partition("_")[0] not in ("mot", "gpt"):
        warmup, decay = (0, 100_000) if "_44m" in name else (4000, 100_000)
    run = optim.over(steps)
    assert (run.warmup_steps, run.decay_steps) == (warmup, decay)
    for step in {*range(0, steps, 997), warmup - 1, warmup, warmup + 1, steps - 1} - {-1}:
        rate = peak * (step + 1) / (warmup or 1)
        if step >= warmup:
            progress = min((step - warmup) / decay, 1.0)
            rate = peak * (floor + 0.5 * (1 - floor) * (1 + math.cos(math.pi * progress)))
        assert learning_rate_at(run, step) == rate, step
    short = rates(optim, 200)
    assert max(short) == pytest.approx(peak)
    assert short[-1] < 0.2 * peak


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0] * 12 + [1 - math.sqrt(i / 5) for i in range(5)]),
        ({"decay_shape": "linear"}, [1.0] * 12 + [1 - i / 5 for i in range(5)]),
        (
            {"decay_shape": "cosine", "final_fraction": 0.5},
            [1.0] * 12 + [0.75 + 0.25 * math.cos(math.pi * i / 5) for i in range(5)],
        ),
        ({"schedule": "constant"}, [1.0] * 17),
        ({"schedule": "linear", "decay_steps": "auto"}, [1.0] + [1 - i / 16 for i in range(16)]),
    ],
)
def test_after_the_warm_up_every_schedule_has_its_form(
    settings: dict[str, str | float], expected: list[float]
) -> None:
    """Of 20 steps, 4 of them warm-up, 5 of them decay: f is the value of step 20, which none makes."""
    common = {"schedule": "wsd", "learning_rate": 1.0, "warmup_steps": 4, "decay_steps": 5}
    optim = OptimConfig.model_validate(common | settings)
    found = rates(optim, 20)
    assert found[:3] == [0.25, 0.5, 0.75]
    assert found[3:] == pytest.approx(expected, abs=1e-15)
    after = {"wsd": optim.final_fraction, "linear": 0.0, "constant": 1.0}[optim.schedule]
    assert learning_rate_at(optim.over(20), 20) == after


def test_a_decay_within_the_warm_up_has_the_lower_rate() -> None:
    optim = OptimConfig(schedule="wsd", learning_rate=1.0, warmup_steps=10, decay_steps=1.0)
    found = rates(optim, 10)
    warm = [(step + 1) / 10 for step in range(10)]
    assert found == [min(a, 1 - math.sqrt(b / 10)) for a, b in zip(warm, range(10), strict=True)]
    assert rates_line(optim.over(10)) == "learning rate: 0.1 at step 1, 0.0513 at step 10"


@pytest.mark.parametrize(
    ("schedule", "warmup", "decay", "lengths"),
    [
        ("cosine", 0.1, None, (30, 270)),
        ("wsd", 0.1, None, (30, 30)),
        ("wsd", 1, 0.25, (1, 75)),
        ("linear", 1.0, "auto", (300, 1)),
        ("constant", ".01", "none", (3, 297)),
        ("cosine", "7", "0012", (7, 12)),
    ],
)
def test_lengths_are_steps_or_fractions_of_the_run(
    schedule: str, warmup: object, decay: object, lengths: tuple[int, int]
) -> None:
    optim = OptimConfig.model_validate(
        {"schedule": schedule, "warmup_steps": warmup, "decay_steps": decay}
    )
    run = optim.over(300)
    assert (run.warmup_steps, run.decay_steps) == lengths
    assert optim.final_fraction == (0.0 if schedule in ("wsd", "linear") else 0.1)
    again = OptimConfig.model_validate_json(optim.model_dump_json())
    assert (again, type(again.warmup_steps)) == (optim, type(optim.warmup_steps))


def test_another_schedule_leaves_the_recipes_decay_behind(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "moeut_244m"\n[optim]\nschedule = "linear"\n', encoding="utf-8")
    for name, overrides in (("moeut_244m", ["optim.schedule=linear"]), (str(file), [])):
        optim = resolve(name, overrides, RECIPES).optim
        assert (optim.decay_steps, optim.final_fraction) == ("auto", 0.0)
        assert optim.warmup_steps == 0.04
    kept = resolve(str(file), ["optim.schedule=wsd", "optim.decay_steps=9"], RECIPES).optim
    assert (kept.decay_steps, kept.final_fraction) == (9, 0.0)
    own, saved = ["optim.schedule=wsd", "optim.final_fraction=0.3"], tmp_path / "config.json"
    resolve("smoke", own, RECIPES).save(saved)  # as a branch's trunk has it
    stored = {"trunk": lambda: Config.load(saved)}
    for schedule in ("linear", "cosine", "constant", "mine:f"):
        branch = resolve("trunk", [f"optim.schedule={schedule}"], stored).optim
        assert (branch.final_fraction, branch.decay_steps) == (0.3, "auto")
    same = resolve("moeut_244m", ["optim.schedule=cosine"], RECIPES).optim
    assert (same.decay_steps, same.final_fraction) == (1.0, 0.1)


@pytest.mark.slow
def test_no_recipe_has_an_odd_schedule() -> None:
    for name, build in RECIPES.items():
        config = build()
        last = rates(config.optim, config.train.steps)[-1] / config.optim.learning_rate
        assert last == pytest.approx(config.optim.final_fraction, rel=0.04), name
        assert not shape_notes(config.optim), name


@pytest.mark.parametrize(
    ("settings", "steps", "told"),
    [
        ({}, 200, "5e-05 at step 1, 0.001 after the warm-up (20 steps), 0.0001 at step 200"),
        ({"decay_steps": 160}, 300, "0.001 after the warm-up (20 steps), 0.0001 at step 300"),
        ({"decay_steps": 160}, 50, "0.001 after the warm-up (20 steps), 0.000929 at step 50"),
        ({}, 10, "5e-05 at step 1, 0.0005 at step 10"),
        ({"schedule": "wsd", "warmup_steps": 2}, 12, "warm-up (2 steps), 0.001 at step 12"),
        ({"warmup_steps": 0.5, "decay_steps": 0.9}, 200, "(100 steps), 0.00048 at step 200"),
        ({"schedule": "linear", "warmup_steps": 0}, 10, "0.001 at step 1, 0.0001 at step 10"),
        ({"schedule": "linear", "decay_steps": 8}, 30, "(20 steps), 0 at step 30"),
        ({"schedule": "constant", "warmup_steps": 0}, 1, "0.001 at step 1"),
        ({"schedule": "statistics:geometric_mean"}, 1, None),
        (
            {"schedule": "parts_of_a_test:falling"},
            2000,
            "0.001 at step 1, 0.0005 after the warm-up (20",
        ),
    ],
)
def test_a_run_is_told_its_first_its_highest_and_its_last_rate(
    settings: dict[str, object], steps: int, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = SimpleNamespace(falling=lambda step, run: 1e-3 / (1 + step / run.warmup_steps))
    monkeypatch.setitem(sys.modules, "parts_of_a_test", own)
    optim = OptimConfig.model_validate({"learning_rate": 1e-3, "warmup_steps": 20} | settings)
    if told is None:
        with pytest.raises(PluginError, match=r"optim\.schedule"):
            rates_line(optim.over(steps))
    else:
        assert told in rates_line(optim.over(steps))


@pytest.mark.parametrize(
    ("settings", "steps", "told"),
    [
        (
            {},
            300,
            "learning rate: 0.000831 at step 101, 0.0001 at step 300; before: 0.00045 at step 101, "
            "0.0001 at step 160",
        ),
        (
            {"schedule": "wsd"},
            105,
            "learning rate: 0.000293 at step 101, 5.13e-05 at step 105; before: 0.001 at step 101, ",
        ),
        ({"schedule": "constant"}, 300, "0.001 at step 101, 0.001 at step 300; before: 0.001 at"),
        ({"decay_steps": 70}, 300, "0.0001 at step 101, 0.0001 at step 300; before: 0.0001 at"),
        ({"warmup_steps": 120}, 160, "0.000842 at step 101, 0.001 after the warm-up (120 steps)"),
        ({}, 160, "learning rate: 0.00045 at step 101, 0.0001 at step 160"),
    ],
)
def test_a_continued_run_is_told_its_old_rates_beside_the_new(
    settings: dict[str, object], steps: int, told: str
) -> None:
    optim = OptimConfig.model_validate({"learning_rate": 1e-3, "warmup_steps": 20} | settings)
    line = rates_line(optim.over(steps), before=optim.over(160), done=100)
    assert told in line
    assert ("before" in line) == (steps != 160)


def test_the_old_rates_import_nothing_that_the_run_itself_does_not() -> None:
    optim = OptimConfig(learning_rate=1e-3)
    other = OptimConfig(learning_rate=1e-3, schedule="not_a_module:f")
    assert "before" not in rates_line(optim.over(20), before=other.over(10), done=10)


def test_a_decay_that_is_over_is_known_and_the_advice_gives_rates_above_the_floor() -> None:
    """Every continuation of built-in schedules: what is not told has no step at the floor."""
    lengths: list[int | float] = [1, 5, 8, 0.3, 0.9]
    found = 0
    for schedule in ("cosine", "linear", "wsd", "constant"):
        for warmup, decay, final in product((0, 3, 0.5), ["auto", *lengths], (0.0, 0.1, 1.0)):
            values = {"schedule": schedule, "warmup_steps": warmup, "final_fraction": final}
            optim = OptimConfig.model_validate(values | {"decay_steps": decay})
            advised = OptimConfig.model_validate(values | {"decay_steps": "auto"})
            floor = optim.learning_rate * final
            for done, steps in ((10, 20), (10, 11), (6, 20)):
                later = [learning_rate_at(optim.over(steps), step) for step in range(done, steps)]
                is_over = decay_is_over(optim.over(steps), done)
                found += is_over
                assert is_over or max(later) > floor or final == 1
                assert not is_over or max(later) == floor
                assert learning_rate_at(advised.over(steps), done) > floor or final == 1
    assert found > 50
    assert not decay_is_over(OptimConfig().over(10), 10)  # no step is left


def test_a_form_of_the_decay_that_no_schedule_reads_is_told() -> None:
    for schedule in ("cosine", "linear", "constant"):
        [note] = shape_notes(OptimConfig(schedule=schedule, decay_shape="linear"))
        assert (
            note
            == f"optim.decay_shape=linear: optim.schedule={schedule} does not read it; wsd does"
        )
    for values in ({"schedule": "wsd", "decay_shape": "linear"}, {"schedule": "mine:f"}, {}):
        assert shape_notes(OptimConfig.model_validate(values)) == []


def test_a_files_own_decay_survives_another_schedule_and_muons_settings_go_with_muon(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.toml"
    words = 'recipe = "smoke"\n[optim]\nkind = "muon"\nmuon.momentum = 0.9\n'
    file.write_text(f"{words}final_fraction = 0.5\ndecay_steps = 4\n", encoding="utf-8")
    optim = resolve(str(file), ["optim.schedule=wsd", "optim.kind=adamw"], RECIPES).optim
    assert (optim.kind, optim.final_fraction, optim.decay_steps) == ("adamw", 0.5, 4)
    assert resolve("smoke", ["optim.schedule=wsd"], RECIPES).optim.final_fraction == 0
    with pytest.raises(ValueError, match=r"optim.muon=.* with optim.kind='adamw'"):
        resolve(str(file), ["optim.kind=adamw", "optim.muon.momentum=0.8"], RECIPES)


# train.tokens, train.epochs ---------------------------------------------------------------------


def train_of(name: str, *overrides: str) -> tuple[int, int | None, float | None]:
    train = resolve(name, overrides, RECIPES).train
    return train.steps, train.tokens, train.epochs


def test_the_last_word_says_how_long_the_run_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "smoke"\n[train]\ntokens = 1e5\n', encoding="utf-8")
    per_step = 16 * 128
    assert train_of(str(file)) == (math.ceil(100_000 / per_step), 100_000, None)
    assert train_of(str(file), "train.global_batch=32") == (25, 100_000, None)
    assert train_of(str(file), "train.steps=7") == (7, None, None)
    assert train_of(str(file), "train.epochs=2") == (160, None, 2.0)
    assert train_of(str(file), "train.tokens=none") == (160, None, None)
    assert train_of("smoke", "train.tokens=2e9") == (976_563, 2_000_000_000, None)
    saved = tmp_path / "config.json"
    resolve(str(file), [], RECIPES).save(saved)
    as_recipe = {str(saved): lambda: Config.load(saved)}
    for change, steps in (("tokens=2e5", 98), ("steps=9", 9), ("seed=1", 49)):
        assert resolve(str(saved), [f"train.{change}"], as_recipe).train.steps == steps
    with pytest.raises(ValueError, match=r"tokens are 2 steps, and train\.steps=5: give one of"):
        Config.model_validate({"train": {"steps": 5, "tokens": 5_000}})
