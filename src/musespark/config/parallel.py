"""How the model is spread over processes, and what computes its experts; names are vLLM's."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from musespark.errors import ConfigError

MoEBackend = Literal["auto", "reference", "w4a4", "all_to_all"]
"""What computes the routed experts:

- auto: the fastest for the checkpoint's format on this machine; NVFP4 weights meet 16-bit inputs.
- reference: the same numbers from weights in the checkpoint's own layout, slowly.
- w4a4: NVFP4 experts see NVFP4 activations, as on tensor cores that multiply FP4.
- all_to_all: each rank owns different tokens, whose rows travel to the experts' ranks and back.
"""

# The hybrid of both ways to place tokens was made for these.
_HYBRID_TENSOR_SIZES = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Sizes of the process mesh, and the choices that depend on them.

    What depends on the model too is checked by `moe.deployment.validate_deployment`.

    Raises:
        ConfigError: settings that exclude each other; says which one to change.
    """

    tensor_parallel_size: int = 1
    """Processes that share every layer's attention and, without expert parallelism, every
    expert."""
    pipeline_parallel_size: int = 1
    """Stages of consecutive layers."""
    data_parallel_size: int = 1
    """Replicas of the attention layers, each with requests of its own."""
    expert_parallel: bool = False
    """Give each process whole experts, instead of a cut of every one."""
    sequence_parallel: bool = False
    """Cut the residual stream along tokens over the tensor-parallel processes."""
    moe_backend: MoEBackend = "auto"
    """What computes the experts: auto (the fastest for the checkpoint), reference (plain and slow),
    w4a4 (NVFP4 experts see NVFP4 activations, emulated), or all_to_all (tokens' rows travel to the
    processes of their experts and back)."""
    hybrid_token_threshold: int | None = None
    """With all_to_all: batches of up to so many tokens stay replicated; None: none do."""
    fuse_all_reduce: bool | None = None
    """Sum batches of up to 256 tokens over the tensor-parallel processes inside the kernels around
    the sum, through memory that GPUs share; None: where the GPUs of one machine can."""
    enable_lora: bool = field(default=False, metadata={"flag": False})
    """LoRA adapters. Not supported: only False."""
    enable_eplb: bool = field(default=False, metadata={"flag": False})
    """Moving experts between processes by load. Not supported: only False."""
    skip_final_all_reduce: bool = field(default=False, metadata={"flag": False})
    """Leave the last sum over processes to whoever reads the output. Not supported: only False."""

    def __post_init__(self) -> None:
        _check_values(self)
        _refuse_unsupported(self)
        if self.fuse_all_reduce and self.tensor_parallel_size == 1:
            raise ConfigError(
                "fuse_all_reduce: there is nothing to sum over one tensor-parallel process. Raise "
                "tensor_parallel_size, or leave fuse_all_reduce out."
            )
        if self.expert_parallel:
            _check_expert_parallel(self)
        if self.sequence_parallel:
            _check_sequence_parallel(self)
        if self.moe_backend == "all_to_all":
            _check_all_to_all(self)
        if self.hybrid_token_threshold is not None:
            _check_hybrid(self)

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Processes that the experts of a layer are handed out to."""
        return self.tensor_parallel_size * self.data_parallel_size if self.expert_parallel else 1

    @property
    def shares_experts_over_replicas(self) -> bool:
        """Whether all replicas must run each step together."""
        return self.expert_parallel and self.data_parallel_size > 1

    @property
    def layout_name(self) -> str:
        """For people, such as `tp2 pp2`."""
        sizes = {
            "tp": self.tensor_parallel_size,
            "ep": self.expert_parallel_size,
            "sp": self.tensor_parallel_size if self.sequence_parallel else 1,
            "pp": self.pipeline_parallel_size,
            "dp": self.data_parallel_size,
        }
        parts = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        return " ".join(parts) or "one process"

    def driver_rank(self, replica: int) -> int:
        """The rank that schedules and samples for a replica: the first of its last stage."""
        stages = self.pipeline_parallel_size
        return ((replica + 1) * stages - 1) * self.tensor_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """Processes that every expert is cut over."""
        return 1 if self.expert_parallel else self.tensor_parallel_size

    def layers_of_stage(self, num_layers: int, stage: int) -> range:
        """The consecutive layers of a pipeline stage: alike to one layer, the longer ones first."""
        share, longer = divmod(num_layers, self.pipeline_parallel_size)
        first = stage * share + min(stage, longer)
        return range(first, first + share + (stage < longer))


def _check_values(settings: Parallelism) -> None:
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    for name in (*sizes, "hybrid_token_threshold"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}: must be 1 or more, found {value}.")
    if settings.moe_backend not in get_args(MoEBackend):
        raise ConfigError(
            f"moe_backend: must be one of {', '.join(get_args(MoEBackend))}; "
            f"found {settings.moe_backend!r}."
        )


def _refuse_unsupported(settings: Parallelism) -> None:
    if settings.enable_lora:
        raise ConfigError(
            "enable_lora: adapters on the experts are not supported: they apply a route's weight "
            "beside the second product, and this model norms every route's row before it is "
            "weighted. Merge the adapter into the checkpoint and leave enable_lora out."
        )
    if settings.enable_eplb:
        raise ConfigError(
            "enable_eplb: moving experts by load is not supported: every process keeps the experts "
            "it was given at start-up. Leave enable_eplb out."
        )
    if settings.skip_final_all_reduce:
        raise ConfigError(
            "skip_final_all_reduce: partial outputs cannot be handed on: rows that are partial "
            "sums over processes must be summed before the post-expert norm, which is not linear. "
            "Leave skip_final_all_reduce out."
        )


def _check_expert_parallel(settings: Parallelism) -> None:
    if settings.data_parallel_size > 1 and settings.moe_backend != "all_to_all":
        raise ConfigError(
            f"expert_parallel: each of the {settings.data_parallel_size} replicas "
            "(data_parallel_size) holds other tokens, whose rows must travel to the experts and "
            "back. Set moe_backend to all_to_all, or leave expert_parallel out."
        )


def _check_sequence_parallel(settings: Parallelism) -> None:
    if settings.moe_backend != "all_to_all":
        raise ConfigError(
            "sequence_parallel: each process holds other tokens, so summing expert rows over "
            "processes before the post-expert norm would mix tokens; it needs experts that send "
            "rows back to their tokens. Set moe_backend to all_to_all, or leave "
            "sequence_parallel out."
        )
    if settings.tensor_parallel_size == 1:
        raise ConfigError(
            "sequence_parallel: cuts tokens over the tensor-parallel processes, and there is one. "
            "Raise tensor_parallel_size, or leave sequence_parallel out."
        )
    if settings.pipeline_parallel_size > 1:
        raise ConfigError(
            "sequence_parallel: a pipeline stage receives whole residual streams, not cut ones "
            f"(pipeline_parallel_size is {settings.pipeline_parallel_size}). Set "
            "pipeline_parallel_size to 1, or leave sequence_parallel out."
        )


def _check_all_to_all(settings: Parallelism) -> None:
    if not settings.expert_parallel:
        raise ConfigError(
            "moe_backend: all_to_all sends rows to the processes that own whole experts. Turn "
            "expert_parallel on, or choose another moe_backend."
        )
    if settings.tensor_parallel_size > 1 and not settings.sequence_parallel:
        raise ConfigError(
            "moe_backend: all_to_all with tensor_parallel_size "
            f"{settings.tensor_parallel_size} needs every process to own other tokens. Turn "
            "sequence_parallel on, or set tensor_parallel_size to 1."
        )


def _check_hybrid(settings: Parallelism) -> None:
    if settings.moe_backend != "all_to_all":
        raise ConfigError(
            "hybrid_token_threshold: chooses between replicated tokens and all_to_all by the size "
            "of a batch. Set moe_backend to all_to_all, or leave hybrid_token_threshold out."
        )
    for name, allowed in (
        ("tensor_parallel_size", _HYBRID_TENSOR_SIZES),
        ("data_parallel_size", (1,)),
        ("pipeline_parallel_size", (1,)),
    ):
        value = getattr(settings, name)
        if value not in allowed:
            raise ConfigError(
                f"hybrid_token_threshold: needs {name} {' or '.join(map(str, allowed))}, found "
                f"{value}. Change {name}, or leave hybrid_token_threshold out."
            )


ONE = Parallelism()
"""One process, and the fastest experts."""
