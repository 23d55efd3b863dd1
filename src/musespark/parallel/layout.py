"""How the model is spread: the settings, and this process's place among the others."""

from dataclasses import dataclass, field

from musespark.config.parallel import ONE, Parallelism
from musespark.parallel.mesh import ALONE, SINGLE_PROCESS, Mesh, MeshAxis
from musespark.parallel.rank_sums import RankSums

# Few tokens do not pay for a gather over the network.
_MIN_TOKENS_ACROSS_NODES = 32


@dataclass(frozen=True, slots=True)
class Layout:
    """What the modules of one process are built by."""

    parallelism: Parallelism = ONE
    mesh: Mesh = SINGLE_PROCESS
    sums: RankSums | None = field(default=None, compare=False)
    """What sums few tokens over the tensor ranks inside other kernels; None: collectives do."""

    def __post_init__(self) -> None:
        settings, mesh = self.parallelism, self.mesh
        assert mesh.tensor.size == settings.tensor_parallel_size
        assert mesh.pipeline.size == settings.pipeline_parallel_size
        assert mesh.data.size == settings.data_parallel_size
        assert mesh.expert.size == settings.expert_parallel_size

    @property
    def tensor(self) -> MeshAxis:
        """The ranks that share every layer."""
        return self.mesh.tensor

    @property
    def expert(self) -> MeshAxis:
        """The ranks that the experts are handed out to."""
        return self.mesh.expert

    @property
    def exchanges_rows(self) -> bool:
        """Whether tokens' rows travel to the ranks of their experts and back."""
        return self.parallelism.moe_backend == "all_to_all" and self.expert.size > 1

    @property
    def projection_axis(self) -> MeshAxis:
        """The ranks that may share a replicated projection's columns among them.

        They must hold the same tokens, so this is one rank alone where replicas have requests of
        their own, and where the stream is always cut along tokens.
        """
        settings = self.parallelism
        always_cut = settings.sequence_parallel and settings.hybrid_token_threshold is None
        return ALONE if always_cut or self.mesh.data.size > 1 else self.tensor

    @property
    def min_unpooler_tokens(self) -> int:
        """From how many tokens on the unpooler's columns are shared."""
        return _MIN_TOKENS_ACROSS_NODES if self.tensor.spans_nodes else 1

    def cuts(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens is cut along them.

        It is as soon as every rank gets a token and the batch is above the hybrid threshold.
        """
        settings = self.parallelism
        least = max(self.tensor.size, (settings.hybrid_token_threshold or 0) + 1)
        return settings.sequence_parallel and num_tokens >= least

    def layers_here(self, num_layers: int) -> range:
        """The layers of this rank's pipeline stage."""
        return self.parallelism.layers_of_stage(num_layers, self.mesh.pipeline.rank)


ONE_PROCESS = Layout()
