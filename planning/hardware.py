"""Describes machines as data. Every figure names its source, and those that benchmarks/results
contradict by more than 30 % fail a test.

A node is the set of ranks joined by fast links: 8 GPUs of a server, or 72 of an NVL72 rack.
Bandwidths are per GPU and direction; a transfer reaches the given efficiency. A TOML file changes
single figures (`base = "h200"`, then `slow_bandwidth = 25e9`).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data_pipeline.files import fault, read_regular


@dataclass(frozen=True)
class Hardware:
    """Describes ranks, their links, and the efficiency that software reaches."""

    name: str
    ranks_per_node: int
    memory_bytes: float
    usable_memory: float  # the share of it that tensors can fill
    memory_bandwidth: float  # bytes/s
    peak_bf16: float  # FLOP/s
    peak_fp32: float
    fast_bandwidth: float  # bytes/s, inside a node
    fast_efficiency: float
    slow_bandwidth: float  # bytes/s, between nodes
    slow_efficiency: float
    fast_hop_s: float  # latency of a step of a dense collective
    slow_hop_s: float
    collective_start_s: float
    exchange_start_s: float  # of an all-to-all: launch and rendezvous
    fast_post_s: float  # of an all-to-all's message to one peer
    slow_post_s: float
    launch_s: float  # of one operation by the host: Python, autograd and the launch
    host_sync_s: float  # reading the counts of an exchange on the host
    matmul_efficiency: float  # of the peak, of a large product
    odd_width_efficiency: float  # of that, for each width whose rows are no multiple of 16 bytes
    matmul_half_rows: float  # rows per expert at which a grouped product reaches half of that
    expert_passes: float  # times a routed layer's rows and weights cross the memory bus, per pass
    memory_passes: float  # times a kept activation crosses the memory bus, forward and backward
    gather_overlap: float  # share of FSDP's traffic that can hide behind computation
    straggler: float  # standard deviation of a rank's step time, as a share of it
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)  # by figure

    @property
    def fast(self) -> float:
        """Returns the bytes/s that one rank reaches inside a node."""
        return self.fast_bandwidth * self.fast_efficiency

    @property
    def slow(self) -> float:
        """Returns the bytes/s that one rank reaches between nodes."""
        return self.slow_bandwidth * self.slow_efficiency

    def peak(self, precision: str) -> float:
        """Returns the peak FLOP/s of dense matrix products in that precision."""
        return {"bfloat16": self.peak_bf16, "float32": self.peak_fp32}[precision]


Figures = dict[str, tuple[float, str]]  # each with its source


def _data_sheet(gpu: str) -> str:
    return f"NVIDIA's {gpu} data sheet, dense figures without sparsity"


_UNCHECKED = "vendor's announcement of the Blackwell generation, not checked against a data sheet"
_NCCL = (
    "NCCL's tuning table (src/graph/tuning.cc, commit 01afd20), ring, Simple protocol; "
    "newer ones differ by tens of per cent"
)
_OURS = "moebius' assumption, not measured"
_H200 = "one H200 beside an Intel Xeon, benchmarks/results/step_gpu.json"
_LAYERS = "one H200, benchmarks/results/expert_layer_gpu.json"

_GPU: Figures = {
    "ranks_per_node": (8, "HGX boards join 8 GPUs by NVLink"),
    "usable_memory": (0.92, f"CUDA context, NCCL buffers and fragmentation: {_OURS}"),
    "fast_efficiency": (
        0.80,
        "DeepEP's README: 726 of 900 GB/s on NVLink5, 153–158 of 160 GB/s on the H800; the lower, "
        "rounded",
    ),
    "slow_bandwidth": (50e9, "NDR InfiniBand, 400 Gb/s, one adapter per GPU"),
    "slow_efficiency": (
        0.90,
        "DeepEP issue 155: RDMA writes of about 47 GB/s on 50 GB/s; issues 155, 336, 493 show "
        "12–25 where misconfigured",
    ),
    "fast_hop_s": (3.4e-6, f"{_NCCL}: NVLink hop"),
    "slow_hop_s": (9.6e-6, f"{_NCCL}: network hop"),
    "collective_start_s": (8.4e-6, f"{_NCCL}: base"),
    "exchange_start_s": (10e-6, f"two kernel launches of about 5 µs: {_OURS}"),
    "fast_post_s": (0.4e-6, f"NCCL spreads peers over channels: {_OURS}"),
    "slow_post_s": (1.0e-6, f"posting one RDMA write: {_OURS}"),
    "launch_s": (
        29e-6,
        f"an eager step of dense-44M, 88 ms for three times 1,001 operations: {_H200}",
    ),
    "host_sync_s": (25e-6, f"device-to-host copy and relaunch, 15–40 µs: {_OURS}"),
    "matmul_efficiency": (
        0.75,
        f"cuBLAS on large bfloat16 products reaches 70–80 % of the peak: {_OURS}",
    ),
    "odd_width_efficiency": (
        0.35,
        "dense MLPs of 4,110 and 2,053 columns beside 2,048, and of width 412 beside 1,024: "
        f"{_LAYERS}",
    ),
    "expert_passes": (2.9, f"2.6 for both layers of MoEUT-244M, 4.0 for MoEUT-44M's: {_LAYERS}"),
    "matmul_half_rows": (
        128,
        "one tile of a grouped product; a loop over experts, as in the `segments` kernels, is "
        f"slower: {_OURS}",
    ),
    "memory_passes": (
        6,
        f"forward: read, written; backward: read twice, gradient written and read: {_OURS}",
    ),
    "gather_overlap": (0.9, f"gathers are prefetched one group member ahead: {_OURS}"),
    "straggler": (0.015, f"1–2 % of a step; the slowest of n ranks is σ·√(2 ln n) late: {_OURS}"),
}
_AMPERE = _GPU | {
    "peak_bf16": (312e12, _data_sheet("A100 SXM")),
    "peak_fp32": (19.5e12, f"{_data_sheet('A100 SXM')}; without TF32, as in float32 training"),
    "memory_bytes": (80e9, _data_sheet("A100 SXM")),
    "memory_bandwidth": (2.039e12, _data_sheet("A100 SXM")),
    "fast_bandwidth": (300e9, f"{_data_sheet('A100 SXM')}: NVLink3, 600 GB/s both ways"),
    "slow_bandwidth": (25e9, "HDR InfiniBand, 200 Gb/s, one adapter per GPU"),
}
_HOPPER = _GPU | {
    "peak_bf16": (989e12, _data_sheet("H100 SXM and H200 SXM")),
    "peak_fp32": (
        67e12,
        f"{_data_sheet('H100 SXM and H200 SXM')}; without TF32, as in float32 training",
    ),
    "fast_bandwidth": (
        450e9,
        f"{_data_sheet('H100 SXM and H200 SXM')}: NVLink4, 900 GB/s both ways",
    ),
}
_BLACKWELL = _GPU | {
    "matmul_efficiency": (
        0.25,
        "fitted to one published run in bfloat16, Qwen3-30B on 8 B200 (torchtitan, pull request 19 of "
        "NousResearch's fork: 14,796 tokens/s per GPU), assuming selective recomputation; two others "
        "are then predicted within 10 %: the same on 128, and DeepSeek-V3 on 256 B200 with DeepEP "
        "(pytorch.org, 2026-03: 859). It describes that software rather than the machine",
    ),
    "peak_bf16": (2.25e15, _UNCHECKED),
    "peak_fp32": (80e12, _UNCHECKED),
    "memory_bytes": (180e9, _UNCHECKED),
    "memory_bandwidth": (8.0e12, _UNCHECKED),
    "fast_bandwidth": (900e9, f"NVLink5, 1,800 GB/s both ways: {_UNCHECKED}"),
}
_FIGURES: dict[str, Figures] = {
    "h100": _HOPPER
    | {
        "memory_bytes": (80e9, _data_sheet("H100 SXM")),
        "memory_bandwidth": (3.35e12, _data_sheet("H100 SXM")),
    },
    "h200": _HOPPER
    | {
        "memory_bytes": (141e9, _data_sheet("H200 SXM")),
        "memory_bandwidth": (4.8e12, _data_sheet("H200 SXM")),
    },
    "b200": _BLACKWELL,
    "gb200_nvl72": _BLACKWELL
    | {"ranks_per_node": (72, f"one NVLink domain per rack: {_UNCHECKED}")},
    "a100": _AMPERE,
}


def _hardware(name: str, figures: Figures) -> Hardware:
    values: dict[str, Any] = {key: value for key, (value, _) in figures.items()}
    return Hardware(name, **values, sources={key: source for key, (_, source) in figures.items()})


HARDWARE = {name: _hardware(name, figures) for name, figures in _FIGURES.items()}


def find_hardware(name_or_file: str) -> Hardware:
    """Returns the hardware of that name, or reads a TOML file with a `base` and the figures that
    differ.

    Raises:
        ValueError: no such hardware or file, an unknown key, or a figure that is not positive.
    """
    if name_or_file in HARDWARE:
        return HARDWARE[name_or_file]
    if not name_or_file.endswith(".toml"):
        raise ValueError(
            f"there is no hardware {name_or_file!r}: choose {', '.join(HARDWARE)}, or a .toml file "
            "with a `base` and the figures that differ"
        )
    path = Path(name_or_file)
    try:
        values = tomllib.loads(read_regular(path).decode())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid TOML: {fault(error)}") from None
    base = values.pop("base", None)
    if base not in HARDWARE:
        raise ValueError(f"{path}: base = {base!r} is unknown; choose {', '.join(HARDWARE)}")
    return _changed(HARDWARE[base], values, path)


def _changed(base: Hardware, values: Mapping[str, Any], path: Path) -> Hardware:
    for key, value in values.items():
        if key not in base.sources:
            raise ValueError(f"{path}: unknown figure {key}; known: {', '.join(base.sources)}")
        wanted = int if key == "ranks_per_node" else int | float
        if isinstance(value, bool) or not isinstance(value, wanted) or value <= 0:
            kind = "a whole number" if wanted is int else "a number"
            raise ValueError(f"{path}: {key} = {value!r} must be {kind} above 0")
    sources = {**base.sources, **dict.fromkeys(values, str(path))}
    return replace(base, name=path.stem, **values, sources=sources)
