import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, randn

from musespark.modules.linear import (
    ColumnBlock,
    FusedLinear,
    Linear,
    ReplicatedLinear,
    RowParallelLinear,
)
from musespark.ops.linear import bfloat16_is_fast
from musespark.parallel.mesh import ALONE, MeshAxis
from musespark.parallel.shard import Share

CPU = torch.device("cpu")
PARTS = {"q_proj": 24, "k_proj": 8, "v_proj": 8, "gate_proj": 24}


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_parts_lie_one_below_the_other(dtype):
    fused = FusedLinear(16, PARTS, dtype=dtype, device=CPU)
    weights = {name: randn(rows, 16, seed=rows) for name, rows in PARTS.items()}
    slots = list(fused.part_slots("layers.0.self_attn."))
    assert [slot.name for slot in slots] == [f"layers.0.self_attn.{n}.weight" for n in PARTS]
    for slot, (name, rows) in zip(slots, PARTS.items(), strict=True):
        assert slot.shape == (rows, 16)
        slot.store(weights[name])
    x = randn(5, 16, dtype=dtype)
    parts = fused(x).split(list(PARTS.values()), dim=-1)
    for part, weight in zip(parts, weights.values(), strict=True):
        expected = x.to(F64) @ weight.to(dtype).to(F64).t()
        assert torch.allclose(part.to(F64), expected, rtol=2.0**-7 if dtype == BF16 else 1e-4)


def test_packing_gives_the_weight_up_and_keeps_the_result():
    if not bfloat16_is_fast():
        pytest.skip("no packed layout on this machine")
    layer = Linear(32, 24, dtype=BF16, device=CPU)
    assert layer.weight is not None
    layer.weight.copy_(randn(24, 32))
    x = randn(7, 32, dtype=BF16)
    before = layer(x)
    layer.pack()
    assert not list(layer.parameters())
    layer.pack()
    assert torch.allclose(layer(x), before, rtol=2.0**-7)


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_wide_output_is_not_rounded_to_the_compute_dtype(dtype):
    layer = Linear(64, 24, dtype=dtype, device=CPU, wide_output=True)
    assert layer.weight is not None
    layer.weight.copy_(randn(24, 64))
    x = randn(7, 64, dtype=dtype)
    weight = layer.weight.to(F64)
    exact, size = x.to(F64) @ weight.t(), x.to(F64).abs() @ weight.abs().t()
    for _ in range(2):
        out = layer(x)
        assert out.dtype == (F64 if dtype == F64 else F32)
        assert ((out - exact).abs() <= 5e-6 * size).all()
        layer.pack()


RANKS = [MeshAxis(rank, 4) for rank in range(4)]


def fill(slots, weights):
    """Give every slot its part of the weights on disk."""
    for slot in slots:
        assert slot.shape == tuple(weights[slot.name].shape)
        slot.store(weights[slot.name][slot.index])


def test_shares_of_fused_parts_side_by_side_are_the_whole():
    weights = {f"{name}.weight": randn(rows, 16, seed=rows) for name, rows in PARTS.items()}
    x = randn(5, 16)
    found = []
    for axis in RANKS:
        shares = {name: Share.of(rows, axis) for name, rows in PARTS.items()}
        fused = FusedLinear(16, shares, dtype=F32, device=CPU)
        fill(fused.part_slots(""), weights)
        found.append(fused(x).split([share.size for share in shares.values()], dim=-1))
    for parts, weight in zip(zip(*found, strict=True), weights.values(), strict=True):
        assert torch.allclose(torch.cat(parts, dim=-1), x @ weight.t(), atol=1e-5)


def test_partial_sums_of_row_shares_add_up():
    weights = {"o.weight": randn(6, 16, seed=1)}
    x = randn(5, 16)
    total = torch.zeros(5, 6)
    for axis in RANKS:
        share = Share.of(16, axis)
        layer = RowParallelLinear(share, 6, dtype=F32, device=CPU)
        fill(layer.weight_slots("o.", weights.__contains__), weights)
        total += layer(x[:, share.index])
    assert torch.allclose(total, x @ weights["o.weight"].t(), atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 256, 257])
def test_few_tokens_are_multiplied_by_a_block_of_columns(tokens, packed):
    weight, x = randn(24, 16, seed=1), randn(tokens, 16)
    blocks = []
    for axis in RANKS:
        layer = ReplicatedLinear(16, 24, axis=axis, min_tokens=32, dtype=F32, device=CPU)
        assert layer.weight is not None
        layer.weight.copy_(weight)
        if packed:
            layer.pack()
        assert torch.allclose(layer(x), x @ weight.t(), atol=1e-5)
        out = layer.columns(x)
        assert isinstance(out, ColumnBlock) == (32 <= tokens <= 256)
        blocks.append(
            out.values if isinstance(out, ColumnBlock) else out.chunk(4, dim=1)[axis.rank]
        )
    assert torch.allclose(torch.cat(blocks, dim=1), x @ weight.t(), atol=1e-5)


@pytest.mark.parametrize("axis", [ALONE, MeshAxis(1, 5)])
def test_columns_stay_whole_where_they_cannot_be_shared(axis):
    """One rank, or ranks that cannot have equal blocks."""
    layer = ReplicatedLinear(16, 24, axis=axis, dtype=F32, device=CPU)
    assert layer.weight is not None
    layer.weight.copy_(randn(24, 16))
    x = randn(3, 16)
    assert isinstance(layer.columns(x), torch.Tensor)
