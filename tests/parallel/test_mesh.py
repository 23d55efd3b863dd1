"""Who stands where on the mesh, and who talks to whom."""

from typing import Any

import pytest

from musespark.config.parallel import Parallelism
from musespark.errors import ConfigError
from musespark.parallel.collectives import all_gather
from musespark.parallel.mesh import SINGLE_PROCESS, MeshAxis, build_mesh, place_on_mesh

ALL_AXES: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 3,
    "data_parallel_size": 2,
}

SHARED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "expert_parallel": True,
    "moe_backend": "all_to_all",
    "sequence_parallel": True,
}


def test_one_process_needs_no_groups():
    assert build_mesh(Parallelism(), 0) == SINGLE_PROCESS
    assert SINGLE_PROCESS.is_driver


def test_rank_order():
    parallelism = Parallelism(**ALL_AXES)
    for rank in range(parallelism.world_size):
        mesh = place_on_mesh(parallelism, rank)
        assert rank == (mesh.data.rank * 3 + mesh.pipeline.rank) * 2 + mesh.tensor.rank
        assert (mesh.tensor.size, mesh.pipeline.size, mesh.data.size) == (2, 3, 2)
        assert (mesh.expert.rank, mesh.expert.size) == (0, 1)


def test_experts_are_handed_out_over_tensor_ranks_and_replicas_of_a_stage():
    for rank in range(4):
        assert place_on_mesh(Parallelism(**SHARED), rank).expert == MeshAxis(rank, 4)
    stages = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "sequence_parallel": False}
    experts = [place_on_mesh(Parallelism(**SHARED | stages), rank).expert for rank in range(4)]
    assert experts == [MeshAxis(0, 2), MeshAxis(0, 2), MeshAxis(1, 2), MeshAxis(1, 2)]


def test_one_driver_for_each_replica():
    parallelism = Parallelism(**ALL_AXES)
    drivers = [rank for rank in range(12) if place_on_mesh(parallelism, rank).is_driver]
    assert drivers == [4, 10]


@pytest.mark.parametrize("rank", [-1, 12])
def test_a_rank_that_is_not_there(rank):
    with pytest.raises(ConfigError, match=f"rank: {rank} is outside the 12 processes"):
        place_on_mesh(Parallelism(**ALL_AXES), rank)


def test_groups_hold_the_ranks_of_their_axis(workers):
    found = workers.run(4, ranks_of_groups, SHARED)
    expert = [0, 1, 2, 3]
    assert found == [
        {"tensor": [0, 1], "expert": expert, "pipeline": [0], "data": [0, 2]},
        {"tensor": [0, 1], "expert": expert, "pipeline": [1], "data": [1, 3]},
        {"tensor": [2, 3], "expert": expert, "pipeline": [2], "data": [0, 2]},
        {"tensor": [2, 3], "expert": expert, "pipeline": [3], "data": [1, 3]},
    ]


def ranks_of_groups(rank, settings):
    import torch

    mesh = build_mesh(Parallelism(**settings), rank)
    axes = {name: getattr(mesh, name) for name in ("tensor", "expert", "pipeline", "data")}
    assert not any(axis.spans_nodes for axis in axes.values())
    return {name: all_gather(torch.tensor([rank]), axis).tolist() for name, axis in axes.items()}


def test_another_number_of_processes_than_the_settings_need(workers):
    assert workers.run(2, mismatch) == [True, True]


def mismatch(rank):
    with pytest.raises(ConfigError, match=r"makes 4 processes, but 2 were started\. Change the"):
        build_mesh(Parallelism(tensor_parallel_size=2, pipeline_parallel_size=2), rank)
    return True
