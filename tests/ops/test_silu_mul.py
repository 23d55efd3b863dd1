import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_rounded_once, randn

from musespark.ops.silu_mul import silu_mul


def exact_silu_mul(gate_up):
    gate, up = gate_up.to(F64).chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (5, 66), (3, 4, 30)])
def test_equals_the_formula(dtype, shape):
    gate_up = randn(*shape, dtype=dtype, scale=3.0)
    before = gate_up.clone()
    actual = silu_mul(gate_up)
    assert actual.dtype == dtype
    assert_rounded_once(actual, exact_silu_mul(gate_up), exact_silu_mul(gate_up).abs() * 3)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_saturated_gates(dtype):
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], dtype=dtype)
    up = torch.full_like(gate, 2.0)
    expected = torch.tensor([[0.0, 0.0, 0.0, 200.0, 2e4]], dtype=dtype)
    assert torch.allclose(silu_mul(torch.cat([gate, up], -1)), expected, atol=1e-30)


def test_non_contiguous_input():
    gate_up = randn(24, 10, dtype=BF16).t()
    assert torch.equal(silu_mul(gate_up), silu_mul(gate_up.contiguous()))
