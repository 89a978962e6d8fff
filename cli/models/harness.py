"""`moebius lm-eval`: EleutherAI's lm-evaluation-harness, which knows our checkpoints then."""

import argparse

from ..arguments import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Declares `moebius lm-eval`."""
    parser = add_command(
        commands,
        "lm-eval",
        _lm_eval,
        "run EleutherAI's lm-evaluation-harness, with our checkpoints as --model moebius",
        examples=[
            "lm-eval --model moebius --model_args path=runs/mine --tasks arc_easy",
            "lm-eval run --model moebius --model_args path=runs/mine,step=500 --tasks my_task.yaml",
        ],
        notes="Takes what lm_eval takes; `lm_eval run --help` tells. Needs pip install "
        "'moebius[lm-eval]'. --model_args: path=RUN, and as wanted step=N, max_length=S, seed=N.",
    )
    parser.set_defaults(passed_on=())


def _lm_eval(options: argparse.Namespace) -> int:
    """Carries out `moebius lm-eval`."""
    import importlib.util

    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("the harness is not installed: pip install 'moebius[lm-eval]'")
    from ...evaluation.lm_eval_model import main

    main(options.passed_on)
    return 0
