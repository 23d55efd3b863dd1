import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_rounded_once, randn
from tests.ops.test_rms_norm import exact_norm

from musespark.ops.output_gate import output_gate, output_gate_reference

IMPLEMENTATIONS = [output_gate, output_gate_reference]


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("shape", [(0, 2, 16), (1, 1, 2), (5, 4, 16), (3, 8, 64), (2, 3, 128)])
def test_equals_the_formula_with_one_rounding(op, dtype, shape):
    attended, gate = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1, scale=3.0)
    before = attended.clone()
    exact = exact_norm(attended, None, 1e-5) / (1 + torch.exp(-gate.to(F64)))
    actual = op(attended, gate, 1e-5)
    assert actual.dtype == dtype
    assert_rounded_once(actual, exact)
    assert torch.equal(attended, before)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_saturated_gates(op):
    attended = randn(1, 1, 8)
    closed = op(attended, torch.full((1, 1, 8), -1e4), 1e-5)
    opened = op(attended, torch.full((1, 1, 8), 1e4), 1e-5)
    assert torch.equal(closed, torch.zeros_like(closed))
    assert_rounded_once(opened, exact_norm(attended, None, 1e-5))


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_non_contiguous_inputs(op, dtype):
    fused = randn(6, 12, 16, dtype=dtype)  # as the fused projection gives them
    attended, gate = fused[:, :4], fused[:, 8:]
    expected = op(attended.contiguous(), gate.contiguous(), 1e-5)
    assert torch.equal(op(attended, gate, 1e-5), expected)
    transposed = attended.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(op(transposed, gate, 1e-5), expected)
