"""The classes of faults that the kit tells apart: their names, what they mean, where they were seen."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FaultClass:
    """One class: `seen` are reports of such faults in other projects, as project#number."""

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
    "right but for a factor, most often the number of ranks: averaged where sums are due, or the "
    "reverse",
    ("pytorch#160285", "DeepSpeed#6545", "megablocks#20"),
)
LOST = FaultClass(
    "lost or doubled routes",
    "some rows do not reach an expert, or its answer does not come back, or twice",
    ("vllm-xpu-kernels#453",),
)
ORDER = FaultClass(
    "order of rows",
    "the right values in the wrong places: a permutation is not undone, or weighs other routes",
    ("torchtitan#3604", "vllm#52639"),
)
GATE = FaultClass(
    "gate gradient",
    "the router learns from nothing, from a part of its experts, or from routes that do not exist",
    ("transformers#48205", "transformers#48687", "torchtitan#2416"),
)
NORM = FaultClass(
    "norm over experts",
    "the global gradient norm counts this rank's experts alone, or something twice",
    ("Megatron-LM#5916", "DeepSpeed#8475", "Automodel#3816"),
)
SAMPLES = FaultClass(
    "depends on other samples",
    "a row's result changes with rows that have nothing to do with it",
    ("Megatron-Bridge#4635",),
)
NOT_FINITE = FaultClass(
    "not finite",
    "NaN or infinity where one rank has numbers: an empty mean, or memory that nobody wrote",
    ("transformers#48205",),
)
CRASH = FaultClass("crash", "a rank raised an error or died", ("Megatron-LM#1877",))
HANG = FaultClass(
    "hang",
    "a rank waits for others that never come",
    ("Automodel#935", "DeepSpeed#5794"),
)
UNKNOWN = FaultClass("unrecognised", "wrong, and neither scaled, partial, lost nor out of order")

CLASSES = (*(PARTIAL, SCALED, LOST, ORDER, GATE, NORM, SAMPLES, NOT_FINITE, CRASH, HANG, UNKNOWN),)
