"""Kernels that work on heads: QK-norm with RoPE and cache insert, and the output gate."""

import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_rounded_once, randn, ulp_distance
from tests.ops.kernels.device import DEVICE, ON_GPU, needs_kernels, on_gpu
from tests.ops.test_qk_norm_rope import exact_rotation
from tests.ops.test_rms_norm import exact_norm

from musespark.ops.output_gate import output_gate_triton
from musespark.ops.qk_norm_rope import qk_norm_rope_write, qk_norm_rope_write_triton
from musespark.ops.rms_norm import rms_norm
from musespark.ops.rotary import rotary_angles

pytestmark = needs_kernels

FP8 = torch.float8_e4m3fn
# (tokens, query heads, key heads, head_dim)
SHAPES = [(6, 0, 2, 32), (0, 2, 1, 16), (1, 1, 1, 2), (3, 4, 2, 16), (2, 18, 17, 32), (2, 8, 1, 64)]
LARGE = on_gpu((1, 128, 16, 64), (77, 128, 16, 64), (33, 24, 3, 128), (5, 7, 7, 32))
BLOCK_SIZE = 4


def run(qkv, heads, angles, cache_dtype, slots, op=qk_norm_rope_write_triton, device=DEVICE):
    """(queries, key cache, value cache); what was not written in the caches stays 7."""
    kv_heads, head_dim = (qkv.shape[1] - heads) // 2, qkv.shape[2]
    blocks = len(slots) // BLOCK_SIZE + 2
    shape = (blocks, BLOCK_SIZE, kv_heads, head_dim)
    caches = [torch.full(shape, 7.0).to(cache_dtype).to(device) for _ in range(2)]
    moved = None if angles is None else tuple(x.to(device) for x in angles)
    query = op(qkv.to(device), heads, 1e-5, moved, *caches, slots.to(device))
    return [x.cpu() for x in (query, *caches)]


def inputs(tokens, heads, kv_heads, head_dim, dtype):
    qkv = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, seed=1, scale=2.0)
    positions = torch.arange(tokens) * 977
    slots = torch.randperm(tokens + 3, generator=torch.Generator().manual_seed(2))[:tokens]
    return qkv, rotary_angles(positions, 500_000.0, head_dim), slots


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "head_dim"), SHAPES + LARGE)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("rotates", [False, True])
def test_norm_rotation_and_insert(tokens, heads, kv_heads, head_dim, dtype, rotates):
    qkv, angles, slots = inputs(tokens, heads, kv_heads, head_dim, dtype)
    query, keys, values = run(qkv, heads, angles if rotates else None, dtype, slots)
    found = torch.cat((query, keys.flatten(0, 1)[slots]), dim=1)
    qk, value = qkv.split((heads + kv_heads, kv_heads), dim=1)
    if rotates:
        normed = rms_norm(qk, None, 1e-5)
        exact, size = exact_rotation(normed, *angles)
        # The kernel's own norm may round the other way now and then.
        far = ulp_distance(found, exact.to(BF16)) if dtype == BF16 else None
        if far is None:
            assert_rounded_once(found, exact, 2 * size)
        elif found.numel():
            error = (found.to(F64) - exact).abs()
            assert bool(((far <= 1) | (error <= 2.0**-7 * size)).all())
            assert int((far > 0).sum()) <= max(2, 0.02 * found.numel())
    else:
        assert_rounded_once(found, exact_norm(qk, None, 1e-5))
    assert torch.equal(values.flatten(0, 1)[slots], value)
    untouched = torch.ones(keys.shape[0] * BLOCK_SIZE, dtype=torch.bool)
    untouched[slots] = False
    assert bool((keys.flatten(0, 1)[untouched] == 7).all())
    assert bool((values.flatten(0, 1)[untouched] == 7).all())


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_eight_bit_cache(dtype):
    qkv, angles, slots = inputs(3, 4, 2, 16, dtype)
    qkv[0, 6] = 1e4  # a value beyond the range
    _, keys, values = run(qkv, 4, angles, FP8, slots)
    _, exact_keys, exact_values = run(
        qkv, 4, angles, FP8, slots, op=qk_norm_rope_write, device=torch.device("cpu")
    )
    for found, exact in ((keys, exact_keys), (values, exact_values)):
        assert bool(found.to(F32).isfinite().all())
        steps = (found.view(torch.uint8).int() - exact.view(torch.uint8).int()).abs()
        if ON_GPU:  # the interpreter rounds to 8 bits wrongly
            assert int(steps.max()) <= 1
            assert int((steps > 0).sum()) <= 0.02 * steps.numel()
    assert float(values.to(F32).max()) == 448.0


def test_padding_writes_nothing():
    qkv, angles, slots = inputs(5, 4, 2, 16, BF16)
    whole = run(qkv, 4, angles, BF16, slots)
    marked = slots.clone()
    marked[[1, 4]] = -1
    _, keys, _ = run(qkv, 4, angles, BF16, marked)
    expected = whole[1].flatten(0, 1).clone()
    expected[slots[[1, 4]]] = 7
    assert torch.equal(keys.flatten(0, 1), expected)
    # Tokens behind the slot mapping are padding too.
    _, keys, _ = run(qkv, 4, angles, BF16, slots[:3])
    expected = whole[1].flatten(0, 1).clone()
    expected[slots[3:]] = 7
    rows = keys.flatten(0, 1)
    assert torch.equal(rows, expected[: len(rows)])


def test_reads_a_part_of_the_fused_projection():
    qkv, angles, slots = inputs(3, 4, 2, 16, BF16)
    fused = torch.cat((qkv, torch.full((3, 4, 16), torch.nan, dtype=BF16)), dim=1)
    for one, other in zip(
        run(qkv, 4, angles, BF16, slots), run(fused[:, :8], 4, angles, BF16, slots), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"),
    [
        (0, 2, 16),
        (1, 1, 2),
        (3, 5, 16),
        (2, 33, 32),
        (1, 4, 128),
        *on_gpu((1, 128, 64), (300, 128, 64)),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_output_gate(tokens, heads, head_dim, dtype):
    attended = randn(tokens, heads, head_dim, dtype=dtype, seed=1)
    fused = randn(tokens, heads + 3, head_dim, dtype=dtype, seed=2, scale=3.0)
    gate = fused[:, 3:]
    exact = exact_norm(attended, None, 1e-5) / (1 + torch.exp(-gate.to(F64)))
    actual = output_gate_triton(attended.to(DEVICE), fused.to(DEVICE)[:, 3:], 1e-5)
    assert_rounded_once(actual.cpu(), exact)
