"""Packed and float32-output products against float64."""

import pytest
import torch

from musespark.ops.linear import (
    bfloat16_is_fast,
    can_pack,
    linear,
    pack_linear,
    pack_wide_linear,
    wide_linear,
)

DTYPES = [torch.float32, torch.bfloat16]


def operands(tokens, dtype):
    generator = torch.Generator().manual_seed(tokens)
    weight = (torch.randn(72, 48, generator=generator) / 48**0.5).to(dtype)
    return torch.randn(tokens, 48, generator=generator).to(dtype), weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 64])
def test_packing_does_not_change_the_product(tokens, dtype):
    x, weight = operands(tokens, dtype)
    if not can_pack(weight):
        pytest.skip("this CPU has no packed layout for the dtype")
    exact = x.double() @ weight.double().T
    packed, plain = pack_linear(weight)(x), linear(weight)(x)
    assert packed.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    for result in (packed, plain):
        assert (result.double() - exact).abs().le(tolerance * (exact.abs() + 1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_row_does_not_depend_on_the_others(dtype):
    x, weight = operands(33, dtype)
    if not can_pack(weight):
        pytest.skip("this CPU has no packed layout for the dtype")
    matmul = pack_linear(weight)
    together = matmul(x)
    for count in (1, 2, 5, 32):
        assert torch.equal(matmul(x[:count]), together[:count])


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_wide_output_carries_far_more_than_bfloat16(tokens):
    x, weight = operands(tokens, torch.bfloat16)
    exact = x.double() @ weight.double().T
    ways = [wide_linear(weight)]
    if bfloat16_is_fast():
        ways.append(pack_wide_linear(weight))
    for matmul in ways:
        result = matmul(x)
        assert result.dtype == torch.float32
        # Rounding once to bfloat16 would err by up to 2^-9 of the value.
        assert (result.double() - exact).abs().le(2**-15 * exact.abs() + 2e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_output_of_a_wide_model_is_the_plain_product(dtype):
    x, weight = operands(5, dtype)
    assert torch.equal(wide_linear(weight)(x), linear(weight)(x))
