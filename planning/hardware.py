"""What machines can do, as data: every figure with where it comes from. None was measured by this
project unless it says so.

A node is the set of ranks that the fast links join: 8 GPUs of a server, 72 of an NVL72 rack.
Bandwidths are of one GPU in one direction; what a transfer reaches of them is their efficiency.
Change single figures in a TOML file (`base = "h200"`, then `slow_bandwidth = 25e9`), or measure:
`--measured` (planning/measured.py) takes the place of links and latencies.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Hardware:
    """Ranks, their links, and what software makes of them. `sources` says of every figure where it
    is from.
    """

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
    pod_nodes: int  # nodes that the network joins at full bandwidth
    oversubscription: float  # what the bandwidth between pods is divided by
    fast_hop_s: float  # latency of a step of a dense collective
    slow_hop_s: float
    collective_start_s: float
    exchange_start_s: float  # of an all-to-all: launch and rendezvous
    fast_post_s: float  # of an all-to-all's message to one peer
    slow_post_s: float
    meet_s: float  # of ranks that read each other's memory: until all see what all have written
    launch_s: float  # of one operation by the host
    host_sync_s: float  # reading the counts of an exchange on the host
    matmul_efficiency: float  # of the peak, of a large product
    matmul_half_rows: float  # rows per expert at which a grouped product reaches half of that
    memory_passes: float  # how often a kept activation crosses the memory bus, forward and backward
    gather_overlap: float  # share of FSDP's traffic that can hide behind computation
    chunk_overlap: float  # share of an exchange that can, if it is cut into chunks
    straggler: float  # standard deviation of a rank's step time, as a share of it
    # What the roofline model (roofline.py) wants to know of one GPU:
    capability: int  # compute capability, such as 90, which says whose tiles its kernels take
    multiprocessors: int
    clock_hz: float  # while tensor cores work
    peak_tf32: float  # FLOP/s
    l2_bytes: float
    l2_bandwidth: float  # bytes/s that all multiprocessors together read out of it
    memory_latency_s: float  # of a load that the second-level cache misses
    kernel_gap_s: float  # between two kernels of a stream: the drain of one, the start of the next
    product_ceiling: float  # of the peak, that a huge product sustains
    copy_ceiling: float  # of the memory's bandwidth, that a huge copy reaches
    attention_ceiling: float  # of the peak, that fused attention sustains
    # Whether `matmul_efficiency` and what goes with it were fitted to whole measured runs: then they
    # go before the roofline model, as any measurement does.
    fitted: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def fast(self) -> float:
        """Returns the bytes/s that one rank reaches inside a node."""
        return self.fast_bandwidth * self.fast_efficiency

    @property
    def slow(self) -> float:
        """Returns the bytes/s that one rank reaches between nodes of a pod."""
        return self.slow_bandwidth * self.slow_efficiency

    def peak(self, precision: str) -> float:
        """Returns the peak FLOP/s of matrix products, dense, in that precision."""
        return {"bfloat16": self.peak_bf16, "float32": self.peak_fp32}[precision]


@dataclass(frozen=True)
class Sourced:
    """One figure of a machine, and where it comes from."""

    value: float
    source: str


def _data_sheet(gpu: str) -> str:
    return f"NVIDIA's data sheet of the {gpu}, dense figures without sparsity"


_UNCHECKED = "vendor's announcement of the Blackwell generation, not checked against a data sheet"
_NCCL = (
    "NCCL's tuning table (src/graph/tuning.cc, commit 01afd20), ring, Simple protocol; "
    "newer ones differ by tens of per cent"
)
_OURS = "assumption of this project, to be replaced by a measurement"

_GPU: dict[str, Sourced] = {
    "ranks_per_node": Sourced(8, "HGX boards join 8 GPUs by NVLink"),
    "usable_memory": Sourced(0.92, f"CUDA context, NCCL buffers, fragmentation: {_OURS}"),
    "fast_efficiency": Sourced(
        0.80,
        "DeepEP's README: 726 of 900 GB/s on NVLink5, 153–158 of 160 GB/s on the H800; the lower, "
        "rounded",
    ),
    "slow_bandwidth": Sourced(50e9, "NDR InfiniBand, 400 Gb/s, one adapter per GPU"),
    "slow_efficiency": Sourced(
        0.90,
        "DeepEP issue 155: RDMA writes of about 47 GB/s on 50 GB/s; issues 155, 336, 493 show "
        "12–25 where misconfigured",
    ),
    "pod_nodes": Sourced(
        1_000_000, "a network without oversubscription: set it where yours has pods"
    ),
    "oversubscription": Sourced(1.0, "as pod_nodes"),
    "fast_hop_s": Sourced(3.4e-6, f"{_NCCL}: NVLink hop"),
    "slow_hop_s": Sourced(9.6e-6, f"{_NCCL}: network hop"),
    "collective_start_s": Sourced(8.4e-6, f"{_NCCL}: base"),
    "exchange_start_s": Sourced(10e-6, f"two kernel launches of about 5 µs: {_OURS}"),
    "fast_post_s": Sourced(0.4e-6, f"NCCL spreads peers over channels: {_OURS}"),
    "slow_post_s": Sourced(1.0e-6, f"posting one RDMA write: {_OURS}"),
    "meet_s": Sourced(
        12e-6,
        "a kernel that sets a flag of every peer and waits for theirs (a start of 5 µs, a hop there and "
        f"one to see it); then a kernel that reads the headers; never measured: {_OURS}",
    ),
    "launch_s": Sourced(
        17.2e-6,
        "71 ms for 4,129 launches of a step of MoEUT-244M, estimated before kernels were fused: Python, "
        "autograd, custom operators and Triton's launcher; PyTorch's own operators take 5–8 µs, CUDA "
        f"graphs and torch.compile less; never measured: {_OURS}",
    ),
    "host_sync_s": Sourced(25e-6, f"device-to-host copy and relaunch, 15–40 µs: {_OURS}"),
    "matmul_efficiency": Sourced(
        0.75, f"cuBLAS on large bfloat16 products reaches 70–80 % of the peak: {_OURS}"
    ),
    "matmul_half_rows": Sourced(
        128,
        "one tile of a grouped product; a loop over experts, as the `segments` kernels are, is "
        f"slower: {_OURS}",
    ),
    "memory_passes": Sourced(
        6,
        f"forward: read and written; backward: read twice, its gradient written and read: {_OURS}",
    ),
    "gather_overlap": Sourced(0.9, f"gathers are prefetched one group member ahead: {_OURS}"),
    "chunk_overlap": Sourced(0.45, f"published schedules with two chunks hide 35–60 %: {_OURS}"),
    "straggler": Sourced(
        0.015, f"1–2 % of a step, the slowest of n ranks being σ·√(2 ln n) late: {_OURS}"
    ),
    "memory_latency_s": Sourced(
        0.7e-6, f"published micro-benchmarks find 0.5 to 0.9 µs under load: {_OURS}"
    ),
    "kernel_gap_s": Sourced(
        2e-6, f"kernels one after the other in a stream, 1 to 3 µs without a graph: {_OURS}"
    ),
    "product_ceiling": Sourced(
        0.80,
        "seen on one H200: 788 of 989 TFLOP/s, 8192³ in bfloat16 of random data; power limits it. "
        "Taken for all precisions and GPUs; `python -m benchmarks.gpu.ceilings` measures yours",
    ),
    "copy_ceiling": Sourced(
        0.90,
        "seen on one H200: a copy reaches 4.3 of 4.8 TB/s. Taken for all GPUs; `python -m "
        "benchmarks.gpu.ceilings` measures yours",
    ),
    "attention_ceiling": Sourced(
        0.35,
        "torch's fused attention (FlashAttention 2) reaches 350 TFLOP/s on an H100 with long "
        f"sequences (arXiv 2407.08608), the backward pass less: {_OURS}",
    ),
}
_AMPERE = _GPU | {
    "peak_bf16": Sourced(312e12, _data_sheet("A100 SXM")),
    "peak_tf32": Sourced(156e12, _data_sheet("A100 SXM")),
    "peak_fp32": Sourced(
        19.5e12, f"{_data_sheet('A100 SXM')}; without TF32, as training in float32 is"
    ),
    "memory_bytes": Sourced(80e9, _data_sheet("A100 SXM")),
    "memory_bandwidth": Sourced(2.039e12, _data_sheet("A100 SXM")),
    "fast_bandwidth": Sourced(300e9, f"{_data_sheet('A100 SXM')}: NVLink3, 600 GB/s both ways"),
    "slow_bandwidth": Sourced(25e9, "HDR InfiniBand, 200 Gb/s, one adapter per GPU"),
    "capability": Sourced(80, "NVIDIA's table of compute capabilities"),
    "multiprocessors": Sourced(108, "NVIDIA's A100 whitepaper"),
    "clock_hz": Sourced(1.41e9, "NVIDIA's A100 whitepaper: boost"),
    "l2_bytes": Sourced(40e6, "NVIDIA's A100 whitepaper"),
    "l2_bandwidth": Sourced(
        4.0e12, f"5,120 bytes a clock are 7.2 TB/s; loads see about 4: {_OURS}"
    ),
}
_HOPPER = _GPU | {
    "capability": Sourced(90, "NVIDIA's table of compute capabilities"),
    "multiprocessors": Sourced(132, "NVIDIA's H100 whitepaper: SXM5; the H200 has as many"),
    "clock_hz": Sourced(
        1.755e9,
        "what 989 TFLOP/s are of 132 multiprocessors, 4,096 FLOP a clock: 1.83, and less "
        f"under power limits: {_OURS}",
    ),
    "peak_tf32": Sourced(495e12, _data_sheet("H100 SXM and H200 SXM")),
    "l2_bytes": Sourced(50e6, "NVIDIA's H100 whitepaper; the H200 has as much"),
    "l2_bandwidth": Sourced(
        5.5e12,
        "published micro-benchmarks of the H100 find 5.5 to 7; the lower, by which the kernels were "
        f"designed; `python -m benchmarks.gpu.ceilings` measures it: {_OURS}",
    ),
    "peak_bf16": Sourced(989e12, _data_sheet("H100 SXM and H200 SXM")),
    "peak_fp32": Sourced(
        67e12, f"{_data_sheet('H100 SXM and H200 SXM')}; without TF32, as training in float32 is"
    ),
    "fast_bandwidth": Sourced(
        450e9, f"{_data_sheet('H100 SXM and H200 SXM')}: NVLink4, 900 GB/s both ways"
    ),
}
_BLACKWELL = _GPU | {
    "matmul_efficiency": Sourced(
        0.25,
        "fitted to one published run in bfloat16, Qwen3-30B on 8 B200 (torchtitan, pull request 19 of "
        "NousResearch's fork: 14,796 tokens/s per GPU), taken to recompute selectively; two others "
        "then come out within 10 %: the same on 128, and DeepSeek-V3 on 256 B200 with DeepEP "
        "(pytorch.org, 2026-03: 859). It is what that software reached, not what the machine can",
    ),
    "capability": Sourced(100, "NVIDIA's table of compute capabilities"),
    "multiprocessors": Sourced(148, _UNCHECKED),
    "clock_hz": Sourced(1.85e9, _UNCHECKED),
    "peak_tf32": Sourced(1.125e15, _UNCHECKED),
    "l2_bytes": Sourced(126e6, _UNCHECKED),
    "l2_bandwidth": Sourced(
        9e12, f"as Hopper's, by multiprocessors and clocks, rounded up: {_OURS}"
    ),
    "peak_bf16": Sourced(2.25e15, _UNCHECKED),
    "peak_fp32": Sourced(80e12, _UNCHECKED),
    "memory_bytes": Sourced(180e9, _UNCHECKED),
    "memory_bandwidth": Sourced(8.0e12, _UNCHECKED),
    "fast_bandwidth": Sourced(900e9, f"NVLink5, 1,800 GB/s both ways: {_UNCHECKED}"),
}
_SOURCED: dict[str, dict[str, Sourced]] = {
    "h100": _HOPPER
    | {
        "memory_bytes": Sourced(80e9, _data_sheet("H100 SXM")),
        "memory_bandwidth": Sourced(3.35e12, _data_sheet("H100 SXM")),
    },
    "h200": _HOPPER
    | {
        "memory_bytes": Sourced(141e9, _data_sheet("H200 SXM")),
        "memory_bandwidth": Sourced(4.8e12, _data_sheet("H200 SXM")),
    },
    "b200": _BLACKWELL,
    "gb200_nvl72": _BLACKWELL
    | {"ranks_per_node": Sourced(72, f"one NVLink domain per rack: {_UNCHECKED}")},
    "a100": _AMPERE,
}


# Who states one of these has measured what products and passes over memory reach: no model knows better.
FITTED = ("matmul_efficiency", "matmul_half_rows", "memory_passes")


def _hardware(name: str, figures: Mapping[str, Sourced]) -> Hardware:
    values: dict[str, Any] = {key: figure.value for key, figure in figures.items()}
    sources = {key: figure.source for key, figure in figures.items()}
    fitted = sources["matmul_efficiency"].startswith("fitted")
    return Hardware(name, **values, fitted=fitted, sources=sources)


HARDWARE: dict[str, Hardware] = {
    name: _hardware(name, figures) for name, figures in _SOURCED.items()
}


def hardware_of_gpu(device_name: str) -> Hardware | None:
    """Returns the catalogue's figures of a GPU that the driver calls so; None: it has none."""
    known = {"A100": "a100", "H100": "h100", "H200": "h200", "GB200": "gb200_nvl72", "B200": "b200"}
    return next((HARDWARE[name] for part, name in known.items() if part in device_name), None)


