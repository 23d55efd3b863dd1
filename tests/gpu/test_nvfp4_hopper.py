"""NVFP4 and BF16 experts on a Hopper GPU: every compiled configuration against float64."""

from contextlib import contextmanager

import pytest
import torch
from tests.gpu.hopper import needs_hopper
from tests.ops import test_bf16_grouped_gemm_hopper as bf16
from tests.ops import test_nvfp4_hopper as nvfp4
from tests.ops.accuracy import BF16, randn, seeded

from musespark.ops.bf16_grouped_gemm_hopper import TILINGS as BF16_TILINGS
from musespark.ops.bf16_grouped_gemm_hopper import HopperBF16Experts
from musespark.ops.nvfp4_hopper import HopperNVFP4Experts
from musespark.ops.nvfp4_hopper.experts import TILINGS, WARP_TILING, tilings_for

pytestmark = needs_hopper
EXPERTS, TOP_K = 9, 4
# Narrow, of one step of columns; of an odd number of steps; of an even number.
SHAPES = [(128, 128), (384, 128), (256, 640)]
# Whole strips of warps with roles; the ring comes round in the middle of an item.
WIDE_SHAPES = [(512, 256), (1024, 768)]


@contextmanager
def poison():
    """New memory holds NaN, so that nothing unwritten passes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def skewed_ids(tokens):
    """One busy expert, one that has no rows, some routes without an expert."""
    scores = torch.rand(tokens, EXPERTS, generator=seeded(tokens))
    scores[:, 2] = -1.0
    scores[:, 5] += 0.8
    ids = scores.argsort(dim=1, descending=True)[:, :TOP_K]
    return ids.masked_fill(torch.rand(tokens, TOP_K, generator=seeded(1)) < 0.1, -1)


@pytest.mark.parametrize(
    ("width", "inner", "tiling"),
    [(*shape, tiling) for shape in SHAPES for _, tiling in TILINGS]
    + [(*shape, WARP_TILING) for shape in WIDE_SHAPES],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 20, 150, 400])
def test_nvfp4_experts(tiling, width, inner, tokens):
    weights = nvfp4.random_experts(EXPERTS, width, inner)
    x, ids = randn(tokens, width, dtype=BF16, seed=5), skewed_ids(tokens)
    expected = nvfp4.expected_rows(x, ids, weights)
    experts = HopperNVFP4Experts(*(w.cuda() for w in weights))
    with poison():
        rows, index = experts(x.cuda(), ids.cuda(), tiling=tiling)
    assert torch.equal(index.flatten().cpu() >= 0, ids.flatten() >= 0)
    is_here = ids.flatten() >= 0
    assert nvfp4.relative_error(rows.cpu()[is_here], expected[is_here]) < 2.5e-3


@pytest.mark.parametrize("tiling", [tiling for _, tiling in BF16_TILINGS], ids=str)
@pytest.mark.parametrize(("width", "inner"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 20, 150, 400])
def test_bf16_experts(tiling, width, inner, tokens):
    gate_up, down = bf16.random_experts(EXPERTS, width, inner)
    x, ids = randn(tokens, width, dtype=BF16, seed=5), skewed_ids(tokens)
    expected = bf16.expected_rows(x, ids, gate_up, down)
    experts = HopperBF16Experts(gate_up.cuda(), down.cuda())
    with poison():
        rows, _ = experts(x.cuda(), ids.cuda(), tiling=tiling)
    is_here = ids.flatten() >= 0
    assert nvfp4.relative_error(rows.cpu()[is_here], expected[is_here]) < 2.5e-3


def test_a_token_does_not_see_its_batch():
    """Bitwise, whatever the tiling: sums run over the columns in one order."""
    experts = HopperNVFP4Experts(*(w.cuda() for w in nvfp4.random_experts(EXPERTS, 512, 256)))
    x, ids = randn(300, 512, dtype=BF16, seed=5).cuda(), skewed_ids(300).cuda()
    alone, _ = experts(x[:1], ids[:1])
    is_here = ids[0] >= 0
    for _, tiling in (*TILINGS, *tilings_for(512, 256)):
        rows, _ = experts(x, ids, tiling=tiling)
        assert torch.equal(rows[:TOP_K][is_here], alone[is_here])


def test_a_graph_replays_with_other_routes():
    weights = nvfp4.random_experts(EXPERTS, 256, 128)
    experts = HopperNVFP4Experts(*(w.cuda() for w in weights))
    x, ids = randn(6, 256, dtype=BF16, seed=5), skewed_ids(6)
    x_in, ids_in = x.cuda(), torch.full_like(ids, -1).cuda()
    experts(x_in, ids_in)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, index = experts(x_in, ids_in)
    ids_in.copy_(ids)
    graph.replay()
    expected, is_here = nvfp4.expected_rows(x, ids, weights), ids.flatten() >= 0
    assert torch.equal(index.flatten().cpu() >= 0, is_here)
    assert nvfp4.relative_error(rows.cpu()[is_here], expected[is_here]) < 2.5e-3


def test_the_released_widths_have_warps_with_roles():
    assert tilings_for(4096, 4096)[-1][1] is WARP_TILING
    assert tilings_for(128, 128) == TILINGS
