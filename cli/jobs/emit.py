"""`moebius submit --emit kuberay|slurm`: prints the job as a file for another system, and starts nothing."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import resolve_config

if TYPE_CHECKING:
    from ...train.config.run_config import Config


def add_emit_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--emit`, and what KubeRay or Slurm needs beyond the configuration."""
    parser.add_argument(
        "--emit",
        choices=("kuberay", "slurm"),
        help="print a RayJob manifest or an sbatch script instead of starting the job",
    )
    parser.add_argument(
        "--with",
        dest="settings",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the emitted file: image, claim and others for kuberay; venv and any option "
        "of sbatch for slurm; cpus_per_rank for both (docs/cluster.md)",
    )


def emit(options: argparse.Namespace) -> int:
    """Prints the job's manifest or script; returns the exit code."""
    if options.address is not None or options.detach:
        raise ValueError("--emit starts nothing: omit --address and --detach")
    settings = _settings(options)
    make = _kuberay if options.emit == "kuberay" else _slurm
    print(make(options, settings), end="")
    return 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of `--with`; overrides of the configuration may follow it."""
    settings: dict[str, Any] = {}
    for word in options.settings:
        key, equals, value = word.partition("=")
        if "." in key:
            options.overrides.append(word)
        elif not equals:
            raise ValueError(f"--with {word!r}: write KEY=VALUE")
        else:
            settings[key] = value
    cpus = settings.get("cpus_per_rank", "4")
    if not cpus.isdecimal() or int(cpus) < 1:
        raise ValueError(f"--with cpus_per_rank={cpus}: must be at least 1")
    return settings | {"cpus_per_rank": int(cpus)}


def _kuberay(options: argparse.Namespace, settings: Mapping[str, Any]) -> str:
    from ...cluster.places.kuberay import KubeRaySettings, kuberay_manifest

    run_dir = None if options.run_dir is None else str(options.run_dir)
    asked = KubeRaySettings.of({"ray_version": _ray_version(), **settings}, run_dir=run_dir)
    return kuberay_manifest(_resolve(options, Path(asked.mount)), asked)


def _ray_version() -> str:
    """Returns the installed version of Ray, which the Dockerfile takes from the same constraints."""
    from importlib import metadata

    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return ""


def _slurm(options: argparse.Namespace, settings: Mapping[str, Any]) -> str:
    from ...cluster.places.slurm import SlurmSettings, slurm_script

    if options.run_dir is None:
        raise ValueError("--emit slurm needs --run-dir: a folder that all nodes see")
    run_dir = options.run_dir.absolute()
    asked = SlurmSettings.of(settings, run_dir=str(run_dir))
    return slurm_script(_resolve(options, run_dir.parent), asked)


def _resolve(options: argparse.Namespace, root: Path) -> "Config":
    """Returns the configuration, with prepared data below `root`, which every node sees."""
    from ...train.record.run_folder import place_data

    config = place_data(resolve_config(options.name, options.overrides), root)
    config.check_world(config.world_size)
    return config
