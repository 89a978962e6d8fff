"""Expert-parallel layers for the kit's tests: a correct one, and the same with one fault each.

`FAULTS` gives each fault's class. The layers are written as a newcomer would, with
all_to_all_single and loops. Those with `same` rows have them like the ranks of a tensor-parallel
group.
"""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moebius_conform import Layer
from moebius_conform.loop import LoopMoE

WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 6, 8, 2


class AllToAll(torch.autograd.Function):
    """Exchanges rows by rank; backward sends the gradients the same way back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):  # type: ignore[override]
        ctx.splits, ctx.group = (sent, received), group
        return exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        sent, received = ctx.splits
        return exchange(gradient.contiguous(), received, sent, ctx.group), None, None, None


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class Scaled(torch.autograd.Function):
    """Keeps values and multiplies the gradient."""

    @staticmethod
    def forward(ctx, rows, factor):  # type: ignore[override]
        ctx.factor = factor
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        return gradient * ctx.factor, None


class SumForward(torch.autograd.Function):
    """Sums over ranks; every rank has the whole gradient already."""

    @staticmethod
    def forward(ctx, rows, group):  # type: ignore[override]
        rows = rows.clone()
        dist.all_reduce(rows, group=group)
        return rows

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        return gradient, None


class SumBackward(torch.autograd.Function):
    """Keeps values; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, rows, group):  # type: ignore[override]
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w_up = nn.Parameter(torch.empty(count, WIDTH, HIDDEN))
        self.w_down = nn.Parameter(torch.empty(count, HIDDEN, WIDTH))

    def forward(self, rows: Tensor, expert_N: Tensor) -> Tensor:
        out = rows.new_zeros(rows.shape) + 0 * rows
        for expert in range(len(self.w_up)):
            mine = (expert_N == expert).nonzero()[:, 0]
            answers = (rows[mine] @ self.w_up[expert]).relu() @ self.w_down[expert]
            out = out.index_add(0, mine, answers)
        return out


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = self.gate(x).softmax(-1).topk(TOP_K)
        return chosen.indices, chosen.values / chosen.values.sum(-1, keepdim=True)


