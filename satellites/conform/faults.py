"""Names the classes of faults that the kit distinguishes, their meaning, and where they occurred."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FaultClass:
    """Describes one class; `seen` lists reports in other projects, as project#number."""

    name: str
    meaning: str
    seen: tuple[str, ...] = ()


PARTIAL = FaultClass(
    "missing partial sum",
    "ranks compute parts of one gradient (or output), and nobody adds them up",
    ("transformers#48205", "torchtitan#2416", "torchtitan#4054", "Automodel#1260"),
)
SCALED = FaultClass(
    "scaled",
    "correct except for a factor, most often the number of ranks: averaged instead of summed, or the "
    "reverse",
    ("pytorch#160285", "DeepSpeed#6545", "megablocks#20"),
)
LOST = FaultClass(
    "lost or doubled routes",
    "some rows do not reach an expert, or its output is lost or counted twice",
    ("vllm-xpu-kernels#453",),
)
ORDER = FaultClass(
    "order of rows",
    "correct values in wrong places: a permutation is not undone, or gates weight other routes",
    ("torchtitan#3604", "vllm#52639"),
)
GATE = FaultClass(
    "gate gradient",
    "the router learns from nothing, from a part of its experts, or from routes that do not exist",
    ("transformers#48205", "transformers#48687", "torchtitan#2416"),
)
NORM = FaultClass(
    "norm over experts",
    "the global gradient norm counts only this rank's experts, or something twice",
    ("Megatron-LM#5916", "DeepSpeed#8475", "Automodel#3816"),
)
SAMPLES = FaultClass(
    "depends on other samples",
    "a row's result changes with unrelated rows",
    ("Megatron-Bridge#4635",),
)
NOT_FINITE = FaultClass(
    "not finite",
    "NaN or infinity where a single rank has numbers: an empty mean, or uninitialized memory",
    ("transformers#48205",),
)
CRASH = FaultClass("crash", "a rank raised an error or died", ("Megatron-LM#1877",))
HANG = FaultClass(
    "hang",
    "a rank waits for others that never arrive",
    ("Automodel#935", "DeepSpeed#5794"),
)
UNKNOWN = FaultClass("unrecognised", "wrong, but neither scaled, partial, lost nor out of order")

CLASSES = (*(PARTIAL, SCALED, LOST, ORDER, GATE, NORM, SAMPLES, NOT_FINITE, CRASH, HANG, UNKNOWN),)
