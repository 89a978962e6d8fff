"""Trains the runs of satellites/science/docs/loops.md, and reports what has finished of them.

    python -m moebius_science.loops text FOLDER [--jobs 2] [--report] [section.key=value …]
    python -m moebius_science.loops p_hop FOLDER …
    python -m moebius_science.loops permutation_words FOLDER …

The same command continues after an interruption. `--report` trains nothing. Both write STUDY.md and
STUDY.png into FOLDER/STUDY; the tables of `moebius compare` below it have every run's losses. The
exit code is 0 once all runs have finished, 1 if some have failed, and 130 after an interruption.
"""

import argparse

from . import tasks, text
from .study import Study, add_arguments, carry_out


def main() -> int:
    """Trains and reports one study."""
    options = _parser().parse_intermixed_args()
    folder, overrides = options.folder.absolute() / options.study, tuple(options.overrides)
    study: Study
    if options.study == "text":
        study = text.TextStudy(folder, overrides, options.jobs)
    else:
        study = tasks.TaskStudy(options.study, folder, overrides, options.jobs)
    return carry_out(study, options.study, only_report=options.report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moebius_science.loops",
        description="satellites/science/docs/loops.md has the protocol",
    )
    parser.add_argument("study", choices=("text", *tasks.TASKS))
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
