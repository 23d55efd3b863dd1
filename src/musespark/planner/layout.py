"""A layout: how many GPUs in how many nodes, how the model is cut over them, and the shares."""

from collections.abc import Iterator
from dataclasses import dataclass

from musespark.config.model import DecoderConfig, LayerConfig
from musespark.config.parallel import Parallelism
from musespark.errors import ConfigError
from musespark.moe.deployment import validate_deployment


@dataclass(frozen=True, slots=True)
class Stage:
    """The consecutive layers of one pipeline stage."""

    first_layer: int
    layers: tuple[LayerConfig, ...]
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """One model over `nodes` x `gpus_per_node` GPUs."""

    parallelism: Parallelism
    gpus_per_node: int = 1
    nodes: int = 1

    def check(self, config: DecoderConfig) -> None:
        """Refuse what the engine would refuse, and GPUs left over or lacking.

        Raises:
            ConfigError: says which setting to change.
        """
        have, want = self.gpus_per_node * self.nodes, self.parallelism.world_size
        if have != want:
            raise ConfigError(
                f"gpus: tp {self.tp} x pp {self.pp} x dp {self.dp} is a layout for {want} GPUs, "
                f"but there are {have} ({self.nodes} x {self.gpus_per_node}). Change one of them."
            )
        validate_deployment(config, self.parallelism)

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.parallelism.tensor_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.parallelism.pipeline_parallel_size

    @property
    def dp(self) -> int:
        """Replicas of the attention layers."""
        return self.parallelism.data_parallel_size

    @property
    def ep(self) -> int:
        """Processes that a layer's experts are handed out to."""
        return self.parallelism.expert_parallel_size

    @property
    def name(self) -> str:
        """Such as `tp8 ep8`."""
        sizes = {"tp": self.tp, "ep": self.ep, "pp": self.pp, "dp": self.dp}
        return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one GPU"

    def crosses_nodes(self, group_size: int) -> bool:
        """Whether a group of so many neighbouring ranks spans nodes."""
        return group_size > self.gpus_per_node

    def stages(self, config: DecoderConfig) -> Iterator[Stage]:
        """The pipeline's stages, alike to one layer; the longer ones first."""
        for index in range(self.pp):
            here = self.parallelism.layers_of_stage(config.num_hidden_layers, index)
            layers = config.layers[here.start : here.stop]
            yield Stage(here.start, layers, index == 0, index == self.pp - 1)

    def kv_heads(self, config: DecoderConfig) -> int:
        """Key-value heads on one rank; with more ranks than heads, several hold the same one."""
        return max(1, config.num_key_value_heads // self.tp)


def make_layout(
    *, gpus: int, nodes: int, tp: int | None, pp: int | None, ep: int | None, dp: int | None
) -> Layout:
    """The layout that these sizes describe; None: what follows from the others.

    Args:
        gpus: of one node.
        nodes: machines.
        tp: tensor-parallel size.
        pp: pipeline stages.
        ep: processes that experts are handed out to: 1, or tp x dp.
        dp: replicas of the attention layers.

    Raises:
        ConfigError: sizes that exclude each other.
    """
    world = gpus * nodes
    sizes = {"gpus": gpus, "nodes": nodes, "tp": tp, "pp": pp, "ep": ep, "dp": dp}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigError(f"{name}: must be 1 or more, found {size}.")
    pp = pp or 1
    if dp is None:
        dp = 1 if tp is None else max(1, world // (tp * pp))
    tp = tp or max(1, world // (pp * dp))
    if ep not in (None, 1, tp * dp):
        raise ConfigError(
            f"ep: experts are handed out to all tp x dp = {tp} x {dp} = {tp * dp} processes of a "
            f"stage, or cut over tp (ep 1); found {ep}. Set ep to {tp * dp} or 1."
        )
    return Layout(_parallelism(tp, pp, dp, expert_parallel=(ep or 1) > 1), gpus, nodes)


def _parallelism(tp: int, pp: int, dp: int, *, expert_parallel: bool) -> Parallelism:
    # Ranks with requests of their own reach each other's experts by exchanging rows.
    exchanges = expert_parallel and dp > 1
    return Parallelism(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        expert_parallel=expert_parallel,
        sequence_parallel=exchanges and tp > 1,
        moe_backend="all_to_all" if exchanges else "auto",
    )


def candidate_layouts(config: DecoderConfig, gpus: int, nodes: int) -> Iterator[Layout]:
    """Every layout of these GPUs that the engine would accept."""
    world = gpus * nodes
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    for pp in sizes:
        for tp in (size for size in sizes if world % (size * pp) == 0):
            dp = world // (tp * pp)
            for expert_parallel in (False, True) if tp * dp > 1 else (False,):
                try:
                    parallelism = _parallelism(tp, pp, dp, expert_parallel=expert_parallel)
                    layout = Layout(parallelism, gpus, nodes)
                    layout.check(config)
                except ConfigError:
                    continue
                yield layout
