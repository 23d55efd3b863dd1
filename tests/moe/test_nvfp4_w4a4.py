"""W4A4 against an emulation of its own in float64, written from the format's definition."""

import pytest
import torch
from tests.moe.nvfp4_layers import (
    PREFIX,
    exact_rows,
    inputs,
    load,
    make_layer,
    relative_error,
    routed_rows,
)

from musespark.moe.experts.nvfp4 import NVFP4Experts
from musespark.moe.experts.nvfp4_w4a4 import NVFP4W4A4Experts
from musespark.ops.nvfp4 import E2M1_MAGNITUDES

GRID = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)


def fp4(x, scale):
    """Quantize and dequantize [N] in blocks of 16 with a global scale, float64."""
    blocks = (x / scale).view(-1, 16)
    peak = blocks.abs().amax(dim=1, keepdim=True) / 6
    block_scale = peak.clamp(max=448).float().to(torch.float8_e4m3fn).double()
    magnitude = (blocks / block_scale).abs().clamp(max=6)
    distance = (magnitude[..., None] - GRID).abs()
    return (GRID[distance.argmin(dim=-1)] * blocks.sign() * block_scale * scale).view(-1)


def emulated_rows(layer, h, routing, a13, a2):
    """a13 and a2: the static scales, or None for one per token."""
    gate_up, down = layer.weights()
    rows = torch.full((*routing.ids.shape, h.shape[1]), torch.nan, dtype=torch.float64)
    for token, experts in enumerate(routing.ids.tolist()):
        x = h[token].double()
        x = fp4(x, a13 or float(x.abs().max()) / 2688)
        for slot, expert in enumerate(experts):
            gate, up = (gate_up[expert] @ x).chunk(2)
            inner = gate * gate.sigmoid() * up
            inner = fp4(inner, a2 or float(inner.abs().max()) / 2688)
            rows[token, slot] = down[expert] @ inner
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1.3e-3, 2e-3)])
def test_rows_equal_the_emulation(dtype, pack, scales):
    layer = make_layer(input_scales=scales)
    h, routing = inputs(layer, 30, dtype=dtype)
    static = [None if scale == 1.0 else scale for scale in scales]
    output = load(layer, NVFP4W4A4Experts, dtype=dtype, pack=pack)(h, routing)
    assert output.rows.dtype == dtype
    exact = emulated_rows(layer, h, routing, *static)
    # A float32 sum next to a rounding boundary may take the other code: few do.
    rows = routed_rows(output)
    off = (rows - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float((off < 6e-3).double().mean()) > 0.8
    assert relative_error(rows, exact) < 0.05


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1.3e-3, 2e-3)])
def test_quantized_inputs_may_be_handed_in(tokens, scales):
    layer = make_layer(input_scales=scales)
    h, routing = inputs(layer, tokens)
    experts = load(layer, NVFP4W4A4Experts)
    prepared = experts.prepare(h)
    assert prepared.packed.dtype == torch.uint8
    assert torch.equal(experts(prepared, routing).rows, experts(h, routing).rows)


def test_the_requantization_factor_belongs_to_the_up_half():
    """Taken from the gate half, the result would be off by the ratio of the two scales."""
    layer = make_layer(gate_over_up=10.0, input_scales=(1.6e-3, 1e-2))
    h, routing = inputs(layer, 20)
    rows = routed_rows(load(layer, NVFP4W4A4Experts)(h, routing))
    assert relative_error(rows, exact_rows(layer, h, routing)) < 0.3


def test_activations_cost_more_than_weights_alone():
    layer = make_layer()
    h, routing = inputs(layer, 20)
    exact = exact_rows(layer, h, routing)
    errors = [
        relative_error(routed_rows(load(layer, kind)(h, routing)), exact)
        for kind in (NVFP4Experts, NVFP4W4A4Experts)
    ]
    assert errors[0] < 1e-6
    assert 0.02 < errors[1] < 0.3


def test_scales_of_exactly_one_are_no_scales():
    layer = make_layer()
    scales = layer.tensors[f"{PREFIX}gate_up_proj_input_scale"]
    assert load(layer, NVFP4W4A4Experts).input_scale is None
    scales[3] = 0.25
    scales[5] = 0.125
    experts = load(layer, NVFP4W4A4Experts)
    assert experts.input_scale.item() == 0.25
    assert experts.inner_scale is None


def test_a_token_does_not_feel_its_batch():
    layer = make_layer()
    h, routing = inputs(layer, 12)
    experts = load(layer, NVFP4W4A4Experts)
    together = routed_rows(experts(h, routing))
    for token in (0, 7):
        one = type(routing)(routing.weights[token : token + 1], routing.ids[token : token + 1])
        alone = routed_rows(experts(h[token : token + 1], one))
        assert relative_error(alone, together[token : token + 1]) < 1e-5
