import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_rounded_once, assert_within, randn
from tests.ops.test_rms_norm import exact_norm

from musespark.ops.residual_boundary import (
    blend,
    blend_reference,
    residual_boundary,
    residual_boundary_reference,
)
from musespark.ops.residual_gate import residual_gate


def inputs(tokens, width, dtype, gate_scale=0.5, gain=True):
    wide = F64 if dtype == F64 else F32
    stream = randn(tokens, width, seed=1).to(wide)
    branch = randn(tokens, width, dtype=dtype, seed=2, scale=3.0)
    alpha, beta = residual_gate((gate_scale * randn(width, seed=3)).to(wide), 0.3)
    post_gain = (1 + 0.3 * randn(width, seed=4)).to(wide) if gain else None
    pre_gain = (1 + 0.3 * randn(width, seed=5)).to(wide)
    return stream, branch, alpha, beta, post_gain, 1e-8, pre_gain, 1e-5


def exact_blend(stream, branch, alpha, beta, post_gain, post_eps):
    post = exact_norm(branch, post_gain, post_eps, scale_input=True)
    kept, added = alpha.to(F64) * stream.to(F64), beta.to(F64) * post
    return kept + added, kept.abs() + added.abs()


@pytest.mark.parametrize("boundary", [residual_boundary, residual_boundary_reference])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 1), (1, 64), (7, 33), (5, 256)])
@pytest.mark.parametrize("gain", [False, True])
def test_equals_the_formula(boundary, dtype, tokens, width, gain):
    args = inputs(tokens, width, dtype, gain=gain)
    normed, stream = boundary(*args)
    exact, magnitude = exact_blend(*args[:6])
    assert normed.dtype == dtype
    assert stream.dtype == args[0].dtype
    assert_rounded_once(stream, exact, magnitude)
    # The pre-norm sees the stream as it is kept, so its own rounding is all that is added.
    assert_rounded_once(normed, exact_norm(stream, args[6], args[7]))


@pytest.mark.parametrize("gate_scale", [50.0, 1000.0])
def test_extreme_gates_stay_finite(gate_scale):
    args = inputs(4, 128, BF16, gate_scale=gate_scale)
    normed, stream = residual_boundary(*args)
    assert_rounded_once(stream, *exact_blend(*args[:6]))
    assert bool(normed.isfinite().all())


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_blend_is_the_boundary_without_the_norm(dtype):
    args = inputs(5, 48, dtype)
    before = [tensor.clone() for tensor in args[:4]]
    _, stream = residual_boundary(*args)
    assert torch.equal(blend(*args[:6]), stream)
    assert_within(blend_reference(*args[:6]), stream, 2e-6 * exact_blend(*args[:6])[1])
    assert all(torch.equal(kept, tensor) for kept, tensor in zip(before, args[:4], strict=True))


def test_non_contiguous_branch_and_independent_rows():
    stream, branch, *rest = inputs(6, 40, BF16)
    whole = residual_boundary(stream, branch, *rest)
    strided = torch.cat([branch, branch], dim=1)[:, ::1][:, :40]
    again = residual_boundary(stream, strided, *rest)
    row = residual_boundary(stream[2:3], branch[2:3], *rest)
    for left, right, single in zip(whole, again, row, strict=True):
        assert torch.equal(left, right)
        assert torch.equal(left[2:3], single)
