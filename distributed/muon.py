"""Muon: the momentum of every matrix is made orthogonal before it moves the weights.

    B ← μ B + (1 − μ) G                              momentum of the gradient
    U = μ B + (1 − μ) G                              one step ahead (Nesterov)
    X = U / ‖U‖_F, then `steps` times  X ← a X + (b A + c A²) X  with  A = X Xᵀ
    W ← W (1 − η λ) − η s X                          s = 0.2 √max(out, in), or √max(1, out / in)

The iteration (Newton–Schulz) brings all singular values of X near 1. Sources: Jordan et al. 2024
(kellerjordan.github.io/posts/muon); Liu et al., arXiv 2502.16982, for s and the decay.

A *matrix* is one map of the model: each expert alone, gate and up apart, whatever tensor they are stored in
(model/execution/roles.py). A bank is (E, in, out), a dense matrix (out, in). Everything else takes AdamW's step in the same run.

**The bits do not depend on the layout.** Every operation on elements is one that rounds once, and a matrix is
multiplied whole, alone and contiguous on a CPU. (A GPU multiplies all matrices of a stack together, in bfloat16.) So
weights are equal on any number of ranks, with and without FSDP, wherever the gradients are.

**No rank does the work of all.** A matrix belongs to one rank among those that store it:

    whole on one rank        experts under EP, or of an FSDP shard   nothing travels
    whole on several ranks   data parallelism                        the owner's update is broadcast
    cut by FSDP              each rank has some rows or columns      the owner collects U, and returns the update's parts

Owners follow from shapes alone. With HSDP every replica does this by itself. Matrices of one shape are a stack: the next
stack travels while this one is computed. Cost of a matrix m × n, m ≤ n: 20 m² n floating-point operations, and
4 m n bytes (8 m n if it is cut) on the owner's link; neither shrinks with more nodes.

Legend: N matrices of a stack on this rank, of A × B; P ranks that share a stack.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from ..model.execution.roles import Role
from .local_shard import local_shard_of, local_tensor
from .mesh import Mesh

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b and c, Jordan's
EPS = 1e-7
STACK_BYTES = 64 * 2**20  # of this rank's part of a stack, in float32, unless one tensor has more


class Muon(torch.optim.Optimizer):
    """Updates matrices by Muon, and all other parameters by the AdamW that it is given.

    State: `momentum_buffer`, of the parameter's shape and dtype, and AdamW's for the others.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        roles: Mapping[Parameter, Role],
        adamw: torch.optim.AdamW,
        mesh: Mesh | None = None,
    ) -> None:
        """Joins both in one optimizer.

        Args:
            groups: of matrices: "params", "lr", "weight_decay", "momentum", "steps", "scale" and
                "cautious".
            roles: of all matrices.
            adamw: of all others; its groups and its state are this optimizer's from now on.
            mesh: the ranks that share the work; None: this process has the whole model.
        """
        super().__init__(groups, {})
        self._own, self._adamw = list(self.param_groups), adamw
        self._roles, self._mesh = roles, mesh
        self._stacks: list[_Stack] = []
        self._shapes: list[torch.Size] = []  # that the stacks were built for: experts may move
        self.param_groups += adamw.param_groups
        adamw.state = self.state

    def __str__(self) -> str:
        """Counts the tensors of both rules, over the whole model."""
        own = [parameter for group in self._own for parameter in group["params"]]
        shapes = [(local_shard_of(one).global_shape, self._roles[one].maps) for one in own]
        matrices = sum(math.prod(shape[:-2]) * maps for shape, maps in shapes)
        others = sum(len(group["params"]) for group in self._adamw.param_groups)
        return f"Muon: {len(own)} tensors of {matrices:,} matrices; AdamW: {others} tensors"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters; collective over the mesh. A missing gradient counts as zeros."""
        moves: deque[_StackStep] = deque()  # at most three are in memory
        for stack in self._current_stacks():
            moves.append(_StackStep(stack, self.state))
            moves[-1].collect()
            if len(moves) > 1:
                moves[-2].compute()
            if len(moves) > 2:
                moves.popleft().apply()
        moves[-1].compute()
        self._adamw.step()  # while the last updates travel
        for move in moves:
            move.apply()

    def _current_stacks(self) -> "list[_Stack]":
        shapes = [parameter.shape for group in self._own for parameter in group["params"]]
        if shapes != self._shapes:
            found = [stack for group in self._own for stack in self._stacks_of(group)]
            # The same order on every rank, whatever the sizes of its experts' stacks; then the costly ones.
            self._stacks = sorted(found, key=lambda stack: (not stack.is_bank, -stack.cost))
            _assign_owners(self._stacks)
            self._shapes = shapes
        return self._stacks

    def _stacks_of(self, group: dict[str, Any]) -> "list[_Stack]":
        """Joins a group's parameters to stacks, in their order."""
        stacks: list[_Stack] = []
        open_stacks: dict[Any, _Stack] = {}
        for parameter in group["params"]:
            ranks, cut = self._where(parameter)
            role, sizes = self._roles[parameter], local_shard_of(parameter).global_shape[-2:]
            key = (ranks, cut, sizes, role, parameter.dtype)
            # the same on all ranks that share the stack
            num_bytes = (
                4 * parameter.numel() // (1 if cut is None or ranks is None else ranks.size())
            )
            stack = open_stacks.get(key)
            if stack is None or stack.num_bytes + num_bytes > STACK_BYTES:
                stack = _Stack(group, role, sizes, ranks, cut)
                open_stacks[key] = stack
                stacks.append(stack)
            stack.parameters.append(parameter)
            stack.num_bytes += num_bytes
        return stacks

    def _where(self, parameter: Parameter) -> tuple[dist.ProcessGroup | None, int | None]:
        """Returns the ranks that share a parameter's matrices, and the dimension that is cut."""
        if isinstance(parameter, DTensor):
            mesh, dim = parameter.device_mesh, cast(Shard, parameter.placements[-1]).dim
            is_whole = parameter.ndim == 3 and dim == 0
            ranks = None if is_whole else mesh.get_group(mesh.ndim - 1)
            cut = dim - (parameter.ndim - 2)
        elif self._mesh is None:
            return None, None
        else:
            has_experts = local_shard_of(parameter).has_experts
            ranks = self._mesh.expert_replica_group if has_experts else self._mesh.world_group
            cut = None
        return (None, None) if ranks is None or ranks.size() == 1 else (ranks, cut)


