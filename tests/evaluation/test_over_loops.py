"""`moebius eval --loops`: the same weights, repeated more or less often."""

import pytest

from moebius.cli.main import main
from moebius.evaluation.over_loops import PICTURE, draw, measure_over_loops, table_of
from moebius.evaluation.perplexity import measure
from moebius.train.config.run_config import Config


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
    ],
)
def test_what_cannot_be_measured_over_loops_is_refused(bytes_run, given, words, capsys):
    with pytest.raises(SystemExit):
        main(["eval", str(bytes_run), *given])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("loops", ["0", "two", "1,,2", "-1"])
def test_loops_that_are_no_numbers_are_refused(loops, capsys):
    with pytest.raises(SystemExit):
        main(["eval", "runs/none", f"--loops={loops}"])
    assert "give whole numbers from 1 on, as in 1,2,4,8" in capsys.readouterr().err


def test_a_model_that_shares_no_layers_has_no_other_number_of_loops(bytes_run, tmp_path, capsys):
    config = Config.load(bytes_run / "config.json")
    model = config.model.changed({"layers_per_group": config.model.num_layers})
    config.model_copy(update={"model": model}).save(tmp_path / "config.json")
    with pytest.raises(SystemExit):
        main(["eval", str(tmp_path), "--loops", "2"])
    assert "the model shares no layers" in capsys.readouterr().err
