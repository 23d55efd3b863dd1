import math

import pytest
import torch
from tests.ops.accuracy import F32, F64, assert_within, randn

from musespark.ops.residual_gate import residual_gate

MIN_ALPHA = math.sqrt(1e-3)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_coefficients_are_sigmoid_and_its_complement(temperature, dtype):
    gate = (randn(2000) * 2).to(dtype)
    alpha, beta = residual_gate(gate, temperature)
    exact_beta = 1 / (1 + torch.exp(-gate.to(F64) / temperature))
    # 1 - beta^2 loses no more than 1e-10 in float64 for these gates.
    exact_alpha = (1 - exact_beta.square()).clamp_min(1e-3).sqrt()
    tolerance = 1e-6 if dtype == F32 else 1e-10
    # sigmoid turns the rounding of u = gate / temperature into a relative error of |u| * 2^-24.
    bound = tolerance * (1 + gate.abs().to(F64) / temperature)
    assert alpha.dtype == beta.dtype == dtype
    assert_within(beta, exact_beta, bound * exact_beta)
    assert_within(alpha, exact_alpha, bound * exact_alpha)


@pytest.mark.parametrize("gate", [-50.0, 50.0, -1e4, 1e4, 0.0])
def test_extremes_are_finite_and_exact(gate):
    alpha, beta = residual_gate(torch.tensor([gate]), 0.3)
    if gate > 0:
        assert beta.item() == 1.0
        assert alpha.item() == pytest.approx(MIN_ALPHA, rel=1e-6)
    elif gate < 0:
        assert 0 <= beta.item() < 1e-30
        assert alpha.item() == 1.0
    else:
        assert beta.item() == 0.5
        assert alpha.item() == pytest.approx(math.sqrt(0.75), rel=1e-6)


def test_no_cancellation_where_the_branch_nearly_fills_the_stream():
    # Near beta = 1, the plain 1 - beta * beta of float32 is off by 1e-4 and more.
    u = torch.linspace(6.0, 8.0, 200)
    alpha, _ = residual_gate(u, 1.0)
    wide = u.to(F64)
    exact = (torch.sigmoid(-wide) * (1 + torch.sigmoid(wide))).clamp_min(1e-3).sqrt()
    assert bool((exact > MIN_ALPHA).any())
    assert bool((exact == MIN_ALPHA).any())
    assert_within(alpha, exact, 1e-6 * exact)
