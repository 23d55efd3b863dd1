import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.accuracy import seeded

from musespark.ops.nvfp4 import (
    E2M1_MAGNITUDES,
    E4M3_MAX,
    LARGEST,
    dequantize,
    e2m1_values,
    e4m3_values,
    global_scale,
    pack_codes,
    quantize,
    unpack_codes,
)

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def e4m3(code):
    """The value of an e4m3 code, by the format's definition."""
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1(code):
    """The value of an e2m1 code, by the format's definition."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_codes_decodes_exactly(dtype):
    packed = pack_codes(torch.arange(16, dtype=torch.uint8)).expand(256, 8)
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    expected = torch.tensor(
        [[e2m1(code) * e4m3(scale) for code in range(16)] for scale in range(256)],
        dtype=torch.float64,
    )
    decoded = dequantize(packed, scales, dtype)
    assert decoded.dtype == dtype
    assert torch.equal(decoded.double().nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))
    assert expected.isnan().sum() == 32
    assert ((expected != 0) & (expected.abs() < 2**-6)).sum() > 100  # subnormal scales among them


def test_tables_of_values():
    assert e2m1_values().tolist() == [e2m1(code) for code in range(16)]
    values = e4m3_values(torch.float64).nan_to_num(nan=7e7)
    assert values.tolist() == [7e7 if math.isnan(e4m3(code)) else e4m3(code) for code in range(256)]


def test_the_low_nibble_is_the_even_index():
    assert pack_codes(torch.tensor([1, 2, 3, 15], dtype=torch.uint8)).tolist() == [0x21, 0xF3]


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_unpacking_and_packing_are_inverse(values):
    packed = torch.tensor(values, dtype=torch.uint8)
    codes = unpack_codes(packed)
    assert int(codes.max()) < 16
    assert torch.equal(pack_codes(codes), packed)


def nearest_even(x):
    """The nearest e2m1 magnitude, ties to the even code, saturating; by search."""
    x = abs(x)
    return min(range(8), key=lambda code: (abs(E2M1_MAGNITUDES[code] - x), code % 2))


def test_codes_are_nearest_with_ties_to_even():
    points = sorted({step / 16 for step in range(8 * 16)} | {5.0, 5.0001, 4.9999, 1e-30, 7.5})
    for chunk in range(0, len(points), 14):
        part = points[chunk : chunk + 14]
        block = torch.zeros(16)
        block[: len(part)] = torch.tensor(part)
        block[15] = 6.0  # pins the scale at 1
        block = block.clamp(max=6.0)
        for sign in (1.0, -1.0):
            packed, scales = quantize(block * sign, 1.0)
            assert scales.float().item() == 1.0
            expected = [nearest_even(min(x, 6.0)) for x in part]
            assert (unpack_codes(packed)[: len(part)] & 7).tolist() == expected


def test_values_of_the_format_survive():
    codes = torch.randint(16, (64, 32), generator=seeded(), dtype=torch.uint8)
    codes[:, ::16] = 7  # each block's largest magnitude is 6
    scales = torch.randint(1, 127, (64, 2), generator=seeded(1), dtype=torch.uint8)
    value = dequantize(pack_codes(codes), scales.view(torch.float8_e4m3fn))
    packed, found = quantize(value * 0.25, 0.25)
    assert torch.equal(found.view(torch.uint8), scales)
    assert torch.equal(dequantize(packed, found), value)


def test_a_block_of_zeros_stays_zero():
    packed, scales = quantize(torch.zeros(2, 32), 1.0, "mse")
    assert torch.equal(dequantize(packed, scales), torch.zeros(2, 32))


def test_blocks_too_small_for_any_scale_become_zero():
    packed, scales = quantize(torch.full((16,), 1e-6), 1.0)
    assert scales.float().item() == 0
    assert packed.count_nonzero() == 0


def test_what_exceeds_the_format_saturates():
    packed, scales = quantize(torch.tensor([1e6] * 8 + [-1e6] * 8), 1.0)
    assert dequantize(packed, scales).tolist() == [LARGEST] * 8 + [-LARGEST] * 8


def test_global_scale_maps_the_largest_magnitude_to_the_formats():
    x = torch.tensor([[0.5, -3.0], [0.0, 0.0]])
    assert global_scale(x).item() == pytest.approx(3.0 / LARGEST)
    assert global_scale(x, dim=(-1,)).tolist() == [[pytest.approx(3.0 / LARGEST)], [1.0]]
    assert torch.isnan(global_scale(torch.tensor([1.0, math.nan])))


@pytest.mark.parametrize("heavy_tailed", [False, True])
def test_least_squared_error_beats_max_on_every_block(heavy_tailed):
    x = torch.randn(256, 64, generator=seeded())
    if heavy_tailed:
        x = x.sign() * x.abs() ** 2
    scale = global_scale(x)
    errors = {}
    for choice in ("max", "mse"):
        packed, scales = quantize(x, scale, choice)
        assert scales.float().max() <= E4M3_MAX
        moved = (dequantize(packed, scales) * scale - x).unflatten(-1, (-1, 16))
        errors[choice] = moved.square().sum(dim=-1)
    assert (errors["mse"] <= errors["max"] * 1.0001).all()
    assert errors["mse"].sum() < 0.85 * errors["max"].sum()


def test_least_squared_error_finds_the_best_of_all_scales():
    x = torch.randn(64, 16, generator=seeded())
    scale = global_scale(x)
    packed, scales = quantize(x, scale, "mse")
    error = (dequantize(packed, scales) * scale - x).square().sum(dim=-1)
    best = torch.full_like(error, torch.inf)
    for code in range(1, 127):
        candidate = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        scaled = (x / scale / candidate).abs().clamp(max=6)
        distance = (scaled[..., None] - torch.tensor(E2M1_MAGNITUDES)).abs()
        rounded = torch.tensor(E2M1_MAGNITUDES)[distance.argmin(dim=-1)]
        moved = (rounded * candidate * scale - x.abs()).square().sum(dim=-1)
        best = torch.minimum(best, moved)
    assert error.sum() < 1.01 * best.sum()


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_takes_any_dtype_and_scales_per_row(dtype):
    x = torch.randn(3, 48, generator=seeded()).to(dtype)
    scale = global_scale(x, dim=(-1,))
    packed, scales = quantize(x, scale)
    assert packed.shape == (3, 24)
    assert scales.shape == (3, 3)
    for row in range(3):
        one = quantize(x[row], scale[row])
        assert torch.equal(one[0], packed[row])
        assert torch.equal(one[1].view(torch.uint8), scales[row].view(torch.uint8))


def test_no_rows():
    packed, scales = quantize(torch.empty(0, 32), 1.0)
    assert dequantize(packed, scales).shape == (0, 32)
