"""The process mesh: which ranks work together along which axis.

Built once and passed to every module. Modules ask the mesh, never torch.distributed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh as this process sees it."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place along every axis."""

    tensor: MeshAxis = MeshAxis()
    expert: MeshAxis = MeshAxis()
    pipeline: MeshAxis = MeshAxis()
    data: MeshAxis = MeshAxis()


SINGLE_PROCESS = Mesh()
