"""The process mesh: which ranks work together along which axis.

Built once and passed to every module. Modules ask the mesh, never torch.distributed.

Ranks are numbered with the tensor axis fastest, then the pipeline's stages, then data-parallel
replicas: rank = (data * stages + stage) * tensor_size + tensor. So the ranks that talk most stand
on one machine as long as it has room for them.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from musespark.config.parallel import Parallelism
from musespark.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh as this process sees it."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    """What carries messages along the axis; None: nothing can (one rank, or a plan on paper)."""
    spans_nodes: bool = False
    """Whether its ranks are on more than one machine."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size


ALONE = MeshAxis()


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place along every axis."""

    tensor: MeshAxis = ALONE
    """The ranks that share every layer of one stage of one replica."""
    expert: MeshAxis = ALONE
    """The ranks that the experts of a layer are handed out to; alone without expert parallelism."""
    pipeline: MeshAxis = ALONE
    """The stages of one replica."""
    data: MeshAxis = ALONE
    """The replicas."""

    @property
    def is_driver(self) -> bool:
        """Whether this rank's logits are its replica's: the first tensor rank of the last stage.

        The sampler and a draft model live here, so that neither logits nor auxiliary states have
        to travel once more.
        """
        return self.tensor.rank == 0 and self.pipeline.rank == self.pipeline.size - 1


SINGLE_PROCESS = Mesh()


def place_on_mesh(parallelism: Parallelism, rank: int) -> Mesh:
    """Where `rank` stands, without groups to talk through.

    Raises:
        ConfigError: a rank that the mesh does not have.
    """
    axes = {name: _axis(rank, members) for name, members in _members(parallelism, rank).items()}
    return Mesh(**axes)


def build_mesh(parallelism: Parallelism, rank: int, *, timeout: timedelta | None = None) -> Mesh:
    """The mesh as `rank` sees it, with a process group for every axis of more than one rank.

    Every process calls this once, with torch.distributed initialized for as many processes as the
    settings make; one process needs no torch.distributed at all. On a GPU each process has chosen
    its device before (torch.cuda.set_device).

    Args:
        parallelism: the sizes.
        rank: this process's.
        timeout: how long a collective waits for its other ranks; None: the backend's default.

    Raises:
        ConfigError: another number of processes was started than the settings need.
    """
    mesh = place_on_mesh(parallelism, rank)
    if parallelism.world_size == 1:
        return mesh
    _check_world(parallelism)
    nodes: list[str] = [""] * parallelism.world_size
    dist.all_gather_object(nodes, platform.node())
    axes = {}
    for name in ("tensor", "expert", "pipeline", "data"):
        axis: MeshAxis = getattr(mesh, name)
        # All processes make all groups, in the same order, whether they are in them or not.
        for members in _all_members(parallelism, name):
            group = dist.new_group(members, timeout=timeout) if len(members) > 1 else None
            if rank in members:
                spans_nodes = len({nodes[member] for member in members}) > 1
                axis = replace(axis, group=group, spans_nodes=spans_nodes)
        axes[name] = axis
    return Mesh(**axes)


def _members(parallelism: Parallelism, rank: int) -> dict[str, list[int]]:
    """For every axis, the ranks that share it with `rank`, in their order along it."""
    if not 0 <= rank < parallelism.world_size:
        raise ConfigError(
            f"rank: {rank} is outside the {parallelism.world_size} processes that the parallel "
            "sizes make. Start one process per rank, numbered from 0."
        )
    tensor_size, stages = parallelism.tensor_parallel_size, parallelism.pipeline_parallel_size
    replicas = range(parallelism.data_parallel_size)
    tensor = rank % tensor_size
    stage = rank // tensor_size % stages
    replica = rank // (tensor_size * stages)

    def rank_of(data: int, pipeline: int, tensor: int) -> int:
        return (data * stages + pipeline) * tensor_size + tensor

    same_stage = [rank_of(data, stage, t) for data in replicas for t in range(tensor_size)]
    return {
        "tensor": [rank_of(replica, stage, t) for t in range(tensor_size)],
        "expert": same_stage if parallelism.expert_parallel else [rank],
        "pipeline": [rank_of(replica, s, tensor) for s in range(stages)],
        "data": [rank_of(data, stage, tensor) for data in replicas],
    }


def _all_members(parallelism: Parallelism, axis: str) -> list[list[int]]:
    """All groups along one axis, each once."""
    groups = (tuple(_members(parallelism, rank)[axis]) for rank in range(parallelism.world_size))
    return [list(members) for members in dict.fromkeys(groups)]


def _axis(rank: int, members: Sequence[int]) -> MeshAxis:
    return MeshAxis(members.index(rank), len(members))


def _check_world(parallelism: Parallelism) -> None:
    world = dist.group.WORLD
    started = 1 if world is None else world.size()
    if started != parallelism.world_size:
        raise ConfigError(
            f"tensor_parallel_size {parallelism.tensor_parallel_size} x pipeline_parallel_size "
            f"{parallelism.pipeline_parallel_size} x data_parallel_size "
            f"{parallelism.data_parallel_size} makes {parallelism.world_size} processes, but "
            f"{started} {'was' if started == 1 else 'were'} started. Change the sizes, or start "
            f"{parallelism.world_size} processes."
        )
