import pytest
import torch
from tests.ops.accuracy import seeded

from musespark.ops.expert_permute import group_by_expert


def check(ids, num_experts):
    groups = group_by_expert(ids, num_experts)
    top_k = ids.shape[1]
    routes = [
        (expert, token, slot)
        for token, row in enumerate(ids.tolist())
        for slot, expert in enumerate(row)
        if expert >= 0
    ]
    routes.sort()  # by expert, then token, then slot
    assert groups.token_index.tolist() == [token for _, token, _ in routes]
    ends = [sum(e <= expert for e, _, _ in routes) for expert in range(num_experts)]
    assert groups.group_ends.tolist() == ends
    assert groups.group_ends.dtype == torch.int32
    expected = torch.full(ids.shape, -1)
    for row, (_, token, slot) in enumerate(routes):
        expected[token, slot] = row
    assert groups.route_index.shape == (len(ids), top_k)
    assert torch.equal(groups.route_index, expected)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 2, 4), (1, 1, 1), (1, 3, 8), (40, 4, 12), (3, 2, 256)]
)
def test_groups_every_route_once_in_order(tokens, top_k, experts):
    scores = torch.rand((tokens, experts), generator=seeded())
    check(scores.argsort(dim=1)[:, :top_k], experts)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_routes_without_an_expert_get_no_row(share):
    ids = torch.randint(6, (30, 4), generator=seeded())
    ids[torch.rand(30, 4, generator=seeded(1)) < share] = -1
    check(ids, 6)


def test_experts_nobody_chose_have_empty_groups():
    check(torch.tensor([[5, 2], [2, 5], [5, 2]]), 9)
