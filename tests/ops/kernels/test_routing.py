"""The router's product, the choice of experts, and the sort of routes by expert."""

import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_within, randn, seeded
from tests.ops.kernels.device import DEVICE, needs_kernels, on_gpu
from tests.ops.test_route_topk import expected_route

from musespark.ops.expert_permute import group_by_expert, group_by_expert_triton
from musespark.ops.route_topk import route_topk_triton, route_triton
from musespark.ops.router_gemm import router_gemm_triton, split_weight

pytestmark = needs_kernels


@pytest.mark.parametrize(
    ("tokens", "experts", "width"),
    [
        (0, 4, 64),
        (1, 1, 16),
        (3, 8, 200),
        (17, 70, 64),
        (65, 70, 72),
        (513, 12, 64),
        *on_gpu((1, 256, 8192), (33, 256, 8192), (300, 100, 1000), (2048, 256, 8192)),
        *on_gpu((129, 256, 8192), (512, 256, 8192), (1000, 300, 4104), (4096, 256, 8192)),
    ],
)
def test_product_is_as_exact_as_float32(tokens, experts, width):
    x = randn(tokens, width, dtype=BF16, seed=1)
    weight = (randn(experts, width, seed=2) * torch.logspace(-3, 1, experts)[:, None]).to(DEVICE)
    logits = router_gemm_triton(x.to(DEVICE), weight, split_weight(weight)).sum(0).cpu()
    weight = weight.cpu()
    exact = x.to(F64) @ weight.to(F64).T
    size = x.to(F64).abs() @ weight.to(F64).abs().T
    assert_within(logits, exact, 1e-6 * size)


def test_planes_add_up_to_the_weight():
    weight = randn(5, 300, seed=1) * torch.logspace(-6, 6, 5)[:, None]
    planes = split_weight(weight)
    assert planes.shape == (3, 5, 300)
    assert torch.equal(planes.to(F64).sum(0), weight.to(F64))


def check_choice(tokens, experts, top_k, scale, scoring, parts):
    # Sums of equal size whatever the parts: float32's exp(x) is |x| * 2^-24 off.
    logits = randn(parts, tokens, experts, scale=2.0 * parts**-0.5)
    bias = randn(experts, seed=1, scale=0.2)
    weights, ids = route_topk_triton(
        logits.to(DEVICE), bias.to(DEVICE), top_k, scale, scoring=scoring
    )
    summed = torch.zeros(tokens, experts)
    for part in logits:
        summed += part
    exact, expected_ids = expected_route(summed, bias, top_k, scale, scoring)
    weights, ids = weights.cpu(), ids.cpu()
    assert ids.dtype == torch.int64
    assert weights.dtype == F32
    # The kernel's exp is not torch's: what differs may only be scores equal to rounding.
    same = (ids == expected_ids).all(dim=1)
    assert int((~same).sum()) <= tokens // 100
    assert_within(weights[same], exact[same], 4e-6 * exact[same])


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "parts"),
    [
        (0, 8, 2, 1),
        (1, 1, 1, 1),
        (2, 8, 8, 3),
        (5, 12, 5, 1),
        (2, 256, 8, 6),
        *on_gpu((1, 256, 8, 32), (64, 256, 8, 32), (4096, 256, 8, 1)),
    ],
)
def test_choice(tokens, experts, top_k, parts, scale, scoring):
    check_choice(tokens, experts, top_k, scale, scoring, parts)


def test_equal_scores_go_to_the_lowest_ids():
    logits = torch.tensor([0.0, 1.0, 1.0, 0.0]).repeat(1, 3, 16)
    bias = torch.zeros(64)
    _, ids = route_topk_triton(logits.to(DEVICE), bias.to(DEVICE), 34, 1.0)
    ones = [e for e in range(64) if e % 4 in (1, 2)]
    assert ids.tolist() == [[*ones, 0, 3]] * 3


def test_a_bias_may_make_scores_negative():
    logits = torch.tensor([[[-4.0, -3.0, -2.0, -5.0]]])
    bias = torch.full((4,), -3.0)
    _, ids = route_topk_triton(logits.to(DEVICE), bias.to(DEVICE), 3, 1.0)
    assert ids.tolist() == [[2, 1, 0]]


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_whole_router(dtype):
    x, weight = randn(5, 64, dtype=dtype, seed=1), 0.3 * randn(16, 64, seed=2)
    bias = randn(16, seed=3, scale=0.1)
    padding = torch.tensor([False, True, False, False, True])
    weights, ids = route_triton(
        x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), 4, 1.0, padding=padding.to(DEVICE)
    )
    exact, expected_ids = expected_route(x.to(F32) @ weight.T, bias, 4, 1.0)
    weights, ids = weights.cpu(), ids.cpu()
    assert torch.equal(ids[~padding], expected_ids[~padding])
    assert_within(weights[~padding], exact[~padding], 1e-5 * exact[~padding])
    assert bool((ids[padding] == -1).all())
    assert bool((weights[padding] == 0).all())


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [
        (0, 2, 4),
        (1, 1, 1),
        (1, 3, 8),
        (9, 4, 12),
        (3, 2, 256),
        (130, 2, 5),
        *on_gpu((1, 8, 256), (64, 8, 256), (4096, 8, 256), (777, 6, 100)),
    ],
)
@pytest.mark.parametrize("share_absent", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("first_expert", [None, 0, 2])
def test_groups_equal_the_reference(tokens, top_k, experts, share_absent, first_expert):
    total = experts if first_expert is None else experts + 4
    scores = torch.rand((tokens, total), generator=seeded())
    ids = scores.argsort(dim=1)[:, :top_k]
    ids[torch.rand(tokens, top_k, generator=seeded(1)) < share_absent] = -1
    expected = group_by_expert(ids, experts, first_expert)
    groups = group_by_expert_triton(ids.to(DEVICE), experts, first_expert)
    num_rows = expected.token_index.shape[0]
    assert torch.equal(groups.group_ends.cpu(), expected.group_ends)
    assert torch.equal(groups.route_index.cpu(), expected.route_index)
    assert groups.token_index.shape == (ids.numel(),)
    assert torch.equal(groups.token_index.cpu()[:num_rows], expected.token_index)
    assert bool((groups.token_index[num_rows:] == 0).all())
