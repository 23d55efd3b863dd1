"""Kernels that work on whole rows: norms, boundaries, finalizing, activations, the soft cap."""

import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_rounded_once, assert_within, randn
from tests.ops.kernels.device import DEVICE, needs_kernels, on_device, on_gpu
from tests.ops.test_residual_boundary import exact_blend
from tests.ops.test_residual_boundary import inputs as boundary_inputs
from tests.ops.test_rms_norm import exact_norm

from musespark.ops.expert_finalize import expert_finalize_reference, expert_finalize_triton
from musespark.ops.residual_boundary import blend_triton, residual_boundary_triton
from musespark.ops.rms_norm import rms_norm_triton
from musespark.ops.silu_mul import silu_mul_triton
from musespark.ops.soft_cap import soft_cap_triton

pytestmark = needs_kernels

SHAPES = [(0, 8), (1, 1), (1, 64), (7, 33), (3, 256)]
LARGE = on_gpu((1, 8192), (133, 8192), (300, 4096), (1024, 1000))


@pytest.mark.parametrize(("tokens", "width"), SHAPES + LARGE)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("weighting", ["none", "after", "before"])
def test_rms_norm(tokens, width, dtype, weighting):
    x = randn(tokens, width, dtype=dtype, seed=1, scale=3.0)
    gain = None if weighting == "none" else 1 + 0.3 * randn(width, seed=2)
    before = weighting == "before"
    actual = rms_norm_triton(*on_device(x, gain, 1e-5), scale_input=before)
    assert actual.dtype == dtype
    assert_rounded_once(actual.cpu(), exact_norm(x, gain, 1e-5, scale_input=before))


def test_rms_norm_reads_strided_rows_and_widens():
    x = randn(3, 80, dtype=BF16, seed=1)[:, 16:48]
    actual = rms_norm_triton(x.to(DEVICE), None, 1e-5, out_dtype=F32)
    assert_rounded_once(actual.cpu(), exact_norm(x, None, 1e-5))


@pytest.mark.parametrize(("tokens", "width"), SHAPES + LARGE)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("gain", [False, True])
def test_boundary(tokens, width, dtype, gain):
    args = boundary_inputs(tokens, width, dtype, gain=gain)
    wide = torch.full((tokens, width), torch.nan, device=DEVICE)
    normed, stream = residual_boundary_triton(*on_device(*args), wide_normed=wide)
    exact, magnitude = exact_blend(*args[:6])
    assert normed.dtype == dtype
    assert_rounded_once(stream.cpu(), exact, magnitude)
    expected = exact_norm(stream.cpu(), args[6], args[7])
    assert_rounded_once(normed.cpu(), expected)
    assert_rounded_once(wide.cpu(), expected)
    blended = blend_triton(*on_device(*args[:6]))
    assert_rounded_once(blended.cpu(), exact, magnitude)


def test_boundary_reads_strided_branches():
    args = list(boundary_inputs(3, 96, BF16))
    packed = torch.full((3, 128), torch.nan, dtype=BF16)
    packed[:, 16:112] = args[1]
    exact, magnitude = exact_blend(*args[:6])
    moved = list(on_device(*args))
    moved[1] = packed.to(DEVICE)[:, 16:112]
    normed, stream = residual_boundary_triton(*moved)
    assert normed.is_contiguous()
    assert_rounded_once(stream.cpu(), exact, magnitude)


def finalize_inputs(tokens, top_k, width, dtype, share_absent):
    generator = torch.Generator().manual_seed(tokens + top_k)
    index = torch.randperm(tokens * top_k, generator=generator).view(tokens, top_k)
    absent = torch.rand(tokens, top_k, generator=generator) < share_absent
    rows = randn(tokens * top_k, width, dtype=dtype, seed=3, scale=2.0)
    rows[index[absent]] = torch.nan  # another rank's memory
    weights = torch.rand(tokens, top_k, generator=generator)
    gain = 1 + 0.3 * randn(width, seed=4)
    return rows, weights, index.masked_fill(absent, -1), gain, 1e-8


@pytest.mark.parametrize(
    ("tokens", "top_k", "width"),
    [
        (0, 2, 8),
        (1, 1, 16),
        (1, 8, 64),
        (5, 3, 33),
        (3, 8, 128),
        *on_gpu((1, 8, 4096), (200, 8, 4096), (700, 8, 4096), (65, 6, 3000)),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("share_absent", [0.0, 0.4, 1.0])
def test_finalize(tokens, top_k, width, dtype, share_absent):
    args = finalize_inputs(tokens, top_k, width, dtype, share_absent)
    actual = expert_finalize_triton(*on_device(*args))
    rows, weights, index, gain, eps = args
    exact = expert_finalize_reference(rows.to(F64), weights.to(F64), index, gain.to(F64), eps)
    terms = expert_finalize_reference(
        rows.to(F64).abs(), weights.to(F64), index, gain.to(F64).abs(), eps
    )
    assert actual.dtype == dtype
    assert_rounded_once(actual.cpu(), exact, terms)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_finalize_takes_either_index_type(index_dtype):
    rows, weights, index, gain, eps = finalize_inputs(2, 4, 32, F32, 0.3)
    one, other = (
        expert_finalize_triton(*on_device(rows, weights, i, gain, eps))
        for i in (index, index.to(index_dtype))
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 1), (3, 40), (2, 1030)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_silu_mul(rows, width, dtype):
    gate_up = randn(rows, 2 * width, dtype=dtype, seed=1, scale=3.0)
    gate, up = gate_up.to(F64).chunk(2, dim=-1)
    exact = gate * torch.sigmoid(gate) * up
    assert_rounded_once(silu_mul_triton(gate_up.to(DEVICE)).cpu(), exact)


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_soft_cap(size):
    x = randn(size, seed=1) * torch.logspace(-6, 4, size) if size else torch.empty(0)
    exact = 20 * torch.tanh(0.5 * x.to(F64) / 20)
    actual = soft_cap_triton(x.to(DEVICE), 0.5, 20.0).cpu()
    assert_within(actual, exact, 1e-6 * exact.abs())