class OwnRows(Router):
    """Every rank has its own rows, which are sent to their experts and back."""

    def __init__(self, group: dist.ProcessGroup, fault: str = "") -> None:
        super().__init__()
        self.group, self.fault = group, fault if group.size() > 1 else ""
        self.size = group.size()
        self.experts = Experts(EXPERTS // self.size)

    def forward(self, x: Tensor) -> Tensor:
        self.stop(x)
        experts, gates = self.route(x)
        if self.fault == "gate detached":
            gates = gates.detach()
        y = self.routed(x, experts, gates)
        if self.fault == "all ranks' mean in the output":
            total = x.detach().sum(0)
            dist.all_reduce(total, group=self.group)
            y = y + 0.05 * total
        return y + self.shared(x)

    def stop(self, x: Tensor) -> None:
        if self.fault == "a rank raises" and not len(x):
            raise ValueError("this layer wants rows")
        if self.fault == "a rank dies" and not len(x):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "a rank hangs" and not len(x):
            time.sleep(3600)

    def routed(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        order = experts.flatten().argsort(stable=True)
        expert_N = experts.flatten()[order]
        rows = x[order // TOP_K]
        if self.fault == "inputs' gradient of its own experts alone":
            foreign = expert_N // (EXPERTS // self.size) != self.group.rank()
            rows = torch.where(foreign[:, None], rows.detach(), rows)
        sent = torch.bincount(expert_N // (EXPERTS // self.size), minlength=self.size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        splits = sent.tolist(), received.tolist()
        arrived = AllToAll.apply(rows, *splits, self.group)
        local_N = exchange(expert_N, *splits, self.group) % (EXPERTS // self.size)
        answers = self.answer(arrived, local_N)
        back = AllToAll.apply(answers, splits[1], splits[0], self.group)
        return self.combined(back, order, gates, experts)

    def answer(self, arrived: Tensor, local_N: Tensor) -> Tensor:
        if self.fault == "the next expert answers":
            local_N = (local_N + 1) % (EXPERTS // self.size)
        if self.fault == "NaN where an expert has no row" and len(local_N.unique()) < len(
            self.experts.w_up
        ):
            return self.experts(arrived, local_N) + arrived.new_empty(0).mean()
        if self.fault in ("experts' gradient times ranks", "experts' gradient over ranks"):
            factor = self.size if "times" in self.fault else 1 / self.size
            kept = dict(self.experts.named_parameters())
            scaled = {name: Scaled.apply(value, factor) for name, value in kept.items()}
            return torch.func.functional_call(self.experts, scaled, (arrived, local_N))
        answers = self.experts(arrived, local_N)
        if self.fault == "experts keep 4 rows":
            place = torch.stack(
                [(local_N[:i] == e).sum() for i, e in enumerate(local_N)] or [torch.zeros(())]
            )
            answers = answers * (place[: len(answers)] < 4)[:, None]
        return answers

    def combined(self, back: Tensor, order: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        if self.fault == "rows are not put back":
            inverse = torch.arange(len(order))
        if self.fault == "gate weights of other routes":
            gates = gates.flatten()[order].view_as(gates)
        if self.fault == "gate gradient of its own experts alone":
            foreign = experts // (EXPERTS // self.size) != self.group.rank()
            gates = torch.where(foreign, gates.detach(), gates)
        rows = back[inverse].view(len(gates), TOP_K, WIDTH)
        if self.fault == "the last row loses a route" and len(rows):
            rows = torch.cat([rows[:-1], rows[-1:] * torch.tensor([1.0, 0.0])[:, None]])
        if self.fault == "half of the routes come twice":
            rows = rows * torch.tensor([1.0, 2.0])[:, None]
        return (rows * gates[..., None]).sum(1)


class SameRows(Router):
    """All ranks have the same rows; each serves its own experts, and the outputs are summed."""

    def __init__(self, group: dist.ProcessGroup, fault: str = "") -> None:
        super().__init__()
        self.group, self.fault = group, fault if group.size() > 1 else ""
        self.count = EXPERTS // group.size()
        self.experts = Experts(self.count)

    def forward(self, x: Tensor) -> Tensor:
        experts, gates = self.route(x)
        if self.fault != "gate not summed":
            gates = SumBackward.apply(gates, self.group)
        rows = x if self.fault == "inputs not summed" else SumBackward.apply(x, self.group)
        mine = experts // self.count == self.group.rank()
        y = torch.zeros_like(x) + 0 * rows
        for place in range(TOP_K):
            local = torch.where(mine[:, place], experts[:, place] % self.count, self.count)
            weight = torch.where(mine[:, place], gates[:, place], 0)
            if self.fault == "routes that do not exist":
                local = local.clamp(max=self.count - 1)
                weight = gates[:, place] - torch.where(mine[:, place], 0, gates[:, place].detach())
            y = y + self.experts(rows, local) * weight[:, None]
        if self.fault != "answers not summed":
            y = SumForward.apply(y, self.group)
        return y + self.shared(x)


# The training loop's part -------------------------------------------------------------------------


def sum_replicated(layer: nn.Module, group: dist.ProcessGroup) -> None:
    for name, parameter in layer.named_parameters():
        if "experts" not in name and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def sum_all_but_router(layer: nn.Module, group: dist.ProcessGroup) -> None:
    for name, parameter in layer.named_parameters():
        if "experts" not in name and "gate" not in name and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def mean_replicated(layer: nn.Module, group: dist.ProcessGroup) -> None:
    sum_replicated(layer, group)
    for name, parameter in layer.named_parameters():
        if "experts" not in name and parameter.grad is not None:
            parameter.grad /= group.size()


def right_norm(layer: nn.Module, group: dist.ProcessGroup) -> Tensor:
    squares = torch.zeros(2)
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            squares[int("experts" in name)] += parameter.grad.square().sum()
    dist.all_reduce(squares[1:], group=group)
    return squares.sum().sqrt()


def local_norm(layer: nn.Module, group: dist.ProcessGroup) -> Tensor:
    del group
    return nn.utils.get_total_norm([p.grad for p in layer.parameters() if p.grad is not None])


def own(fault: str = "", finish=sum_replicated, norm=right_norm, **more) -> Layer:
    return Layer(
        build=lambda group: OwnRows(group, fault),
        finish=finish,
        grad_norm=norm,
        top_k=TOP_K,
        **more,
    )


def same(fault: str = "") -> Layer:
    return Layer(build=lambda group: SameRows(group, fault), tokens="same", top_k=TOP_K)


right_own, right_same = own(), same()


def bare(group: dist.ProcessGroup) -> nn.Module:
    """The minimum that a user writes."""
    return OwnRows(group)


FAULTS = {
    "router_not_summed": ("missing partial sum", own(finish=sum_all_but_router)),
    "nothing_summed": ("missing partial sum", own(finish=lambda layer, group: None)),
    "inputs_partial": ("missing partial sum", own("inputs' gradient of its own experts alone")),
    "same_inputs": ("missing partial sum", same("inputs not summed")),
    "same_answers": ("missing partial sum", same("answers not summed")),
    "times_ranks": ("scaled", own("experts' gradient times ranks")),
    "over_ranks": ("scaled", own("experts' gradient over ranks")),
    "averaged": ("scaled", own(finish=mean_replicated)),
    "capacity": ("lost or doubled routes", own("experts keep 4 rows")),
    "last_row": ("lost or doubled routes", own("the last row loses a route")),
    "twice": ("lost or doubled routes", own("half of the routes come twice")),
    "not_put_back": ("order of rows", own("rows are not put back")),
    "other_weights": ("order of rows", own("gate weights of other routes")),
    "next_expert": ("order of rows", own("the next expert answers")),
    "detached": ("gate gradient", own("gate detached")),
    "own_gates": ("gate gradient", own("gate gradient of its own experts alone")),
    "same_gate": ("gate gradient", same("gate not summed")),
    "no_such_routes": ("gate gradient", same("routes that do not exist")),
    "local_norm": ("norm over experts", own(norm=local_norm)),
    "mean": ("depends on other samples", own("all ranks' mean in the output")),
    "empty_mean": ("not finite", own("NaN where an expert has no row")),
    "raises": ("crash", own("a rank raises")),
    "dies": ("crash", own("a rank dies")),
    "hangs": ("hang", own("a rank hangs")),
}
globals().update({name: layer for name, (_, layer) in FAULTS.items()})


# Data parallelism, and our own dispatchers --------------------------------------------------------


def replicated(group: dist.ProcessGroup) -> nn.Module:
    """Every rank has all experts."""
    del group
    return LoopMoE(WIDTH, HIDDEN, EXPERTS, top_k=TOP_K, router=True)


def sum_everything(layer: nn.Module, group: dist.ProcessGroup) -> None:
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad, group=group)


data_parallel = Layer(build=replicated, finish=sum_everything)
data_parallel_alone = Layer(build=replicated, finish=lambda layer, group: None)
