"""`moebius eval`: what a trained model is worth, how likely it finds a text, and what it writes."""

import argparse

from .arguments import Commands, add_command, add_run_argument


def add_commands(commands: Commands) -> None:
    """Declares `moebius eval`."""
    text = "measure a trained model's loss, score a text, or let it write"
    parser = add_command(
        commands,
        "eval",
        _eval,
        text,
        examples=[
            "eval runs/mine",
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


def _eval(options: argparse.Namespace) -> int:
    """Carries out `moebius eval`."""
    from ..evaluation.report import measure, score_text

    run_dir, step = options.run_dir, options.step
    if options.score is not None:
        print(score_text(run_dir, options.score, step=step, draws=options.draws, seed=options.seed))
    elif options.prompt is None:
        print(measure(run_dir, step=step, split=options.split, max_rows=options.rows))
    else:
        _write(options)
    return 0


def _write(options: argparse.Namespace) -> None:
    """Prints what the model writes after the prompt, piece by piece."""
    from ..evaluation.report import write_text

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
