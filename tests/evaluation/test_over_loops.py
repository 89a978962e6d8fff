"""`moebius eval --loops`: the same weights, repeated more or less often."""

import shutil

import pytest

from moebius.cli.main import main
from moebius.evaluation.over_loops import PICTURE, draw, measure_over_loops, table_of
from moebius.evaluation.perplexity import measure
from moebius.model.loops.exits import ExitRule
from moebius.train.config.run_config import Config


@pytest.mark.slow
def test_the_trained_number_of_loops_has_the_runs_own_loss(bytes_run, tmp_path):
    trained = Config.load(bytes_run / "config.json").model.num_repeats
    found = measure_over_loops(bytes_run, (1, trained, 5))
    losses = found.figures["loss"]
    assert losses[1] == measure(bytes_run).result.loss
    assert len({round(loss, 6) for loss in losses}) == 3, "another number of loops changes the loss"
    assert measure(bytes_run, loops=5).result.loss == losses[2]
    assert found.flops[0] < found.flops[1] < found.flops[2]
    assert table_of(found).row_count == 3
    picture = draw(found, tmp_path)
    assert picture.name == PICTURE
    assert picture.stat().st_size > 5000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--loops", "1,2", "--prompt", "a"], "--prompt takes one number of --loops"),
        (["--loops", "2", "--stride", "8"], "--loops and --stride cannot be combined"),
        (["--loops", "1,2", "--tasks", "all"], "--tasks needs --data"),
        (["--loops", "1,2", "--context", "20"], "--context needs --tasks"),
        (
            ["--loops", "1,2", "--exit", "kl=1"],
            "--exit measures the loss, with one number of loops",
        ),
        (["--exit", "kl=1", "--prompt", "a"], "omit --prompt"),
        (["--exit", "kl"], "'kl' is no exit rule"),
        (["--exit", "gate=1"], "the model has no gate"),
        (["--cache-loops", "2"], "--cache-loops needs --prompt"),
        (["--cache-loops", "0", "--prompt", "a"], "--cache-loops 0 must be at least 1"),
    ],
)
def test_what_cannot_be_measured_over_loops_is_refused(bytes_run, given, words, capsys):
    with pytest.raises(SystemExit):
        main(["eval", str(bytes_run), *given])
    assert words in capsys.readouterr().err


def test_sequences_that_leave_early_are_measured_with_their_loops(bytes_run, moebius):
    answer = moebius("eval", str(bytes_run), "--exit", "state=1e9")
    assert ", with 1.00 loops on average" in answer.text
    [whole, early] = [
        measure(bytes_run, exit_rule=ExitRule("state", threshold)).result
        for threshold in (1e-9, 1e9)
    ]
    trained = Config.load(bytes_run / "config.json").model.num_repeats
    assert (whole.loops, early.loops) == (trained, 1)
    assert whole.loss == measure(bytes_run).result.loss
    assert early.loss == measure(bytes_run, loops=1).result.loss


def test_a_text_is_written_with_any_number_of_loops(bytes_run, moebius):
    [once, trained, default] = [
        moebius("eval", str(bytes_run), "--prompt", "abc", "--temperature", "0", *given).text
        for given in (["--loops", "1"], ["--loops", "2"], [])
    ]
    assert once != trained == default


@pytest.mark.slow
def test_a_cache_that_loops_share_writes_another_text(bytes_run, moebius):
    written = []
    for given in ([], ["--cache-loops", "1"], ["--cache-loops", "99"]):
        asked = ["eval", str(bytes_run), "--prompt", "abc", "--temperature", "0", *given]
        written.append(moebius(*asked).text)
    assert written[0] == written[2]
    assert written[0] != written[1]


def test_a_model_that_shares_no_layers_has_no_other_number_of_loops(bytes_run, tmp_path, capsys):
    config = Config.load(bytes_run / "config.json")
    model = config.model.changed({"layers_per_group": config.model.num_layers})
    run_dir = shutil.copytree(bytes_run, tmp_path / "run")
    config.model_copy(update={"model": model}).save(run_dir / "config.json")
    with pytest.raises(SystemExit):
        main(["eval", str(run_dir), "--loops", "2"])
    assert "the model shares no layers" in capsys.readouterr().err
