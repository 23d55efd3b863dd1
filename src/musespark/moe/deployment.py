"""Can this model be spread this way? Asked once, at start-up, before any weight is read."""

from musespark.config.model import DecoderConfig
from musespark.config.parallel import Parallelism
from musespark.errors import ConfigError
from musespark.ops.nvfp4 import GROUP_SIZE

# Rows travel, and the experts' tiles are filled, in blocks of so many features.
_ALL_TO_ALL_BLOCK = 256


def validate_deployment(
    config: DecoderConfig, parallelism: Parallelism, *, kernel_routes: bool = False
) -> None:
    """Refuse a deployment whose parts cannot work together on this model.

    Args:
        config: the model.
        parallelism: the settings, already consistent among themselves.
        kernel_routes: whether the experts' kernel chooses the experts itself, from router logits.

    Raises:
        ConfigError: what does not fit, and which setting to change.
    """
    _check_heads(config, parallelism.tensor_parallel_size)
    _check_layers(config, parallelism.pipeline_parallel_size)
    if config.has_sparse_layers:
        _check_experts(config, parallelism)
        if kernel_routes:
            _check_kernel_routing(config)
    if parallelism.moe_backend == "all_to_all":
        _check_all_to_all(config)
    if parallelism.moe_backend == "w4a4" and config.quantization is None:
        raise ConfigError(
            "moe_backend: w4a4 quantizes the activations of NVFP4 experts, and this checkpoint "
            "has none. Quantize it first (musespark quantize), or set moe_backend to auto."
        )


def _check_heads(config: DecoderConfig, tensor_size: int) -> None:
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % tensor_size:
        raise ConfigError(
            f"tensor_parallel_size: {heads} attention heads cannot be cut into {tensor_size} equal "
            f"shares. Choose a tensor_parallel_size that divides {heads}."
        )
    # With more processes than heads, several hold the same one.
    if shared % tensor_size and tensor_size % shared:
        raise ConfigError(
            f"tensor_parallel_size: {shared} key-value heads can neither be cut into {tensor_size} "
            "equal shares nor be copied to equally many processes each. Choose a "
            f"tensor_parallel_size that divides {shared}, or a multiple of it."
        )


def _check_layers(config: DecoderConfig, pipeline_size: int) -> None:
    if pipeline_size > config.num_hidden_layers:
        raise ConfigError(
            f"pipeline_parallel_size: {pipeline_size} stages for {config.num_hidden_layers} "
            "layers leave some without any. Choose a smaller pipeline_parallel_size."
        )


def _check_experts(config: DecoderConfig, parallelism: Parallelism) -> None:
    if config.num_local_experts % parallelism.expert_parallel_size:
        raise ConfigError(
            f"expert_parallel: {config.num_local_experts} experts cannot be handed out evenly to "
            f"{parallelism.expert_parallel_size} processes (tensor_parallel_size "
            f"{parallelism.tensor_parallel_size} x data_parallel_size "
            f"{parallelism.data_parallel_size}). Change one of these sizes so that their product "
            f"divides {config.num_local_experts}."
        )
    size = parallelism.expert_tensor_size
    block = 1 if config.quantization is None else GROUP_SIZE
    if config.moe_intermediate_size % (size * block):
        reason = f" in blocks of {block}, which share a scale in NVFP4" if block > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size: moe_intermediate_size ({config.moe_intermediate_size}) cannot "
            f"be cut into {size} equal shares{reason}. Choose a tensor_parallel_size that divides "
            f"{config.moe_intermediate_size // block}, or turn expert_parallel on, which leaves "
            "experts whole."
        )


def _check_kernel_routing(config: DecoderConfig) -> None:
    for name, found, needed in (
        ("scoring_func", config.scoring_func, "sigmoid"),
        ("routed_scaling_factor", config.routed_scaling_factor, 1.0),
    ):
        if found != needed:
            raise ConfigError(
                f"moe_backend: its kernel routes by itself, which needs {name} {needed!r}; this "
                f"checkpoint has {found!r}. Set moe_backend to auto, which routes in front of the "
                "kernel."
            )


def _check_all_to_all(config: DecoderConfig) -> None:
    for name in ("moe_hidden_size", "moe_intermediate_size"):
        size = getattr(config, name)
        if size % _ALL_TO_ALL_BLOCK:
            raise ConfigError(
                f"moe_backend: all_to_all needs {name} in multiples of {_ALL_TO_ALL_BLOCK}, found "
                f"{size}. Set moe_backend to auto."
            )
