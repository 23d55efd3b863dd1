import pytest
import torch
from tests.ops.accuracy import F32, F64, assert_within, randn

from musespark.ops.soft_cap import soft_cap


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("rows", "vocab"), [(0, 5), (1, 1), (3, 1001)])
@pytest.mark.parametrize(("multiplier", "cap"), [(0.1767766952966369, 20.0), (1.0, 3.0)])
def test_equals_the_formula(dtype, rows, vocab, multiplier, cap):
    x = randn(rows, vocab, scale=40.0).to(dtype)
    exact = cap * torch.tanh(multiplier * x.to(F64) / cap)
    actual = soft_cap(x, multiplier, cap)
    assert actual.dtype == dtype
    assert_within(actual, exact, (1e-6 if dtype == F32 else 1e-14) * exact.abs())


def test_never_exceeds_the_cap_and_keeps_order():
    x = torch.tensor([[-1e30, -100.0, 0.0, 1.0, 2.0, 100.0, 1e30]])
    capped = soft_cap(x.clone(), 1.0, 20.0)
    assert capped.abs().max() <= 20
    assert torch.equal(capped.sort().indices, x.sort().indices)
    assert capped[0, 2] == 0
