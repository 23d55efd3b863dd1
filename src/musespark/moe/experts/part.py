"""One rank's share of a layer's experts: some of them whole, or all of them cut along I."""

from dataclasses import dataclass

from torch import Tensor

from musespark.config.model import DecoderConfig
from musespark.errors import ConfigError
from musespark.parallel.mesh import Mesh, MeshAxis


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Which experts are here, and which of their intermediate features.

    Expert parallelism hands out whole experts; without it, tensor parallelism cuts each of them
    along I, and every rank's output rows are partial sums.
    """

    num_experts: int
    """E of the whole layer."""
    intermediate: int
    """I of the whole layer."""
    experts: slice
    inner: slice

    @classmethod
    def whole(cls, config: DecoderConfig) -> "ExpertPart":
        """All of it, on one rank."""
        return cls.of(config, Mesh())

    @classmethod
    def of(cls, config: DecoderConfig, mesh: Mesh, granularity: int = 1) -> "ExpertPart":
        """The share of this process.

        Args:
            config: the model.
            mesh: the process's place.
            granularity: features that cannot be cut apart (of a block with one scale).

        Raises:
            ConfigError: the experts, or I, cannot be cut into equal shares.
        """
        num_experts, intermediate = config.num_local_experts, config.moe_intermediate_size
        experts = _share(num_experts, mesh.expert, 1, "num_local_experts", "expert parallelism")
        cut = mesh.tensor if mesh.expert.size == 1 else MeshAxis()
        inner = _share(
            intermediate, cut, granularity, "moe_intermediate_size", "tensor_parallel_size"
        )
        return cls(num_experts, intermediate, experts, inner)

    @property
    def num_experts_here(self) -> int:
        """Experts on this rank."""
        return int(self.experts.stop - self.experts.start)

    @property
    def inner_size(self) -> int:
        """Intermediate features on this rank."""
        return int(self.inner.stop - self.inner.start)

    @property
    def first_expert(self) -> int | None:
        """The id of the first expert here; None where all are."""
        return None if self.num_experts_here == self.num_experts else int(self.experts.start)

    def local_ids(self, ids: Tensor) -> Tensor:
        """Expert ids [T, K] of the whole layer as indices of the experts here; -1: elsewhere."""
        if self.first_expert is None:
            return ids
        local = ids - self.first_expert
        return local.masked_fill_((local < 0) | (local >= self.num_experts_here), -1)

    @property
    def gives_partial_sums(self) -> bool:
        """Whether output rows must be summed over ranks before anything else."""
        return self.inner_size < self.intermediate


def _share(size: int, axis: MeshAxis, granularity: int, field: str, setting: str) -> slice:
    share = size // axis.size
    if size % axis.size or share % granularity:
        unit = f" in blocks of {granularity}" if granularity > 1 else ""
        raise ConfigError(
            f"{setting}: {field} ({size}) cannot be cut into {axis.size} equal shares{unit}. "
            f"Choose a size of {setting} that divides {size // granularity}."
        )
    return slice(axis.rank * share, (axis.rank + 1) * share)
