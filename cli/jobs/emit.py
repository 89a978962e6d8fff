"""`moebius submit --emit kuberay|slurm`: the job as a file for another system, instead of a start."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...train.config.run_config import Config


def add_emit_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--emit` and what a file for KubeRay or Slurm needs beside the configuration."""
    parser.add_argument(
        "--emit",
        choices=("kuberay", "slurm"),
        help="write a RayJob manifest or an sbatch script instead of starting the job",
    )
    group = parser.add_argument_group("with --emit")
    group.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    group.add_argument("--cpus-per-rank", type=int, default=4, metavar="C", help="default: 4")
    kuberay = parser.add_argument_group("with --emit kuberay")
    kuberay.add_argument("--image", metavar="IMAGE", help="that Dockerfile builds; needed")
    kuberay.add_argument("--claim", metavar="NAME", help="of the volume for runs; needed")
    kuberay.add_argument("--ray-version", metavar="V", help="in the image; default: as here")
    kuberay.add_argument("--mount", default="/runs", metavar="PATH", help="of it; default: /runs")
    kuberay.add_argument("--memory-per-node", default="64Gi", metavar="M", help="default: 64Gi")
    kuberay.add_argument("--token-secret", metavar="NAME", help="default: the operator makes one")
    kuberay.add_argument("--queue", metavar="NAME", help="of Kueue: suspended until admitted")
    slurm = parser.add_argument_group("with --emit slurm")
    slurm.add_argument("--venv", metavar="PATH", help="virtual environment on every node")
    slurm.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of sbatch, again and again: partition=gpu, time=24:00:00",
    )


def emit(options: argparse.Namespace) -> int:
    """Carries out `moebius submit --emit`."""
    if options.address is not None or options.detach:
        raise ValueError("--emit starts nothing: leave out --address and --detach")
    if options.cpus_per_rank < 1:
        raise ValueError(f"--cpus-per-rank {options.cpus_per_rank}: at least 1")
    text = _kuberay(options) if options.emit == "kuberay" else _slurm(options)
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0


def _kuberay(options: argparse.Namespace) -> str:
    from ...cluster.places.kuberay import KubeRaySettings, kuberay_manifest

    for what in ("image", "claim"):
        if getattr(options, what) is None:
            raise ValueError(f"--emit kuberay needs --{what}")
    settings = KubeRaySettings(
        image=options.image,
        claim=options.claim,
        ray_version=options.ray_version or _ray_version(),
        mount=options.mount,
        run_dir=None if options.run_dir is None else str(options.run_dir),
        cpus_per_rank=options.cpus_per_rank,
        memory_per_node=options.memory_per_node,
        token_secret=options.token_secret,
        queue=options.queue,
    )
    return kuberay_manifest(_resolve(options, Path(options.mount)), settings)


def _ray_version() -> str:
    """The version that is installed here: Dockerfile takes it from the same constraints.txt."""
    from importlib import metadata

    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise ValueError("--emit kuberay needs --ray-version: Ray is not installed here") from None


def _slurm(options: argparse.Namespace) -> str:
    from ...cluster.places.slurm import SlurmSettings, parse_options, slurm_script

    if options.run_dir is None:
        raise ValueError("--emit slurm needs --run-dir: a folder that all nodes see")
    run_dir = options.run_dir.absolute()
    settings = SlurmSettings(
        run_dir=str(run_dir),
        cpus_per_rank=options.cpus_per_rank,
        venv=options.venv,
        options=parse_options(options.sbatch),
    )
    return slurm_script(_resolve(options, run_dir.parent), settings)


def _resolve(options: argparse.Namespace, root: Path) -> "Config":
    """The configuration; prepared data lies below `root`, which every node sees."""
    from ...train.record.run_folder import place_data
    from ..configurations import resolve_config

    config = place_data(resolve_config(options.name, options.overrides), root)
    config.check_world(config.world_size)
    return config
