"""Fused norms give the gradients of plain operations, with sharded bfloat16 weights and dispatched rows."""

import pytest
import torch
from family import set_options, some_tokens, tiny_config
from meshes import meshed, model_on
from norm_kernels import stand_in
from torch import Tensor
from world import run_ranks

from moebius.distributed.local_shard import local_tensor
from moebius.distributed.mesh import Mesh
from moebius.model.execution.precision import forward_in
from moebius.model.execution.recompute import Recompute

LOW = torch.bfloat16


def gradients(mesh: Mesh, layers: int, recompute: Recompute) -> dict[str, Tensor]:
    config = tiny_config("moeut", {"num_layers": layers})
    model = model_on(mesh, config, dispatcher="dedup", sharding="fsdp", precision=LOW)
    set_options(model, recompute=recompute)
    tokens = some_tokens(4, 6, seed=mesh.rank)
    output = forward_in(model, LOW, tokens, targets_BS=tokens)
    (output.cross_entropy + output.regularisation_B.sum()).backward()
    return {
        name: local_tensor(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def differences(layers: int, recompute: Recompute) -> list[str]:
    """What is wrong on this rank."""
    with meshed(ep=2, dp_shard=2) as (_, mesh):
        plain = gradients(mesh, layers, recompute)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = stand_in(monkeypatch)
            fused = gradients(mesh, layers, recompute)
            assert len(calls) == 2 * layers * (1 if recompute == "none" else 2)
        assert set(fused) == set(plain)
        return [
            f"{name}: {fused[name]}, not {expected}"
            for name, expected in plain.items()
            if (fused[name] - expected).norm() > 1e-3 * expected.norm() + 1e-7
        ]


@pytest.mark.parametrize(("layers", "recompute"), [(2, "none"), (4, "full")])
def test_sharded_weights(layers: int, recompute: Recompute) -> None:
    """One repeat is freed after its forward call, two stay gathered."""
    assert run_ranks(differences, 2, layers, recompute, timeout_s=120) == [[]] * 2
