"""Where tokens lie: cut, padded, gathered and summed, and when."""

from typing import Any

import pytest
import torch

from musespark.config.parallel import Parallelism
from musespark.modules.linear import ColumnBlock
from musespark.moe.block import CompressedMoE
from musespark.parallel.layout import ONE_PROCESS, Layout
from musespark.parallel.mesh import Mesh, MeshAxis, build_mesh, place_on_mesh
from musespark.parallel.placement import StepPlaces
from musespark.parallel.shard import Share
from musespark.testing import tiny_config

CPU = torch.device("cpu")
CUT: dict[str, Any] = {
    "moe_backend": "all_to_all",
    "expert_parallel": True,
    "sequence_parallel": True,
}


def places(num_tokens, tensor_size, rank=0, padding=None, **settings):
    parallelism = Parallelism(tensor_parallel_size=tensor_size, **settings)
    layout = Layout(parallelism, place_on_mesh(parallelism, rank))
    return StepPlaces.of(layout, num_tokens, padding, CPU)


@pytest.mark.parametrize(
    ("tensor_size", "threshold", "first_cut"), [(2, None, 2), (4, None, 4), (4, 9, 10), (4, 2, 4)]
)
def test_cut_from_as_many_tokens_as_ranks_and_above_the_threshold(
    tensor_size, threshold, first_cut
):
    settings = {**CUT, "hybrid_token_threshold": threshold}
    for num_tokens in range(16):
        step = places(num_tokens, tensor_size, **settings)
        assert step.cut.is_cut == (num_tokens >= first_cut)
        assert not step.whole.is_cut
        assert step.cut.whole is step.whole


def test_never_cut_without_sequence_parallelism():
    step = StepPlaces.of(ONE_PROCESS, 100, None, CPU)
    assert step.cut is step.whole
    x = torch.ones(100, 3)
    assert step.whole.shard(x) is step.whole.gather(x) is step.whole.reduce(x) is x


@pytest.mark.parametrize("num_tokens", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("padded", [None, (1, 2)])
def test_padding_rows_are_told_apart_on_every_rank(num_tokens, padded):
    padding = None
    if padded:
        padding = torch.zeros(num_tokens, dtype=torch.bool)
        padding[list(padded[: num_tokens - 1])] = True
    masks = []
    for rank in range(2):
        place = places(num_tokens, 2, rank, padding, **CUT).cut
        rows = place.shard(torch.ones(num_tokens, 2))
        mask = place.padding
        masks.append(torch.zeros(len(rows), dtype=torch.bool) if mask is None else mask)
        assert len(masks[-1]) == len(rows) == -(-num_tokens // 2)
        if padding is None and mask is not None:
            assert torch.equal(mask, rows[:, 0] == 0)
    mask = torch.cat(masks)
    assert torch.equal(
        mask[:num_tokens], torch.zeros(num_tokens, dtype=torch.bool) if padding is None else padding
    )
    assert bool(mask[num_tokens:].all())


@pytest.mark.parametrize("size", [2, 4])
def test_there_and_back(workers, size):
    assert workers.run(size, check_placement, size) == [True] * size


def check_placement(rank, size):
    parallelism = Parallelism(tensor_parallel_size=size, **CUT)
    layout = Layout(parallelism, build_mesh(parallelism, rank))
    for num_tokens in range(1, 11):
        step = StepPlaces.of(layout, num_tokens, None, CPU)
        x = torch.arange(num_tokens * 3.0).view(num_tokens, 3) + 1
        assert torch.equal(step.whole.reduce(x * (rank + 1)), x * (size * (size + 1) // 2))
        assert torch.equal(step.cut.gather(step.cut.shard(x)), x)
        partial = x * (rank + 1)
        total = step.cut.shard(x * (size * (size + 1) // 2))
        assert torch.equal(step.cut.reduce(partial), total)
        if step.cut.is_cut:
            assert len(step.cut.shard(x)) == -(-num_tokens // size)
    return True


def test_shares():
    parts = [place_on_mesh(Parallelism(tensor_parallel_size=4), rank).tensor for rank in range(4)]
    assert [Share.of(16, axis).index for axis in parts] == [
        slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16)
    ]  # fmt: skip
    # Two heads of eight rows over four ranks: neighbours hold the same one.
    heads = [Share.of(16, axis, units=2) for axis in parts]
    assert [share.index for share in heads] == [slice(0, 8)] * 2 + [slice(8, 16)] * 2
    assert [Share.of(8, axis, units=1).index for axis in parts] == [slice(0, 8)] * 4
    assert Share.whole(7) == Share(7, 0, 7)
    assert heads[0].size == 8


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 4),
        ({"expert_parallel": True}, 4),
        ({"pipeline_parallel_size": 2}, 4),
        ({"data_parallel_size": 2}, 1),
        (CUT, 1),
        ({**CUT, "hybrid_token_threshold": 8}, 4),
    ],
)
def test_who_shares_the_columns_of_projections(settings, size):
    parallelism = Parallelism(tensor_parallel_size=4, **settings)
    layout = Layout(parallelism, place_on_mesh(parallelism, 0))
    assert layout.projection_axis.size == size


@pytest.mark.parametrize(("spans_nodes", "least"), [(False, 1), (True, 32)])
def test_unpoolers_between_machines_are_shared_from_32_tokens_on(spans_nodes, least):
    mesh = Mesh(tensor=MeshAxis(0, 2, spans_nodes=spans_nodes))
    layout = Layout(Parallelism(tensor_parallel_size=2), mesh)
    assert layout.min_unpooler_tokens == least
    block = CompressedMoE(tiny_config(), 0, dtype=torch.float32, device=CPU, layout=layout)
    for tokens in (1, 31, 32, 256, 257):
        pooled = torch.zeros(tokens, block.post_expert_proj.in_features)
        unpooled = block.post_expert_proj.columns(pooled)
        assert isinstance(unpooled, ColumnBlock) == (least <= tokens <= 256)
