"""BF16 experts for Hopper, on the GPU or in the interpreter."""

import pytest
import torch
from tests.ops.accuracy import BF16, F64, randn
from tests.ops.test_nvfp4_hopper import (
    DEVICE,
    EXPERTS,
    TOLERANCE,
    needs_kernels,
    random_ids,
    relative_error,
)

from musespark.ops.bf16_grouped_gemm_hopper import BF16Tiling, HopperBF16Experts

TILINGS = {
    "narrow": BF16Tiling(4, 64, 64, (16,), (0,), stages=3),
    "classes": BF16Tiling(4, 64, 64, (16, 32, 32), (0, 0, 16), stages=3),
    "eight warps": BF16Tiling(8, 128, 64, (32, 64), (0, 16), stages=3),
}


def random_experts(num_experts, width, inner):
    gate_up = randn(num_experts, 2 * inner, width, dtype=BF16, seed=1, scale=0.1)
    return gate_up, randn(num_experts, width, inner, dtype=BF16, seed=2, scale=0.1)


def expected_rows(x, ids, gate_up, down, first_expert=0):
    """The formula in float64, with the one rounding in the middle; NaN where no expert is here."""
    rows = torch.full((ids.numel(), x.shape[1]), torch.nan, dtype=F64)
    for expert in range(len(down)):
        routes = (ids.flatten() == expert + first_expert).nonzero().squeeze(1)
        tokens = x[routes // ids.shape[1]].double()
        gate, up = (tokens @ gate_up[expert].double().T).chunk(2, dim=1)
        hidden = (torch.nn.functional.silu(gate) * up).to(BF16).double()
        rows[routes] = hidden @ down[expert].double().T
    return rows


@needs_kernels
@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize(
    ("tokens", "width", "inner", "first", "here"),
    [(1, 128, 128, 0, EXPERTS), (4, 256, 128, 3, 2), (50, 128, 256, 4, 1)],
)
def test_experts(name, tokens, width, inner, first, here):
    x, ids = randn(tokens, width, dtype=BF16, seed=5), random_ids(tokens)
    gate_up, down = random_experts(here, width, inner)
    expected = expected_rows(x, ids, gate_up, down, first)
    experts = HopperBF16Experts(gate_up.to(DEVICE), down.to(DEVICE))
    rows, index = experts(x.to(DEVICE), ids.to(DEVICE), first_expert=first, tiling=TILINGS[name])
    is_here = ~expected[:, 0].isnan()
    assert torch.equal(index.flatten().cpu() >= 0, is_here)
    assert rows.dtype == BF16
    assert relative_error(rows.cpu()[is_here], expected[is_here]) < TOLERANCE


@pytest.mark.parametrize(("width", "inner"), [(192, 128), (128, 192)])
def test_shapes_that_do_not_fit_are_refused(width, inner):
    with pytest.raises(ValueError, match="multiples of 128: found 192"):
        HopperBF16Experts(*random_experts(1, width, inner))
