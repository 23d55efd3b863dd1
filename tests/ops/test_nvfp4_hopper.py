"""NVFP4 experts for Hopper: the layout, the routing lists, and the kernel in the interpreter."""

import pytest
import torch
from tests.ops.accuracy import BF16, F64, randn, seeded

from musespark.ops.nvfp4 import dequantize, pack_codes
from musespark.ops.nvfp4_hopper import HopperNVFP4Experts, Tiling, permuted_columns
from musespark.ops.nvfp4_hopper.kernel import permuted_position
from musespark.ops.nvfp4_hopper.layout import (
    K_BLOCK,
    MERGE_MASK,
    MERGE_ROTATION,
    PAIR_MASK,
    PAIR_SOURCES,
    WIDE_SCALE_BIAS,
    bit_places,
    gate_up_rows,
    pack_expert,
    pack_in_place,
)
from musespark.ops.nvfp4_hopper.work_list import build_work_list, max_tiles
from musespark.ops.triton_import import HAS_TRITON, IS_INTERPRETED, tl, triton

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
needs_kernels = pytest.mark.skipif(
    not HAS_TRITON or not (ON_GPU or IS_INTERPRETED),
    reason="kernels need Triton, and a GPU or Triton's interpreter (TRITON_INTERPRET=1)",
)

# Seven experts of which some get no row; two scales ten times apart.
EXPERTS, TOP_K = 7, 3
# One rounding to bfloat16 costs 1.7e-3 on average; the interpreter truncates, twice.
TOLERANCE = 1.2e-2 if IS_INTERPRETED else 2.5e-3
TILINGS = {
    "narrow": Tiling(4, 1, (16,), (0,), stages=3, unroll=2),
    "two groups": Tiling(4, 2, (16,), (0,), stages=3, unroll=2),
    "classes": Tiling(4, 2, (16, 32, 32), (0, 0, 16), stages=3, unroll=1),
    "eight warps": Tiling(8, 2, (32, 64), (0, 16), stages=3, unroll=1),
}


def test_every_bit_of_a_word_has_one_place():
    assert len(set(bit_places().values())) == 64


def test_columns_of_a_group_come_in_pairs():
    columns = permuted_columns(2 * K_BLOCK)
    assert torch.equal(columns.sort().values, torch.arange(2 * K_BLOCK))
    assert columns[:6].tolist() == [0, 1, 16, 17, 32, 33]
    assert columns[K_BLOCK + 16].item() == K_BLOCK + 2


def test_gate_and_up_alternate():
    rows = gate_up_rows(128)
    assert torch.equal(rows.sort().values, torch.arange(256))
    assert torch.equal(rows[8:16], rows[:8] + 128)
    # The output of the first product lies as the second one's permuted input.
    gates = rows.view(-1, 2, 8)[:, 0].flatten()
    assert torch.equal(gates, permuted_columns(128))


def decode(words, scale_words):
    """What a lane computes, in plain torch: [N / 64, K / 128, ...] words -> float64 [N, K]."""
    tiles = words.to(torch.int64) & 0xFFFFFFFF
    a, b = tiles.view(*words.shape[:2], 2, 4, 8, 4, 2, 2).unbind(-1)  # half, warp, row, g, row half

    def rotate(x, bits):
        return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

    merged = (a & MERGE_MASK) | (rotate(b, MERGE_ROTATION) & ~MERGE_MASK)
    sources = {"a": a, "b": b, "m": merged}
    pairs = [rotate(sources[name], bits) & PAIR_MASK for name, bits in PAIR_SOURCES]
    halves = torch.stack([torch.stack([p & 0xFFFF, p >> 16], -1) for p in pairs], -2)
    values = as_bfloat16(halves)  # column half, warp, row, g, row half, j, e
    codes = scale_words.view(*words.shape[:2], 4, 8, 4, 1).view(torch.uint8)
    codes = codes.view(*words.shape[:2], 4, 8, 4, 2, 2).permute(0, 1, 6, 2, 3, 4, 5)
    scales = as_bfloat16(codes.to(torch.int64) * 16 + WIDE_SCALE_BIAS * 128)
    values = values * scales[..., None, None] * 2.0**7
    # -> tile row, warp, row half, row, tile column, column half, g, j, e
    values = values.permute(0, 3, 6, 4, 1, 2, 5, 7, 8)
    return values.reshape(words.shape[0] * 64, words.shape[1] * 128)


