import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_rounded_once, randn

from musespark.ops.rms_norm import rms_norm, rms_norm_reference

IMPLEMENTATIONS = [rms_norm, rms_norm_reference]
SHAPES = [(0, 16), (1, 1), (1, 7), (5, 64), (3, 4, 33), (2, 0, 8), (17, 513)]


def exact_norm(x, gain, eps, scale_input=False):
    x = x.to(F64)
    if gain is not None and scale_input:
        x = x * gain.to(F64)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x * gain.to(F64) if gain is not None and not scale_input else x


@pytest.mark.parametrize("norm", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gain", [None, "after", "before"])
def test_equals_the_formula(norm, dtype, shape, gain):
    x = randn(*shape, dtype=dtype)
    weight = None if gain is None else 1 + 0.3 * randn(shape[-1], seed=1)
    weight = weight.to(F64) if weight is not None and dtype == F64 else weight
    actual = norm(x, weight, 1e-5, scale_input=gain == "before")
    assert actual.dtype == dtype
    assert_rounded_once(actual, exact_norm(x, weight, 1e-5, gain == "before"))


@pytest.mark.parametrize("norm", IMPLEMENTATIONS)
@pytest.mark.parametrize("eps", [1e-5, 1e-8])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_epsilon_matters_where_inputs_are_small(norm, eps, scale):
    x = randn(4, 64, scale=scale)
    assert_rounded_once(norm(x, None, eps), exact_norm(x, None, eps))


@pytest.mark.parametrize("norm", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale_input", [False, True])
def test_bfloat16_branch_into_the_float32_stream_is_not_rounded(norm, scale_input):
    x, gain = randn(6, 96, dtype=BF16), 1 + 0.3 * randn(96, seed=1)
    actual = norm(x, gain, 1e-8, scale_input=scale_input, out_dtype=F32)
    assert actual.dtype == F32
    assert_rounded_once(actual, exact_norm(x, gain, 1e-8, scale_input))


def test_weight_first_is_another_function_than_weight_last():
    x, gain = randn(3, 32), 1 + 0.3 * randn(32, seed=1)
    before = rms_norm(x, gain, 1e-8, scale_input=True)
    assert not torch.allclose(before, rms_norm(x, gain, 1e-8), rtol=1e-3)


@pytest.mark.parametrize("norm", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_non_contiguous_input_and_untouched_input(norm, dtype):
    whole = randn(40, 12, dtype=dtype)
    before = whole.clone()
    for x in (whole.t(), whole[::3, 1::2], whole.unflatten(0, (8, 5)).transpose(0, 1)):
        assert_rounded_once(norm(x, None, 1e-5), exact_norm(x, None, 1e-5))
    assert torch.equal(whole, before)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_row_does_not_depend_on_the_others(dtype):
    x, gain = randn(9, 77, dtype=dtype), randn(77, seed=1)
    whole = rms_norm(x, gain, 1e-5)
    assert all(torch.equal(rms_norm(x[i : i + 1], gain, 1e-5), whole[i : i + 1]) for i in range(9))
