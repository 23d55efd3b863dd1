import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_within, randn

from musespark.ops.grouped_gemm import (
    can_pack_grouped,
    grouped_gemm,
    occupied_groups,
    pack_grouped_gemm,
)
from musespark.ops.linear import can_pack, linear, pack_linear

# One unit in the last place, and float32 accumulation of a few hundred products.
_ROUNDING = {BF16: 2.0**-8, F32: 0.0, F64: 0.0}
_ACCUMULATION = {BF16: 1e-6, F32: 1e-6, F64: 1e-14}

GROUPS = [
    [0, 0, 0],
    [1, 1, 1],
    [0, 0, 1],
    [3, 3, 10],
    [0, 7, 7],
    [2, 5, 9],
]
IN, OUT = 70, 36


def exact_product(x, weight):
    x, weight = x.to(F64), weight.to(F64)
    return x @ weight.t(), x.abs() @ weight.abs().t()


def assert_product(actual, x, weight):
    exact, magnitude = exact_product(x, weight)
    dtype = actual.dtype
    assert_within(actual, exact, _ROUNDING[dtype] * exact.abs() + _ACCUMULATION[dtype] * magnitude)


def implementations(dtype):
    packs = dtype == BF16 and can_pack_grouped(torch.empty(1, 1, 1, dtype=BF16))
    return [grouped_gemm, *([pack_grouped_gemm] if packs else [])]


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("ends", GROUPS)
def test_each_group_meets_its_own_expert(dtype, ends):
    weight = randn(len(ends), OUT, IN, dtype=dtype, seed=1)
    x = randn(ends[-1], IN, dtype=dtype)
    for implementation in implementations(dtype):
        actual = implementation(weight)(x, ends)
        assert actual.shape == (ends[-1], OUT)
        assert actual.dtype == dtype
        start = 0
        for expert, end in enumerate(ends):
            assert_product(actual[start:end], x[start:end], weight[expert])
            start = end


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_non_contiguous_rows_and_weights(dtype):
    weight = randn(3, IN, OUT, dtype=dtype, seed=1).transpose(1, 2)
    x = randn(IN, 9, dtype=dtype).t()
    for implementation in implementations(dtype):
        actual = implementation(weight)(x, [4, 4, 9])
        assert_product(actual[:4], x[:4], weight[0])
        assert_product(actual[4:], x[4:], weight[2])


def test_a_nan_stays_within_its_row():
    x = randn(5, IN, dtype=BF16)
    x[3] = float("nan")
    for implementation in implementations(BF16):
        actual = implementation(randn(2, OUT, IN, dtype=BF16))(x, [2, 5])
        assert actual.isnan().any(dim=1).tolist() == [False, False, False, True, False]


def test_occupied_groups():
    assert occupied_groups([0, 2, 2, 5]) == [(1, slice(0, 2)), (3, slice(2, 5))]


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("shape", [(0, IN), (1, IN), (17, IN), (3, 2, IN)])
def test_linear(dtype, shape):
    weight, x = randn(OUT, IN, dtype=dtype, seed=1), randn(*shape, dtype=dtype)
    actual = linear(weight)(x)
    assert actual.dtype == dtype
    assert_product(actual, x, weight)
    if can_pack(weight):
        assert_product(pack_linear(weight)(x), x, weight)


def test_only_what_this_machine_multiplies_faster_is_packed():
    assert not can_pack(torch.empty(2, 2, dtype=torch.float64))
    assert not can_pack(torch.empty(2, 2, dtype=F64))
    assert not can_pack(torch.empty(2, 2, dtype=BF16, device="meta"))


def test_a_packed_copy_does_not_follow_the_weight():
    weight, x = randn(OUT, IN, dtype=BF16, seed=1), randn(2, IN, dtype=BF16)
    if not can_pack(weight):
        pytest.skip("no packed layout on this machine")
    packed = pack_linear(weight)
    before = packed(x)
    weight.zero_()
    assert torch.equal(packed(x), before)
