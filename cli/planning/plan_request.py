"""What `moebius plan` is asked, checked and made into a scenario of the cost model."""

from pathlib import Path

from ...planning.hardware import HARDWARE, find_hardware
from ...planning.measured import read_kernel_ratios, read_table
from ...planning.prediction import Scenario
from ...planning.routing_skew import CONCENTRATION, RoutingSkew, dirichlet_skew, recorded_skew
from ...planning.workload import describe
from ...train.config.run_config import Config

_PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}


def make_scenario(
    config: Config,
    *,
    hardware: str,
    precision: str | None = None,
    tokens: int | None = None,
    skew: str | None = None,
    measured: Path | None = None,
    chunks: int = 1,
    micro_batches: int = 1,
    launches: float | None = None,
    measured_kernels: Path | None = None,
) -> Scenario:
    """Returns the scenario in which a run's configuration is planned: its work on a machine.

    Args:
        hardware: a name or a TOML file.
        precision: bf16 or fp32; default: the configuration's.
        tokens: per rank and micro-batch; default: the configuration's micro-batch.
        skew: "balanced", a Dirichlet concentration, or a run folder with recorded loads.
        measured: a table of measured collectives.
        chunks: parts in which rows travel.
        micro_batches: whose gradients a rank adds up in a step.
        launches: operations that the host launches in a micro-batch; default: those of the list
            of kernels.
        measured_kernels: a file of measured kernels, whose ratios correct their predictions.

    Raises:
        ValueError: one of them is not what it should be.
    """
    if config.mesh.replicas:
        raise ValueError(
            f"mesh.replicas={config.mesh.replicas}: the planner counts neither the memory of "
            "copies of hot experts nor the sum "
            "of their gradients, and not how much evener they make the ranks; plan with "
            "mesh.replicas=0"
        )
    asked = _PRECISIONS.get(precision or "", config.train.precision)
    if asked == "bfloat16_only":
        raise ValueError(
            'train.precision="bfloat16_only": the planner counts float32 weights and moments, and '
            "would promise twice the memory; plan with --precision bf16 or fp32"
        )
    machine = find_hardware(hardware)
    tokens = config.train.micro_batch * config.data.seq_len if tokens is None else tokens
    if tokens < 1 or chunks < 1 or micro_batches < 1:
        raise ValueError(
            f"--tokens-per-rank {tokens}, --overlap-chunks {chunks}, --micro-batches "
            f"{micro_batches}: all must be at least 1"
        )
    if launches is not None and launches <= 0:
        raise ValueError(f"--launches {launches:g}: a number above 0 is needed")
    workload = describe(
        config.model,
        seq_len=config.data.seq_len,
        precision=asked,
    )
    routing = _skew(skew)
    routing.check([bank for bank, _ in workload.uses])
    return Scenario(
        workload,
        machine,
        tokens,
        routing,
        read_table(measured) if measured else None,
        chunks,
        micro_batches,
        launches,
        _kernel_ratios(measured_kernels, machine.name) if measured_kernels else {},
    )


def _kernel_ratios(path: Path, planned: str) -> dict[str, float]:
    ratios, measured = read_kernel_ratios(path)
    if measured in HARDWARE and planned in HARDWARE and measured != planned:
        raise ValueError(
            f"{path}: its kernels were measured on {measured}, and {planned} is planned: name "
            f"--hardware {measured}, or a file of your own with a `base`"
        )
    return ratios


def _skew(text: str | None) -> RoutingSkew:
    if text is None:
        return dirichlet_skew(CONCENTRATION)
    if text == "balanced":
        return RoutingSkew()
    try:
        concentration = float(text)
    except ValueError:
        return recorded_skew(Path(text))
    return dirichlet_skew(concentration)
