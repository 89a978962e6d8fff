"""One run of a comparison, in a process of its own: `python -m … train|score|cost RUN_DIR`.

It ends at once when its standard input does: the other end is held by the process that started it,
however that one ends. What has been saved is there when the run goes on. Nothing heavy is imported
at the top, so that this holds from the first moment on.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def main() -> None:
    """Trains the run, scores its newest checkpoint, or measures steps, as its folder asks."""
    end_with_standard_input()
    phase, run_dir = sys.argv[1], Path(sys.argv[2])
    if phase == "train":
        _train(run_dir)
    elif phase == "score":
        score(run_dir)
    else:
        from .cost import measure_here

        measure_here(run_dir)


def end_with_standard_input() -> None:
    """Lets this process die when nobody holds the other end of its standard input."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _train(run_dir: Path) -> None:
    from moebius.train.__main__ import main as train_run

    if os.environ.get("RANK", "0") == "0":
        note_origin(run_dir)
    sys.argv[1:] = [str(run_dir)]
    train_run()


def note_origin(run_dir: Path) -> None:
    """Adds to origin.json with which code and on which machine the run goes on from here."""
    from .environment import environment
    from .runner import read_json

    path = run_dir / "origin.json"
    known = read_json(path).get("starts", [])
    text = json.dumps({"starts": [*known, environment()]}, indent=1) + "\n"
    partial = path.with_suffix(".tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def score(run_dir: Path) -> None:
    """Scores the newest checkpoint, and writes scores.json."""
    from moebius.evaluation.zero_shot import measure_tasks

    from .runner import SCORES, SCORING

    request: dict[str, Any] = json.loads((run_dir / SCORING).read_text(encoding="utf-8"))
    report = measure_tasks(
        run_dir, request["tasks"], request["data"], limit=request["limit"], seed=0
    )
    assert report is not None
    scores = {
        result.name: {name: metric.value for name, metric in result.metrics.items()}
        for result in report.tasks
    }
    found = {"request": request, "step": report.step, "scores": scores}
    partial = (run_dir / SCORES).with_suffix(".tmp")
    partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
    partial.replace(run_dir / SCORES)


if __name__ == "__main__":
    main()
