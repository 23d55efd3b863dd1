import pytest
import torch
from tests.ops.accuracy import seeded

from musespark.ops.scaled_silu_mul import scaled_silu_mul


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float32, 1e-6)])
def test_silu_sees_the_scaled_gate(dtype, tolerance):
    gate_up = (torch.randn(5, 16, generator=seeded()) * 1000).to(dtype)
    gate_scale = torch.rand(5, generator=seeded(1)) / 100
    up_scale = torch.rand(5, generator=seeded(2))
    gate, up = gate_up.double().chunk(2, dim=1)
    gate, up = gate * gate_scale.double()[:, None], up * up_scale.double()[:, None]
    expected = gate / (1 + torch.exp(-gate)) * up
    found = scaled_silu_mul(gate_up, gate_scale, up_scale)
    assert found.dtype == dtype
    assert float((found.double() - expected).norm() / expected.norm()) < tolerance


def test_wider_output():
    gate_up = torch.randn(2, 8, generator=seeded()).bfloat16()
    ones = torch.ones(2)
    assert scaled_silu_mul(gate_up, ones, ones, torch.float32).dtype == torch.float32
