import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, randn

from musespark.modules.linear import FusedLinear, Linear
from musespark.ops.linear import bfloat16_is_fast

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
