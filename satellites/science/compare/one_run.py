"""Executes one run of a comparison in a separate process: `python -m … train|score RUN_DIR`.

It dies when its standard input ends, whose other end the parent process holds. What it has saved is
there when the run continues. Nothing heavy is imported at the top, so that this holds from the
start.
"""

import os
import sys
import threading
import time
from pathlib import Path

from ..files import read_json, write_json

ORIGIN = "origin.json"  # with which code and on which machine a run was started, each time
START = "start.json"  # arguments of moebius.start_from, of a run that starts from another
SCORES = "scores.json"  # those of tasks, in the run folder
SCORING = "scoring.json"  # which tasks are asked for
_BELIEVED_ALIVE_S = 60.0


def main() -> None:
    """Trains the run of a folder, or scores its newest checkpoint."""
    end_with_standard_input()
    phase, run_dir = sys.argv[1], Path(sys.argv[2])
    if phase == "train":
        train(run_dir)
    else:
        score(run_dir)


def end_with_standard_input() -> None:
    """Ends this process when nobody holds the other end of its standard input."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def train(run_dir: Path) -> None:
    """Trains the configuration in the run folder, or what START says, from its newest checkpoint.

    Nobody else works in a comparison's folder, which is locked. A killed run counts as alive for
    some 20 s, so training is retried.
    """
    import moebius

    from .environment import environment

    starts = read_json(run_dir / ORIGIN).get("starts", [])
    write_json(run_dir / ORIGIN, {"starts": [*starts, environment()]})
    config, start = moebius.Config.load(run_dir / "config.json"), read_json(run_dir / START)
    if start:
        config = moebius.start_from(start["source"], *start["overrides"], grow=start["grow"])
    deadline = time.monotonic() + _BELIEVED_ALIVE_S
    while True:
        try:
            moebius.fit(config, run_dir, show=False)
            return
        except moebius.JobError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def score(run_dir: Path) -> None:
    """Scores the newest checkpoint on the requested tasks."""
    import moebius

    request = read_json(run_dir / SCORING)
    report = moebius.score_tasks(run_dir, request["tasks"], request["data"], limit=request["limit"])
    scores = {
        result.name: {name: metric.value for name, metric in result.metrics.items()}
        for result in report.tasks
    }
    write_json(run_dir / SCORES, {"request": request, "step": report.step, "scores": scores})


if __name__ == "__main__":
    main()