def find_hardware(name_or_file: str) -> Hardware:
    """Returns the hardware of that name, or a TOML file's: a `base` and the figures that differ.

    Raises:
        ValueError: there is no such hardware or file, or the file has a key that is none, or a
            figure that is not positive.
    """
    if not name_or_file.endswith(".toml"):
        if name_or_file not in HARDWARE:
            raise ValueError(
                f"there is no hardware {name_or_file!r}: choose {', '.join(HARDWARE)}, or name a "
                ".toml file with a `base` and "
                "the figures that differ"
            )
        return HARDWARE[name_or_file]
    path = Path(name_or_file)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not valid TOML: {error}") from None
    base = values.pop("base", None)
    if base not in HARDWARE:
        raise ValueError(f"{path}: base = {base!r} is unknown; choose {', '.join(HARDWARE)}")
    return _changed(HARDWARE[base], values, path)


def _changed(base: Hardware, values: Mapping[str, Any], path: Path) -> Hardware:
    known = [
        entry.name for entry in fields(Hardware) if entry.name not in ("name", "fitted", "sources")
    ]
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{path}: {key} is no figure of a machine; known: {', '.join(known)}")
        whole = key in ("ranks_per_node", "pod_nodes", "capability", "multiprocessors")
        if (
            isinstance(value, bool)
            or not isinstance(value, int if whole else int | float)
            or value <= 0
        ):
            raise ValueError(
                f"{path}: {key} = {value!r}: {'a whole number' if whole else 'a number'} above 0 "
                "is needed"
            )
    return replace(
        base,
        name=path.stem,
        **values,
        fitted=base.fitted or any(key in values for key in FITTED),
        sources={**base.sources, **dict.fromkeys(values, str(path))},
    )
