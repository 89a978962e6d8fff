"""`moebius eval`, `chat` and `lm-eval`: measure a trained model, score a text, or generate one."""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import Commands, add_checkpoint_argument, add_command, add_weights_argument
from ..console import console, print_message, print_plain

if TYPE_CHECKING:
    from ...evaluation.restore import ModelChoice, Restored
    from ...evaluation.zero_shot import ZeroShotReport

_DEFAULTS = {"tokens": 100, "temperature": 0.8, "top_p": 1.0, "draws": 1, "seed": 0}
_NEEDS = {  # options that only some measurements read
    **dict.fromkeys(("data", "limit", "context", "too_long", "per_item", "json"), ("tasks",)),
    **dict.fromkeys(("chat", "tokens", "temperature", "top_p", "cache_loops"), ("prompt",)),
    "draws": ("tasks", "score"),
    "seed": ("tasks", "score", "prompt"),
    "per_document": ("text",),
}


def add_commands(commands: Commands) -> None:
    """Declares `moebius eval`, `moebius chat` and `moebius lm-eval`."""
    _add_eval(commands)
    _add_chat(commands)
    parser = add_command(
        commands,
        "lm-eval",
        _lm_eval,
        "run EleutherAI's lm-evaluation-harness on moebius checkpoints (--model moebius)",
        examples=[
            "lm-eval --model moebius --model_args path=runs/mine --tasks arc_easy",
            "lm-eval run --model moebius --model_args path=runs/mine@500 --tasks my_task.yaml",
        ],
        notes="Takes the arguments of lm_eval; `lm_eval run --help` lists them. Needs pip install "
        "'moebius[lm-eval]'. --model_args: path=RUN[@STEP] and, optionally, step=N, max_length=S, "
        "seed=N.",
    )
    parser.set_defaults(passed_on=())


def _add_eval(commands: Commands) -> None:
    parser = add_command(
        commands,
        "eval",
        _eval,
        "measure a trained model's loss or zero-shot scores, score a text, or generate text",
        examples=[
            "eval runs/mine",
            "eval runs/mine --stride 64",
            "eval runs/mine --loops 1,2,4,8",
            "eval runs/mine --exit kl=0.01",
            "eval runs/mine --tasks paper --data eval/ --limit 500",
            "eval runs/mine --tasks hellaswag,piqa --data hub --json",
            'eval runs/mine --prompt "Once upon a time" --tokens 50 --temperature 0.7',
            'eval runs/mine --score "the band closes upon itself"',
            "eval runs/mine --text notes.txt web.jsonl.zst --per-document",
        ],
    )
    add_checkpoint_argument(parser)
    add_weights_argument(parser)
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="use overlapping windows that move by N tokens; also prints bits per byte",
    )
    parser.add_argument(
        "--loops",
        type=_numbers,
        metavar="N,…",
        help="apply the repeated layers N times; several numbers give a table and a picture",
    )
    parser.add_argument(
        "--exit",
        metavar="RULE",
        help="let a sequence leave the loops early: kl=X, state=X or gate=Q (docs/evaluate.md)",
    )
    parser.add_argument(
        "--cache-loops",
        type=int,
        metavar="M",
        help="with --prompt: keep keys and values of M loops only; loop r uses those of loop r mod M",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="continue this text instead of measuring")
    parser.add_argument(
        "--chat", action="store_true", help="answer --prompt through the run's chat template"
    )
    parser.add_argument(
        "--score", metavar="TEXT", help="print how likely this text is instead of measuring"
    )
    _add_sampling_arguments(parser, tokens=100)
    parser.add_argument(
        "--draws",
        type=int,
        metavar="N",
        help="draws of the group context, for models that route sequences together; default: 1",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        action="extend",
        metavar="FILE",
        help="measure the loss on these files, folders, globs or URLs, in any format of `prepare`; "
        "prepare.text_field=NAME can stand among them",
    )
    parser.add_argument(
        "--per-document", action="store_true", help="with --text: first the loss of each document"
    )
    _add_task_arguments(parser)


def _add_sampling_arguments(parser: argparse.ArgumentParser, *, tokens: int) -> None:
    parser.add_argument(
        "--tokens", type=int, metavar="N", help=f"number of tokens to generate; default: {tokens}"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="of sampling, default 0.8; 0: the likeliest token",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample among the likeliest tokens that have probability P together; default: 1, all",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of sampling and of the group context; default: 0",
    )


