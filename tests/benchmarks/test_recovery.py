"""What the benchmark of recoveries makes of its measurements."""

from rich.console import Console

from benchmarks.recovery import Bench, Recovery, draw, measure, medians


def test_medians_are_of_each_victim_and_each_phase():
    phases = ({"detect": 1.0, "load": 0.5}, {"detect": 3.0, "load": 0.1}, {"detect": 2.0})
    found = [
        Recovery("submit", 20.0, {"program": 3.0, "before": 12.0}),
        *(Recovery("rank", 4.0 + own["detect"], own) for own in phases),
        Recovery("rank", 0.0, {}, "TimeoutError: no sign"),
        Recovery("node", 0.0, {}, "TimeoutError: no sign"),
    ]
    figures = medians(found)
    assert list(figures) == ["submit", "rank", "node"]
    assert figures["rank"]["seconds"] == 6.0
    assert figures["rank"]["all_seconds"] == [5.0, 7.0, 6.0]
    assert figures["rank"]["phases_s"]["detect"] == 2.0
    assert figures["node"] == {"runs": 0, "failures": ["TimeoutError: no sign"]}
    console = Console(width=80, record=True)
    console.print(draw(figures))
    lines = [line for line in console.export_text().splitlines() if "│" in line]
    told = [[cell.strip() for cell in line.strip()[1:-1].split("│")] for line in lines]
    assert told[0] == ["to the first step", "20.00", "6.00", ""]
    assert ["(program)", "3.00", "", ""] in told
    assert ["detect", "", "2.00", ""] in told
    assert ["failed", "", "1", "1"] in told


class Failing(Bench):
    """Whose second sample fails."""

    def __init__(self) -> None:
        self.samples = 0

    def sample(self, victim: str) -> Recovery:
        self.samples += 1
        if self.samples == 2:
            raise TimeoutError("no sign")
        return Recovery(victim, 1.0, {})

    def end_job(self) -> None:
        pass

    def end(self) -> None:
        pass


def test_a_sample_that_fails_does_not_end_the_others():
    found = measure(2, ("rank", "node"), Failing(), minutes=1.0)
    assert [entry.victim for entry in found] == ["rank", "node", "rank", "node"]
    assert [bool(entry.failure) for entry in found] == [False, True, False, False]
    assert measure(2, ("rank",), Failing(), minutes=-1.0) == [], "no round begins after its time"
