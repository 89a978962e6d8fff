"""`moebius eval`: what a trained model is worth, how likely it finds a text, and what it writes."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..arguments import Commands, add_command, add_run_argument

_ONE_OF = ("tasks", "score", "stride", "prompt")
_OF_TASKS = ("data", "limit", "context", "too_long", "json")


def add_commands(commands: Commands) -> None:
    """Declares `moebius eval`."""
    text = "measure a trained model's loss or zero-shot scores, score a text, or let it write"
    parser = add_command(
        commands,
        "eval",
        _eval,
        text,
        examples=[
            "eval runs/mine",
            "eval runs/mine --stride 64",
            "eval runs/mine --tasks paper --data eval/ --limit 500",
            "eval runs/mine --tasks hellaswag,piqa --data hub --json",
            'eval runs/mine --prompt "Once upon a time" --tokens 50 --temperature 0.7',
            'eval runs/mine --score "the band closes upon itself"',
        ],
    )
    add_run_argument(parser)
    parser.add_argument(
        "--step", type=int, metavar="N", help="of which checkpoint; default: the newest"
    )
    parser.add_argument("--split", choices=["validation", "train"], default="validation")
    parser.add_argument(
        "--rows", type=int, default=0, metavar="N", help="at most so many rows; default: all"
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="windows that overlap: they move by N tokens; tells bits per byte as well",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="continue this text instead of measuring")
    parser.add_argument(
        "--score", metavar="TEXT", help="print how likely this text is instead of measuring"
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=1,
        metavar="N",
        help="of the group context, for models that route sequences together",
    )
    _add_task_arguments(parser)
    parser.add_argument(
        "--tokens", type=int, default=100, metavar="N", help="to write after the prompt"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="of the sampling; 0: most likely",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the sampling and of the group context"
    )


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what zero-shot tasks need."""
    group = parser.add_argument_group("zero-shot tasks")
    group.add_argument(
        "--tasks",
        metavar="NAME,…",
        help="score these: paper (the six of MoEUT's paper), all, or names (docs/evaluation.md)",
    )
    group.add_argument(
        "--data", metavar="DIR", help="folder of NAME.jsonl[.zst]; hub: the published sets"
    )
    group.add_argument(
        "--limit", type=int, metavar="N", help="at most so many items of each, evenly over its file"
    )
    group.add_argument(
        "--context", type=int, metavar="S", help="the longest input in tokens; default: as trained"
    )
    group.add_argument(
        "--too-long",
        choices=["fail", "skip", "truncate"],
        help="items with an answer longer than the context: an error (default), left out, or only "
        "the answer's end is scored",
    )
    group.add_argument("--json", action="store_true", help="everything as a JSON object")


def _eval(options: argparse.Namespace) -> int:
    """Carries out `moebius eval`."""
    asked = [name for name in _ONE_OF if getattr(options, name) is not None]
    asked = [name.replace("_", "-") for name in asked]
    if len(asked) > 1:
        raise ValueError(f"--{asked[0]} and --{asked[1]} are two things to do: ask for one")
    if options.tasks is None:
        _refuse(options, _OF_TASKS, "--tasks: name the tasks to score")
    return _text_or_loss(options) if options.tasks is None else _tasks(options)


def _refuse(options: argparse.Namespace, names: Sequence[str], wanted: str) -> None:
    """Refuses options that only mean something beside another."""
    given = [name for name in names if getattr(options, name) not in (None, False)]
    if given:
        raise ValueError(f"--{given[0].replace('_', '-')} goes with {wanted}, or leave it out")


def _tasks(options: argparse.Namespace) -> int:
    """Scores the model on tasks and prints the report; the first rank does."""
    import json

    from rich.console import Console

    from ...evaluation.tasks.items import HUB
    from ...evaluation.zero_shot import measure_tasks
    from ..progress import task_bars
    from .evaluate_report import plain_report, render_report

    if options.data is None:
        raise ValueError("--tasks needs --data: the folder of the task files, or hub")
    names = [name for name in options.tasks.split(",") if name]
    with task_bars(Console(stderr=True)) as on_task:
        report = measure_tasks(
            options.run_dir,
            names,
            options.data if options.data == HUB else Path(options.data),
            step=options.step,
            limit=options.limit,
            context=options.context,
            too_long=options.too_long or "fail",
            draws=options.draws,
            seed=options.seed,
            on_task=on_task,
        )
    if report is None:  # another rank than the first
        return 0
    if options.json:
        print(json.dumps(plain_report(report), indent=2))
    else:
        Console().print(render_report(report))
    return 0


def _text_or_loss(options: argparse.Namespace) -> int:
    """Measures the loss, scores a text or writes one."""
    from ...evaluation.perplexity import measure
    from ...evaluation.text import score_text

    run_dir, step = options.run_dir, options.step
    if options.score is not None:
        print(score_text(run_dir, options.score, step=step, draws=options.draws, seed=options.seed))
    elif options.stride is not None:
        print(_sliding(options))
    elif options.prompt is None:
        print(measure(run_dir, step=step, split=options.split, max_rows=options.rows))
    else:
        _write(options)
    return 0


def _sliding(options: argparse.Namespace) -> object:
    """Measures with windows that overlap, with a bar."""
    from rich.console import Console
    from rich.progress import Progress

    from ...evaluation.perplexity import measure_sliding

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("tokens", total=None)
        return measure_sliding(
            options.run_dir,
            stride=options.stride,
            step=options.step,
            split=options.split,
            max_rows=options.rows,
            advance=lambda done, total: progress.update(bar, completed=done, total=total),
        )


def _write(options: argparse.Namespace) -> None:
    """Prints what the model writes after the prompt, piece by piece."""
    from ...evaluation.text import write_text

    pieces = write_text(
        options.run_dir,
        options.prompt,
        step=options.step,
        num_tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