def as_bfloat16(bits):
    return bits.to(torch.int32).to(torch.int16).view(BF16).to(F64)


def test_every_pair_of_codes_decodes_exactly():
    """All 256 scales, along the rows, with all 16 codes."""
    packed = pack_codes(torch.arange(16, dtype=torch.uint8).repeat(256, 8))
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    expected = dequantize(packed, scales.view(torch.float8_e4m3fn), F64)
    found = decode(*pack_expert(torch.arange(16, dtype=torch.uint8).repeat(256, 8), scales))
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found[~is_nan].abs(), expected[~is_nan].abs())
    assert torch.equal(found[~is_nan], expected[~is_nan])


def test_packing_keeps_every_weight_and_needs_no_memory():
    packed = torch.randint(256, (2, 128, 128), generator=seeded(), dtype=torch.uint8)
    scales = torch.randint(127, (2, 128, 16), generator=seeded(1), dtype=torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    expected = dequantize(packed, scales, F64)
    rows = torch.randperm(128, generator=seeded(2))
    places = packed.data_ptr(), scales.data_ptr()
    pack_in_place(packed, scales, rows)
    assert places == (packed.data_ptr(), scales.data_ptr())
    words = packed.view(torch.int32).view(2, 2, 2, 1024)
    scale_words = scales.view(torch.uint8).view(torch.int32).view(2, 2, 2, 128)
    for expert in range(2):
        assert torch.equal(decode(words[expert], scale_words[expert]), expected[expert][rows])


@pytest.mark.parametrize(("rows", "columns"), [(192, 128), (128, 192)])
def test_shapes_that_do_not_fit_are_refused(rows, columns):
    packed = torch.zeros((1, rows, columns // 2), dtype=torch.uint8)
    scales = torch.zeros((1, rows, columns // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"multiples of 128: found 192"):
        pack_in_place(packed, scales)


def random_ids(tokens, num_experts=EXPERTS, top_k=TOP_K, seed=0):
    """Distinct experts a token; some routes have none; expert 2 never has any."""
    scores = torch.rand(tokens, num_experts, generator=seeded(seed))
    scores[:, 2] = -1.0
    ids = scores.argsort(dim=1, descending=True)[:, :top_k]
    return ids.masked_fill(torch.rand(tokens, top_k, generator=seeded(seed + 1)) < 0.15, -1)


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 5, 85, 200])
@pytest.mark.parametrize(("first", "here"), [(0, EXPERTS), (3, 2)])
def test_work_list(tokens, first, here):
    ids = random_ids(tokens)
    capacity = 16
    x = randn(tokens, 256, dtype=BF16)
    permuted = torch.full_like(x, torch.nan, device=DEVICE)
    work = build_work_list(
        ids.to(DEVICE), here, capacity, first_expert=first, permute=x.to(DEVICE), permuted=permuted
    )
    assert torch.equal(permuted.cpu(), x[:, permuted_columns(256)])
    flat = ids.flatten() - first
    flat[(flat < 0) | (flat >= here) | (ids.flatten() < 0)] = here
    expected = torch.argsort(flat, stable=True)[: int((flat < here).sum())]
    assert torch.equal(work.order.cpu()[: len(expected)].long(), expected)
    own = torch.arange(ids.numel()).masked_fill(flat == here, -1).view_as(ids)
    assert torch.equal(work.route_index.cpu(), own)
    tiles: list[list[int]] = []
    start = 0
    for expert in range(here):
        count = int((flat == expert).sum())
        num, first_tile = -(-count // capacity), len(tiles)
        tiles += [
            [expert, start + i * capacity, min(start + (i + 1) * capacity, start + count),
             first_tile, num, 0]
            for i in range(num)
        ]  # fmt: skip
        start += count
    assert work.num_tiles[0].item() == len(tiles) <= max_tiles(ids.numel(), here, capacity)
    assert work.tiles.cpu()[: len(tiles), :6].tolist() == tiles


def random_experts(num_experts, width, inner, seed=0):
    """Checkpoint tensors, with zero and subnormal block scales, and gate and up 10x apart."""

    def weight(rows, columns, seed):
        codes = torch.randint(
            256, (num_experts, rows, columns // 2), generator=seeded(seed), dtype=torch.uint8
        )
        scales = torch.randint(
            0, 60, (num_experts, rows, columns // 16), generator=seeded(seed + 1), dtype=torch.uint8
        )
        scales[:, ::3, ::2] = 7  # subnormal
        scales[:, 1::5] = 0
        return codes, scales.view(torch.float8_e4m3fn)

    gate_up, gate_up_scales = weight(2 * inner, width, seed)
    down, down_scales = weight(width, inner, seed + 2)
    noise = torch.rand(num_experts, generator=seeded(seed + 4)) + 0.5
    gate_up_global = noise[:, None] * torch.tensor([0.5, 0.05])
    return gate_up, gate_up_scales, gate_up_global, down, down_scales, noise.flip(0) * 0.1


def expected_rows(x, ids, weights, first_expert=0):
    """The formula in float64, with the one rounding in the middle; NaN where no expert is here."""
    gate_up, gate_up_scales, gate_up_global, down, down_scales, down_global = weights
    rows = torch.full((ids.numel(), x.shape[1]), torch.nan, dtype=F64)
    for expert in range(len(down)):
        routes = (ids.flatten() == expert + first_expert).nonzero().squeeze(1)
        w = dequantize(gate_up[expert], gate_up_scales[expert], F64)
        gate, up = (x[routes // ids.shape[1]].double() @ w.T).chunk(2, dim=1)
        gate, up = gate * gate_up_global[expert, 0], up * gate_up_global[expert, 1]
        hidden = (torch.nn.functional.silu(gate) * up).to(BF16).double()
        w = dequantize(down[expert], down_scales[expert], F64)
        rows[routes] = hidden @ w.T * down_global[expert]
    return rows


def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@needs_kernels
@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize(
    ("tokens", "width", "inner", "first", "here"),
    [(1, 128, 128, 0, EXPERTS), (4, 256, 128, 3, 2), (50, 128, 256, 4, 1)],
)
def test_experts(name, tokens, width, inner, first, here):
    x = randn(tokens, width, dtype=BF16, seed=5)
    ids = random_ids(tokens)
    weights = random_experts(here, width, inner)
    expected = expected_rows(x, ids, weights, first)
    experts = HopperNVFP4Experts(*(w.to(DEVICE) for w in weights))
    rows, index = experts(x.to(DEVICE), ids.to(DEVICE), first_expert=first, tiling=TILINGS[name])
    is_here = ~expected[:, 0].isnan()
    assert torch.equal(index.flatten().cpu() >= 0, is_here)
    assert rows.dtype == BF16
    assert relative_error(rows.cpu()[is_here], expected[is_here]) < TOLERANCE


@triton.jit  # type: ignore[untyped-decorator]
def _write_permuted(out, SIZE: tl.constexpr):
    column = tl.arange(0, SIZE)
    tl.store(out + permuted_position(column), column)


@needs_kernels
def test_a_kernel_can_write_the_permuted_input_itself():
    out = torch.zeros(2 * K_BLOCK, dtype=torch.int32, device=DEVICE)
    _write_permuted[(1,)](out, 2 * K_BLOCK)
    assert torch.equal(out.cpu().long(), permuted_columns(2 * K_BLOCK))
    experts = HopperNVFP4Experts(*(w.to(DEVICE) for w in random_experts(EXPERTS, 256, 128)))
    x, ids = randn(4, 256, dtype=BF16, seed=5), random_ids(4)
    is_here = ids.flatten() >= 0
    plain, _ = experts(x.to(DEVICE), ids.to(DEVICE))
    x = x[:, permuted_columns(256)]
    rows, _ = experts(x.to(DEVICE), ids.to(DEVICE), is_permuted=True)
    assert torch.equal(rows[is_here], plain[is_here])


@needs_kernels
def test_no_tokens():
    experts = HopperNVFP4Experts(*(w.to(DEVICE) for w in random_experts(2, 128, 128)))
    x = torch.empty((0, 128), dtype=BF16, device=DEVICE)
    ids = torch.empty((0, 2), dtype=torch.int64, device=DEVICE)
    rows, index = experts(x, ids)
    assert rows.shape == (0, 128)
    assert index.shape == (0, 2)