@dataclass(eq=False)
class _Stack:
    """Consecutive parameters whose matrices have one shape and lie on the ranks alike."""

    options: dict[str, Any]  # their group
    role: Role
    sizes: Sequence[int]  # A and B of a whole matrix
    ranks: dist.ProcessGroup | None  # that share the matrices; None: this rank's are its own
    cut: int | None  # 0 or 1: each of the ranks has a part of A or of B; None: it has all
    parameters: list[Parameter] = field(default_factory=list)
    num_bytes: int = 0  # of this rank's part
    counts_P: list[int] = field(default_factory=list)  # matrices that each rank owns

    @property
    def is_bank(self) -> bool:
        return self.role.kind == "bank"

    @property
    def cost(self) -> int:
        """Returns m² n, the work of a matrix."""
        return min(self.sizes) ** 2 * max(self.sizes)

    @property
    def rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank()

    @property
    def starts_P(self) -> list[int]:
        """Returns where each rank's own matrices begin, and the end."""
        return [0, *accumulate(self.counts_P)]

    @property
    def parts_P(self) -> list[list[int]]:
        """Returns the shape of each rank's part of a cut matrix, as torch.chunk cuts it."""
        assert self.cut is not None
        size, shapes = self.sizes[self.cut], [list(self.sizes) for _ in self.counts_P]
        share = -(-size // len(shapes))
        for rank, shape in enumerate(shapes):
            shape[self.cut] = min(share, max(0, size - rank * share))
        return shapes

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """Returns how many numbers go to each rank on the way to the owners, and come from it."""
        sizes_P = [math.prod(part) for part in self.parts_P]
        own = self.counts_P[self.rank]
        return [count * sizes_P[self.rank] for count in self.counts_P], [
            own * one for one in sizes_P
        ]

    def orthogonal(self, u_NAB: Tensor) -> Tensor:
        """Returns every map's update, without the rate."""
        outputs = -1 if self.is_bank else -2
        maps = u_NAB.chunk(self.role.maps, outputs)
        steps, scale = self.options["steps"], _SCALES[self.options["scale"]]
        num_out, num_in = maps[0].shape[outputs], maps[0].shape[-3 - outputs]
        found = [orthogonalise(one, steps) for one in maps]
        return torch.cat(found, outputs).mul_(self.options["lr"] * scale(num_out, num_in))


class _StackStep:
    """One step of a stack: sends momenta and updates, and waits for them as late as possible."""

    def __init__(self, stack: _Stack, state: dict[Tensor, Any]) -> None:
        self._stack, self._state = stack, state
        self._works: list[dist.Work | None] = []
        self._sent: list[Tensor] = []  # kept until it has arrived

    def collect(self) -> None:
        """Updates the momentum, and sends the parts of cut matrices to their owners."""
        self._u_NAB = torch.cat([self._look_ahead(one) for one in self._stack.parameters])
        if self._stack.cut is not None:
            self._arriving = self._exchange(self._u_NAB, *self._stack.splits)

    def compute(self) -> None:
        """Computes the updates of the matrices owned here, and sends them to the ranks that store them."""
        stack = self._stack
        if stack.cut is not None:
            self._compute_cut(stack, stack.cut)
            return
        self._update_NAB = torch.empty_like(self._u_NAB)
        for owner, (start, end) in enumerate(pairwise(stack.starts_P)):
            own = self._update_NAB[start:end]
            if owner == stack.rank:
                own.copy_(stack.orthogonal(self._u_NAB[start:end]))
            if stack.ranks is not None and start < end:
                work = dist.broadcast(own, group=stack.ranks, group_src=owner, async_op=True)
                self._works.append(work)

    def _compute_cut(self, stack: _Stack, cut: int) -> None:
        self._wait()
        to_P, from_P = stack.splits
        own = stack.counts_P[stack.rank]
        parts = zip(self._arriving.split(from_P), stack.parts_P, strict=True)
        update = stack.orthogonal(
            torch.cat([one.view(own, *shape) for one, shape in parts], cut + 1)
        )
        cuts = update.split([shape[cut] for shape in stack.parts_P], cut + 1)
        returned = self._exchange(torch.cat([one.flatten() for one in cuts]), from_P, to_P)
        self._update_NAB = returned.view(self._u_NAB.shape)

    def apply(self) -> None:
        """Decays the weights and subtracts the updates."""
        self._wait()
        options = self._stack.options
        kept = 1 - options["lr"] * options["weight_decay"]
        weights = [_as_bank(local_tensor(parameter)) for parameter in self._stack.parameters]
        updates = self._update_NAB.split([len(weight) for weight in weights])
        for weight, update in zip(weights, updates, strict=True):
            weight.mul_(
                torch.where(weight * update > 0, kept, 1.0) if options["cautious"] else kept
            )
            weight.sub_(update)

    def _look_ahead(self, parameter: Parameter) -> Tensor:
        """Updates a parameter's momentum; returns U, (N, A, B) in float32 at least."""
        state, momentum = self._state[parameter], self._stack.options["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = _as_bank(local_tensor(state["momentum_buffer"]))
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # not lerp, whose vectors round otherwise than its last elements
        fresh = _as_bank(local_tensor(grad)) * (1 - momentum)
        buffer.mul_(momentum).add_(fresh)
        return fresh.add_(buffer * momentum).to(torch.promote_types(buffer.dtype, torch.float32))

    def _exchange(self, sent: Tensor, to_P: list[int], from_P: list[int]) -> Tensor:
        arriving = sent.new_empty(sum(from_P))
        self._sent = [sent.flatten()]
        work = dist.all_to_all_single(
            arriving, self._sent[0], from_P, to_P, group=self._stack.ranks, async_op=True
        )
        self._works = [work]
        return arriving

    def _wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._works, self._sent = [], []


def orthogonalise(u_NAB: Tensor, steps: int) -> Tensor:
    """Returns matrices whose singular values are near 1 (0.7 to 1.2), with the same singular vectors.

    In float32 on a CPU, one by one; in bfloat16 on a GPU, together. A matrix of zeros stays so.

    Args:
        u_NAB: the matrices.
        steps: of the iteration; 5 in all published runs.
    """
    wide = u_NAB.mT if u_NAB.shape[-2] > u_NAB.shape[-1] else u_NAB
    if u_NAB.device.type == "cpu":
        one_by_one = [_newton_schulz(one.contiguous(), steps) for one in wide]
        found = torch.stack(one_by_one) if one_by_one else wide
    else:
        found = _newton_schulz(wide.bfloat16(), steps).to(u_NAB.dtype)
    return found.mT if wide is not u_NAB else found


def _newton_schulz(x: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def _assign_owners(stacks: "Sequence[_Stack]") -> None:
    """Gives every matrix to the rank that has the least work so far."""
    loads: dict[dist.ProcessGroup | None, list[tuple[int, int]]] = {}
    for stack in stacks:
        size = 1 if stack.ranks is None else stack.ranks.size()
        heap = loads.setdefault(stack.ranks, [(0, rank) for rank in range(size)])
        stack.counts_P = [0] * size
        for _ in range(sum(len(_as_bank(local_tensor(one))) for one in stack.parameters)):
            load, rank = heap[0]
            stack.counts_P[rank] += 1
            heapq.heapreplace(heap, (load + stack.cost, rank))


def _as_bank(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 3 else tensor[None]


_SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda num_out, num_in: 0.2 * math.sqrt(max(num_out, num_in)),
    "spectral": lambda num_out, num_in: math.sqrt(max(1, num_out / num_in)),
}