def _add_chat(commands: Commands) -> None:
    parser = add_command(
        commands,
        "chat",
        _chat,
        "talk with a trained model in the terminal, or let it answer each line of a pipe",
        examples=["chat runs/mine", "chat runs/mine@500 --temperature 0.7 --top-p 0.9"],
        notes="Writes prompts as the run's chat template does; a model without one continues the text. "
        "/reset forgets the conversation, Ctrl-C ends an answer (in a pipe, the command), and /exit or "
        "Ctrl-D ends the command.",
    )
    add_checkpoint_argument(parser, steps=False)
    add_weights_argument(parser)
    _add_sampling_arguments(parser, tokens=256)
    parser.set_defaults(**_DEFAULTS | {"tokens": 256, "step": None, "loops": None})


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of zero-shot tasks."""
    group = parser.add_argument_group("zero-shot tasks")
    group.add_argument(
        "--tasks",
        metavar="NAME,…",
        help="tasks to score: paper (the six of MoEUT's paper), all, or names (docs/evaluate.md)",
    )
    group.add_argument(
        "--data", metavar="DIR", help="folder of NAME.jsonl[.zst]; hub: the published sets"
    )
    group.add_argument(
        "--limit", type=int, metavar="N", help="at most N items per task, spread over its file"
    )
    group.add_argument(
        "--context", type=int, metavar="S", help="the longest input in tokens; default: as trained"
    )
    group.add_argument(
        "--too-long",
        choices=["fail", "skip"],
        help="items with an answer longer than the context: an error (default), or left out",
    )
    group.add_argument(
        "--per-item", type=Path, metavar="FILE.parquet", help="write what each item scored"
    )
    group.add_argument("--json", action="store_true", help="everything as a JSON object")


def _eval(options: argparse.Namespace) -> int:
    one_of = {"tasks": _tasks, "score": _score, "stride": _measure_windows, "prompt": _write}
    one_of["text"] = _measure_windows
    asked = [f"--{name}" for name in one_of if getattr(options, name) is not None]
    if len(asked) > 1:
        raise ValueError(f"{asked[0]} and {asked[1]} cannot be combined: choose one")
    if options.loops is not None and options.stride is not None:
        raise ValueError("--loops and --stride cannot be combined: choose one")
    if options.exit is not None and (asked or len(options.loops or ()) > 1):
        raise ValueError(
            f"--exit measures the loss, with one number of loops: omit {[*asked, '--loops 1,2'][0]}"
        )
    for name, needed in _NEEDS.items():
        value = getattr(options, name)
        if (
            value is not None
            and value is not False
            and all(getattr(options, each) is None for each in needed)
        ):
            option = f"--{name.replace('_', '-')}"
            wanted = " or ".join(f"--{each}" for each in needed)
            raise ValueError(f"{option} needs {wanted}: add it, or leave {option} out")
    if options.cache_loops is not None and options.cache_loops < 1:
        raise ValueError(f"--cache-loops {options.cache_loops} must be at least 1")
    for name, value in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.loops is not None and len(options.loops) > 1:
        return _over_loops(options)
    measured = one_of[asked[0].removeprefix("--")] if asked else _measure
    measured(options)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    """Reads numbers of loops, separated by commas."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 1 on, as in 1,2,4,8")
    return numbers


def _over_loops(options: argparse.Namespace) -> int:
    """Measures the loss, or the tasks, with every number of loops."""
    from ...distributed.checkpoint.format import find_checkpoint
    from ...evaluation.over_loops import draw, measure_over_loops, table_of

    for name in ("prompt", "score", "text", "json", "per_item"):
        if getattr(options, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} takes one number of --loops: {options.loops[0]}, for example"
            )
    scores = None if options.tasks is None else partial(_scores, options)
    # one checkpoint, also of a run that saves meanwhile
    options.path, options.step = find_checkpoint(options.path, options.step), None
    found = measure_over_loops(options.path, options.loops, scores=scores, weights=options.weights)
    screen = console()
    screen.print(table_of(found))
    screen.print(f"picture: {draw(found, options.path)}", soft_wrap=True, highlight=False)
    return 0


def _tasks(options: argparse.Namespace) -> None:
    """Scores the model on tasks; rank 0 prints the report."""
    import json

    from .evaluate_report import plain_report, render_report

    report = _scores(options)
    if report is None:  # only rank 0 has it
        return
    if options.json:
        print(json.dumps(plain_report(report), indent=2))
    else:
        console().print(render_report(report))


