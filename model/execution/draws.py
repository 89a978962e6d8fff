"""Random numbers of training passes: every sequence draws its own, whatever shares its micro-batch.

A number depends on the run's seed, the step, the sequence's number in the step's batch, the layer,
the loop that the sequence makes there, and how many tensors that layer has drawn before. Neither
micro-batches nor ranks nor recomputation change it. It is a hash of all these (SplitMix64, doi
10.1145/2660193.2660195), equal on every device: about 15 elementwise operations and no state. Seed,
step and sequences are tensors, and the rest is the same in every pass, so a recorded pass can be
repeated with other numbers.

Legend: B sequences, N numbers of one of them.
"""

import ctypes
import hashlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.pass_scope import pass_scope, sharing
from ..layers import on_device

_STEP = 0x9E3779B97F4A7C15 - 2**64  # of the hash's counter; as int64, whose products wrap
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_MOST_SEQUENCES = 2**40  # of a step
_AT_ONCE = 2**22  # numbers; bounds the memory of the hash's integers


@dataclass
class Draws:
    """Draws numbers for the sequences of a pass at one place in it."""

    key: Tensor  # int64 scalar, on the device: a hash of the run's seed and the step
    numbers_B: Tensor  # int64, on the device: the sequences' numbers in the step's batch
    place: str = ""
    loops: int | Sequence[int] = 0  # that the sequences make there; one number stands for all
    count: int = 0  # of the tensors drawn there

    def at(self, place: str, loops: int | Sequence[int], live: Tensor | None) -> "Draws":
        """Returns the draws of another place, of the sequences `live`; None: all."""
        numbers_B = self.numbers_B if live is None else self.numbers_B[live]
        return Draws(self.key, numbers_B, place, loops)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Returns the next float32 numbers in [0, 1) for rows (B·k, …), which are sequence-major."""
        place, loops_B = _hash(f"{self.place}/{self.count}"), self.loops
        self.count += 1
        if not isinstance(loops_B, int):
            loops_B = on_device(torch.tensor(loops_B, dtype=torch.int64), self.numbers_B.device)
        numbers_B = self.numbers_B + _MOST_SEQUENCES * loops_B
        of_sequence_B = _mix(torch.add(self.key, numbers_B, alpha=_STEP).add_(place))
        per_sequence = math.prod(shape) // max(len(of_sequence_B), 1)
        counter_N = torch.arange(per_sequence, device=of_sequence_B.device) * _STEP
        parts = of_sequence_B[:, None].split(max(1, _AT_ONCE // max(per_sequence, 1)))
        # 24 bits are exact in float32; the shift keeps the sign, so that they begin at -2^23.
        found = [(_mix(part_B1 + counter_N) >> 40).float() * 2**-24 + 0.5 for part_B1 in parts]
        return torch.cat(found).view(*shape)


def draws_of(key: str, numbers_B: Tensor) -> Draws:
    """Returns the draws of these sequences in a step; equal keys draw equal numbers."""
    filled = torch.full((), _hash(key), dtype=torch.int64, device=numbers_B.device)
    return Draws(filled, numbers_B)


def fresh_draws(num_sequences: int, device: torch.device) -> Draws:
    """Returns the draws of sequences without numbers, keyed by torch's default generator."""
    # The state itself: on the meta device and as fake tensors, numbers cannot be read.
    state = torch.get_rng_state()
    key = hashlib.blake2b(ctypes.string_at(state.data_ptr(), len(state)), digest_size=8).hexdigest()
    torch.rand((), device="cpu")  # the next pass draws others
    return draws_of(key, torch.arange(num_sequences, device=device))


def drawing(draws: Draws | None) -> AbstractContextManager[None]:
    """Makes `draw_uniform` draw there, from the first number on also when a step is recomputed."""
    return sharing(draws=None if draws is None else replace(draws))


def draw_uniform(shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns float32 numbers in [0, 1) for a layer's rows (B·S, …), which are sequence-major.

    Call it in training only. Outside of a layer's pass torch's default generator seeds it.
    """
    return (pass_scope().draws or fresh_draws(1, device)).uniform(shape)


def num_sequences() -> int:
    """Returns how many sequences a layer's pass in training has; 0: this is not in one."""
    draws = pass_scope().draws
    return 0 if draws is None else len(draws.numbers_B)


def _hash(key: str) -> int:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _mix(z: Tensor) -> Tensor:
    """Returns the hash of int64 numbers in place; its upper half is uniform."""
    for shift, factor in _ROUNDS:
        upper = (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # without the copied signs
        z.bitwise_xor_(upper).mul_(factor)
    return z
