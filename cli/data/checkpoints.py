"""`moebius ckpt`: lists, verifies, exports, imports, grows and averages checkpoints."""

import argparse
from pathlib import Path

from ..arguments import (
    Commands,
    add_checkpoint_argument,
    add_command,
    add_overrides,
    add_weights_argument,
    resolve_config,
    words_and_overrides,
)
from ..console import console, print_plain


def add_commands(commands: Commands) -> None:
    """Declares `moebius ckpt` and its actions."""
    parser = add_command(
        commands,
        "ckpt",
        _ls,
        "list, verify, export, import, grow and average checkpoints",
        examples=["ckpt ls runs/mine", "ckpt verify runs/mine"],
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_ls(actions)
    _add_verify(actions)
    _add_export(actions)
    _add_import(actions)
    _add_grow(actions)
    _add_average(actions)


def _add_ls(actions: Commands) -> None:
    parser = add_command(
        actions,
        "ls",
        _ls,
        "list a run's checkpoints: steps, sizes, ranks that wrote them, why they stay",
        examples=["ckpt ls runs/mine"],
    )
    add_checkpoint_argument(parser, "default: all of the run", steps=False)


def _ls(options: argparse.Namespace) -> int:
    from .checkpoint_report import list_table

    console().print(list_table(options.path))
    return 0


def _add_verify(actions: Commands) -> None:
    parser = add_command(
        actions,
        "verify",
        _verify,
        "read every byte: every checksum, every expert exactly once",
        examples=["ckpt verify runs/mine", "ckpt verify runs/mine@2000"],
    )
    add_checkpoint_argument(parser, "default: all of the run")


def _verify(options: argparse.Namespace) -> int:
    from ..console import progress_bars
    from .checkpoint_report import verify_each

    problems = []
    with progress_bars() as start_progress:
        for path, words, problem in verify_each(options.path, options.step, start_progress):
            print(f"{path.name}: {'DAMAGED' if problem else f'intact ({words})'}")
            if problem:
                problems.append(str(problem))
    if problems:
        raise ValueError("\n".join(problems))
    return 0


def _add_out_argument(parser: argparse.ArgumentParser) -> None:
    """Declares an output folder that must not exist yet."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a directory that does not exist yet"
    )


def _add_new_run_argument(parser: argparse.ArgumentParser) -> None:
    """Declares the run folder that is written."""
    parser.add_argument(
        "--run-dir",
        "--out",
        dest="out",
        type=Path,
        required=True,
        metavar="DIR",
        help="the run folder, which does not exist yet",
    )


def _add_export(actions: Commands) -> None:
    parser = add_command(
        actions,
        "export",
        _export,
        "write a checkpoint's weights for Hugging Face transformers, or for other programs",
        examples=[
            "ckpt export runs/mine --out exported --dtype bf16",
            "ckpt export runs/mine --out exported --no-tokenizer",
        ],
    )
    add_checkpoint_argument(parser)
    add_weights_argument(parser)
    _add_out_argument(parser)
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16"],
        help="dtype of weights that enter matrix products; by default that of the published folder "
        "that the run began with, else fp32",
    )
    parser.add_argument(
        "--format",
        choices=["hf", "safetensors"],
        default="hf",
        help="hf: a folder for AutoModelForCausalLM, in the format of the model's family if it has "
        "one; safetensors: weights and configuration, of any model",
    )
    parser.add_argument(
        "--no-tokenizer",
        action="store_true",
        help="with hf: omit the tokenizer",
    )


def _export(options: argparse.Namespace) -> int:
    from ...distributed.checkpoint.format import find_checkpoint
    from ...export.hf.model_folder import export
    from ..console import progress_bars

    with progress_bars() as start_progress:
        exported = export(
            find_checkpoint(options.path, options.step),
            options.out,
            layout=options.format,
            dtype=options.dtype,
            with_tokenizer=not options.no_tokenizer,
            start_progress=start_progress,
            weights=options.weights,
        )
    print_plain(f"{options.out}: {exported}")
    return 0


def _add_import(actions: Commands) -> None:
    parser = add_command(
        actions,
        "import",
        _import,
        "turn published weights into a run that you can evaluate, sample from or train",
        examples=[
            "ckpt import OLMoE-1B-7B-0924 --run-dir runs/olmoe",
            "ckpt import moeut_244m.pth moeut_244m --out runs/published prepare.tokenizer=c4.model",
        ],
        notes="A folder's config.json describes its model; a file of MoEUT needs its recipe. A .pth "
        "file is read with weights_only=True, so no code in it runs.",
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FOLDER|FILE",
        help="a folder with config.json and safetensors, or a file of MoEUT",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="RECIPE|FILE.toml",
        help="of a file: the model's recipe; of a folder: the recipe of everything else",
    )
    add_overrides(parser)
    _add_new_run_argument(parser)
    parser.add_argument("--family", metavar="MODULE:NAME", help="of a folder: a family of your own")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="of a file: ignore keys that match this pattern (* and ?); can be repeated",
    )


def _import(options: argparse.Namespace) -> int:
    from ...train.families.import_run import import_published, import_source

    name, overrides = options.name, options.overrides
    if options.file.is_dir():
        print_plain(
            import_source(options.file, options.out, name, overrides, family=options.family)
        )
        return 0
    if not options.file.exists():
        raise ValueError(f"{options.file}: is not a file or folder")
    if name is None:
        raise ValueError(
            f"{options.file}: name the recipe of its model; `moebius models` lists them"
        )
    config = resolve_config(name, overrides)
    print_plain(import_published(options.file, options.out, config, ignore=options.ignore))
    return 0


def _add_grow(actions: Commands) -> None:
    parser = add_command(
        actions,
        "grow",
        _grow,
        "write what a model grows into as a new run to evaluate, export or train",
        examples=[
            "ckpt grow runs/mine --run-dir runs/finer split=2",
            "ckpt grow runs/mine@2000 --run-dir runs/larger experts=x2 by=norm",
        ],
        notes="docs/grow.md lists the words. `train --from … --grow …` does the same as a run starts, and "
        "RUN@STEP goes on there with the optimizer's state.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a run, RUN@STEP, a checkpoint, a folder of published weights, or hf://org/name",
    )
    add_overrides(parser, metavar="WORD|section.key=value")
    parser.set_defaults(bare_words=True)
    _add_new_run_argument(parser)
    parser.add_argument("--family", metavar="MODULE:NAME", help="of a folder: a family of your own")


def _grow(options: argparse.Namespace) -> int:
    from ...train.families.import_run import import_source

    words, overrides = words_and_overrides(options.overrides)
    if not "".join(words).strip():
        raise ValueError(f"{options.source}: say how it grows, for example split=2")
    given = {"family": options.family, "grow": words}
    print_plain(import_source(options.source, options.out, None, overrides, **given))
    return 0


def _add_average(actions: Commands) -> None:
    parser = add_command(
        actions,
        "average",
        _average,
        "write the mean of checkpoints' weights as a new run to evaluate, export or start from",
        examples=["ckpt average runs/mine@1000 runs/mine@1200 --run-dir runs/mean"],
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="RUN[@STEP]|CHECKPOINT",
        help="two or more checkpoints of one model, also of several runs",
    )
    _add_new_run_argument(parser)


def _average(options: argparse.Namespace) -> int:
    from ...train.families.import_run import average_checkpoints
    from ..console import progress_bars

    with progress_bars() as start_progress:
        found = average_checkpoints(options.paths, options.out, start_progress=start_progress)
    print_plain(found)
    return 0
