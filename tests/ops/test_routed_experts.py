"""Experts of any width, on the GPU or in the interpreter, against float64."""

import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, randn
from tests.ops.test_bf16_grouped_gemm_hopper import random_experts as random_plain_experts
from tests.ops.test_nvfp4_hopper import DEVICE, needs_kernels, random_ids, relative_error
from tests.ops.test_nvfp4_hopper import random_experts as random_nvfp4_experts

from musespark.ops.nvfp4 import dequantize, pack_codes
from musespark.ops.routed_experts import RoutedExperts, _load_weights
from musespark.ops.triton_import import tl, triton

pytestmark = needs_kernels
TOLERANCE = {BF16: 2.5e-3, F32: 1e-6}
SHAPES = [
    # tokens, width, inner, first expert, experts here
    (1, 16, 16, 0, 7),
    (4, 48, 112, 3, 2),
    (60, 128, 96, 0, 7),
    (5, 80, 32, 6, 1),
]


def expected_rows(x, ids, weights, factors, first_expert):
    """The formula in float64, with the one rounding in the middle; NaN where no expert is here."""
    gate_up, down = weights
    rows = torch.full((ids.numel(), x.shape[1]), torch.nan, dtype=F64)
    for expert in range(len(down)):
        routes = (ids.flatten() == expert + first_expert).nonzero().squeeze(1)
        gate, up = (x[routes // ids.shape[1]].to(F64) @ gate_up[expert].T).chunk(2, dim=1)
        gate, up = gate * factors[0][expert, 0], up * factors[0][expert, 1]
        hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype).to(F64)
        rows[routes] = hidden @ down[expert].T * factors[1][expert]
    return rows


def check(experts, x, ids, first, expected):
    rows, index = experts(x.to(DEVICE), ids.to(DEVICE), first_expert=first)
    is_here = ~expected[:, 0].isnan()
    assert rows.dtype == x.dtype
    own = torch.arange(ids.numel()).masked_fill(~is_here, -1)
    assert torch.equal(index.cpu().flatten(), own)
    assert relative_error(rows.cpu()[is_here], expected[is_here]) < TOLERANCE[x.dtype]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("tokens", "width", "inner", "first", "here"), SHAPES)
def test_plain_experts(tokens, width, inner, first, here, dtype):
    x, ids = randn(tokens, width, dtype=dtype, seed=5), random_ids(tokens)
    weights = [w.to(dtype) for w in random_plain_experts(here, width, inner)]
    ones = torch.ones(here, 2), torch.ones(here)
    expected = expected_rows(x, ids, [w.to(F64) for w in weights], ones, first)
    check(RoutedExperts(*(w.to(DEVICE) for w in weights)), x, ids, first, expected)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("tokens", "width", "inner", "first", "here"), SHAPES)
def test_nvfp4_experts(tokens, width, inner, first, here, dtype):
    x, ids = randn(tokens, width, dtype=dtype, seed=5), random_ids(tokens)
    weights = random_nvfp4_experts(here, width, inner)
    gate_up, gate_up_scales, gate_up_global, down, down_scales, down_global = weights
    expected = expected_rows(
        x, ids, (dequantize(gate_up, gate_up_scales, F64), dequantize(down, down_scales, F64)),
        (gate_up_global.to(F64), down_global.to(F64)), first,
    )  # fmt: skip
    experts = RoutedExperts(
        gate_up.to(DEVICE), down.to(DEVICE),
        (gate_up_scales.to(DEVICE), down_scales.to(DEVICE)),
        (gate_up_global.to(DEVICE), down_global.to(DEVICE)),
    )  # fmt: skip
    check(experts, x, ids, first, expected)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(codes, scales, out, ROWS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 16)[None, :]
    weights = _load_weights(codes, scales, row, column, row >= 0, 16, tl.float32, True)
    tl.store(out + row * 16 + column, weights)


def test_every_pair_of_codes_is_exact():
    """All 256 scales with all 16 codes."""
    codes = pack_codes(torch.arange(16, dtype=torch.uint8).repeat(256, 1))
    scales = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    out = torch.empty(256, 16, device=DEVICE)
    _decode[(1,)](codes.to(DEVICE), scales.to(DEVICE), out, 256)
    expected = dequantize(codes, scales)
    assert bool(((out.cpu() == expected) | expected.isnan()).all())


def test_no_tokens():
    experts = RoutedExperts(*(w.to(DEVICE) for w in random_plain_experts(2, 32, 16)))
    x = torch.empty((0, 32), dtype=BF16, device=DEVICE)
    rows, index = experts(x, torch.empty((0, 2), dtype=torch.int64, device=DEVICE))
    assert rows.shape == (0, 32)
    assert index.shape == (0, 2)
