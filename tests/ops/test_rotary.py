import pytest
import torch
from tests.ops.accuracy import F32, F64, assert_within

from musespark.ops.rotary import rotary_angles

LAST = 1_048_575


def exact_angles(positions, theta, head_dim):
    exponent = torch.arange(0, head_dim, 2, dtype=F64) / head_dim
    return positions.to(F64)[:, None] * theta**-exponent


@pytest.mark.parametrize("head_dim", [2, 16, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_equals_the_formula_up_to_the_last_position(head_dim, theta):
    positions = torch.tensor([0, 1, 2, 3, 15, 16, 2047, 2048, 131_071, 131_072, LAST - 1, LAST])
    cos, sin = rotary_angles(positions, theta, head_dim)
    exact = exact_angles(positions, theta, head_dim)
    assert cos.shape == sin.shape == (len(positions), head_dim // 2)
    assert cos.dtype == sin.dtype == F32
    # Angles in float32: the frequency and the product are each rounded (2^-24), and a power of
    # theta is off by a few steps. The angle's absolute error is that times the angle itself.
    bound = 4 * 2.0**-24 * exact.abs() + 2.0**-23
    assert_within(cos, exact.cos(), bound)
    assert_within(sin, exact.sin(), bound)


def test_float64_is_exact_at_the_last_position():
    positions = torch.tensor([1, LAST])
    cos, sin = rotary_angles(positions, 500_000.0, 64, F64)
    exact = exact_angles(positions, 500_000.0, 64)
    assert_within(cos, exact.cos(), 1e-9)
    assert_within(sin, exact.sin(), 1e-9)


def test_a_position_does_not_depend_on_the_others_and_none_is_fine():
    positions = torch.arange(1000, 1040)
    cos, sin = rotary_angles(positions, 500_000.0, 64)
    for row in (0, 7, 39):
        one_cos, one_sin = rotary_angles(positions[row : row + 1], 500_000.0, 64)
        assert torch.equal(one_cos, cos[row : row + 1])
        assert torch.equal(one_sin, sin[row : row + 1])
    assert rotary_angles(torch.empty(0, dtype=torch.int64), 1e4, 8)[0].shape == (0, 4)
