"""Trains the runs of satellites/science/docs/loops.md, and reports what has finished of them.

    python -m moebius_science.loops text FOLDER [--jobs 2] [--report] [section.key=value …]
    python -m moebius_science.loops p_hop FOLDER …
    python -m moebius_science.loops permutation_words FOLDER …

The same command continues after an interruption. `--report` trains nothing. Both write STUDY.md and
STUDY.png into FOLDER/STUDY; the tables of `moebius compare` below it have every run's losses. The
exit code is 0 once all runs have finished, 1 if some have failed, and 130 after an interruption.
"""

import argparse
from pathlib import Path

from rich.console import Console

from ..compare.tables import markdown
from ..files import write_whole
from . import tasks, text


def main() -> int:
    """Trains and reports one study."""
    options = _parser().parse_intermixed_args()
    folder, console = options.folder.absolute() / options.study, Console()
    study: text.TextStudy | tasks.TaskStudy
    if options.study == "text":
        study = text.TextStudy(folder, tuple(options.overrides), options.jobs)
    else:
        study = tasks.TaskStudy(options.study, folder, tuple(options.overrides), options.jobs)
    code = 0 if options.report else study.train(console)
    found = study.report()
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"## {table.title}\n\n{markdown(table)}" for table in found.tables]
    words = "\n\n".join([*parts, found.words]).strip() + "\n"
    write_whole(folder / f"{options.study}.md", words.encode())
    if found.picture:
        write_whole(folder / f"{options.study}.png", found.picture)
    console.print(words, markup=False, highlight=False, soft_wrap=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moebius_science.loops",
        description="satellites/science/docs/loops.md has the protocol",
    )
    parser.add_argument("study", choices=("text", *tasks.TASKS))
    parser.add_argument("folder", type=Path, help="of all runs and of the report")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default: %(default)s")
    parser.add_argument("--report", action="store_true", help="train nothing")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
