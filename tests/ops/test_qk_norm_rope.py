import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_rounded_once, assert_within, randn
from tests.ops.test_rms_norm import exact_norm

from musespark.ops.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference, rotate
from musespark.ops.rms_norm import rms_norm
from musespark.ops.rotary import rotary_angles

IMPLEMENTATIONS = [qk_norm_rope, qk_norm_rope_reference]
HEAD_DIMS = [2, 16, 64, 128]


def exact_rotation(x, cos, sin):
    """Each pair (x_i, x_{i + half}) turned by its angle, and the size of the terms."""
    half = x.shape[-1] // 2
    x, cos, sin = x.to(F64), cos.to(F64)[:, None], sin.to(F64)[:, None]
    out, size = torch.empty_like(x), torch.empty_like(x)
    for i in range(half):
        a, b, c, s = x[..., i], x[..., half + i], cos[..., i], sin[..., i]
        out[..., i], out[..., half + i] = a * c - b * s, b * c + a * s
        size[..., i] = (a * c).abs() + (b * s).abs()
        size[..., half + i] = (b * c).abs() + (a * s).abs()
    return out, size


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("tokens", "heads"), [(0, 3), (1, 1), (9, 6), (4, 18)])
def test_norm_then_rotation_each_rounded_once(op, dtype, head_dim, tokens, heads):
    qk = randn(tokens, heads, head_dim, dtype=dtype)
    positions = torch.arange(tokens) * 977
    angles = rotary_angles(positions, 500_000.0, head_dim, F64 if dtype == F64 else F32)
    actual = op(qk, 1e-5, angles)
    assert actual.dtype == dtype
    # The reference's own norm and the fused one may differ in the last bit of float32.
    normed = rms_norm(qk, None, 1e-5)
    exact, size = exact_rotation(normed, *angles)
    assert_rounded_once(actual, exact, size)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_layers_without_rope_get_the_norm_alone(op, dtype, head_dim):
    qk = randn(7, 5, head_dim, dtype=dtype)
    assert_rounded_once(op(qk, 1e-5, None), exact_norm(qk, None, 1e-5))


def test_rotation_depends_on_the_distance_only():
    query, key = randn(1, 1, 64), randn(1, 1, 64, seed=1)

    def score(query_position, key_position):
        rotated = [
            rotate(x, *rotary_angles(torch.tensor([position]), 500_000.0, 64, F64))
            for x, position in ((query.to(F64), query_position), (key.to(F64), key_position))
        ]
        return (rotated[0] * rotated[1]).sum()

    assert_within(score(5, 2), score(1_000_005, 1_000_002), 1e-8)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_non_contiguous_heads(op, dtype):
    fused = randn(6, 11, 16, dtype=dtype)
    qk = fused[:, 2:8]
    angles = rotary_angles(torch.arange(6), 1e4, 16)
    assert torch.equal(op(qk, 1e-5, angles), op(qk.contiguous(), 1e-5, angles))