def _scores(options: argparse.Namespace, loops: int | None = None) -> "ZeroShotReport | None":
    from ...evaluation.tasks.items import HUB
    from ...evaluation.zero_shot import measure_tasks
    from ..console import progress_bars

    if options.data is None:
        raise ValueError("--tasks needs --data: the folder of the task files, or hub")
    with progress_bars(of_rows=True) as on_task:
        return measure_tasks(
            options.path,
            [name for name in options.tasks.split(",") if name],
            options.data if options.data == HUB else Path(options.data),
            limit=options.limit,
            context=options.context,
            too_long=options.too_long or "fail",
            draws=options.draws,
            seed=options.seed,
            per_item=options.per_item,
            on_task=on_task,
            **_which(options, loops),
        )


def _measure(options: argparse.Namespace) -> None:
    from ...evaluation.perplexity import measure
    from ...model.loops.exits import ExitRule

    rule = None if options.exit is None else ExitRule.parse(options.exit)
    print(measure(options.path, exit_rule=rule, **_which(options)))


def _measure_windows(options: argparse.Namespace) -> None:
    """Measures the loss on files, or over overlapping windows; rank 0 prints it."""
    from ...evaluation.perplexity import measure_sliding
    from ..console import progress_bars

    asked = {"stride": options.stride, "files": options.text, **_which(options)}
    with progress_bars(of_rows=options.text is None) as start_progress:
        found = measure_sliding(options.path, start_progress=start_progress, **asked)
    if found is not None:  # only rank 0 has it
        for one in (*(found.documents if options.per_document else ()), found):
            print_plain(one)


def _score(options: argparse.Namespace) -> None:
    from ...evaluation.text import score_text

    print(score_text(_restored(options), options.score, draws=options.draws, seed=options.seed))


def _write(options: argparse.Namespace) -> None:
    """Prints the model's continuation of the prompt as it is generated."""
    from ...evaluation.text import write_text

    asked = {"seed": options.seed, "cache_loops": options.cache_loops, "chat": options.chat}
    sampling = _sampling(options)
    _show(write_text(_restored(options), options.prompt, **asked, **sampling))


def _show(pieces: Iterator[str]) -> None:
    """Prints a text as it is written; a terminal shows control characters instead of obeying them."""
    from ...train.record.untrusted import escaped

    for piece in pieces:
        print(escaped(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    print(flush=True)


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Returns how to sample, checked before the model is read."""
    from ...evaluation.generate import check_request

    given = {"temperature": options.temperature, "top_p": options.top_p}
    check_request(options.tokens, **given)
    return given | {"num_tokens": options.tokens}


def _chat(options: argparse.Namespace) -> int:
    """Answers prompt after prompt; returns 2 if one could not be answered."""
    from ...evaluation.text import Conversation

    sampling, code = _sampling(options), 0
    conversation, is_terminal = Conversation(_restored(options)), sys.stdin.isatty()
    if conversation.template is None:
        told = f"{options.path} has no chat template: the model continues your text"
        print_message("note", told, style="bold")
    for seed in count(options.seed):
        try:
            prompt = input("> " if is_terminal else "")
            match prompt.strip():
                case "/exit":
                    break
                case "/reset":
                    conversation.turns.clear()
                case word if word:
                    _show(conversation.answer(prompt, seed=seed, **sampling))
        except EOFError:
            break
        except KeyboardInterrupt:  # ends the line or the answer
            if not is_terminal:
                raise
            print()
        except ValueError as error:
            print_message("error", str(error))
            code = 2
    return code


def _restored(options: argparse.Namespace) -> "Restored":
    """Loads the requested checkpoint into this process."""
    from ...distributed.process.process import start_process
    from ...evaluation.restore import restore

    with start_process("auto") as process:
        return restore(options.path, process, **_which(options))


def _which(options: argparse.Namespace, loops: int | None = None) -> "ModelChoice":
    """Returns which weights are asked for; `loops` is one of several numbers of loops."""
    loops = loops or (options.loops or (None,))[0]
    return {"step": options.step, "loops": loops, "weights": options.weights}


def _lm_eval(options: argparse.Namespace) -> int:
    import importlib.util

    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("the harness is not installed: pip install 'moebius[lm-eval]'")
    from ...evaluation.lm_eval_model import main

    main(options.passed_on)
    return 0
