"""What the benchmark of recoveries makes of its measurements."""

from rich.console import Console

from benchmarks.recovery import Recovery, config_for, draw, medians


def test_medians_are_of_each_victim_and_each_phase():
    phases = ({"detect": 1.0, "load": 0.5}, {"detect": 3.0, "load": 0.1}, {"detect": 2.0})
    found = [
        Recovery("submit", 20.0, {"before": 12.0}),
        *(Recovery("rank", 4.0 + own["detect"], own) for own in phases),
    ]
    figures = medians(found)
    assert list(figures) == ["submit", "rank"]
    assert figures["rank"]["seconds"] == 6.0
    assert figures["rank"]["all_seconds"] == [5.0, 7.0, 6.0]
    assert figures["rank"]["phases_s"]["detect"] == 2.0
    console = Console(width=60, record=True)
    console.print(draw(figures))
    lines = [line for line in console.export_text().splitlines() if "│" in line]
    told = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in lines]
    assert told[0] == ["to the first step", "20.00", "6.00"]
    assert ["detect", "", "2.00"] in told


def test_the_job_saves_often_and_drills_nothing():
    config = config_for(100, warm_start=False)
    assert config.checkpoint.every == 5
    assert config.job.rehearse_failure_at_step is None
    assert not config.job.warm_start
